"""Products with quantized weights: what they are, for all who compute them.

    weights alone         y = x . dequantize(W)^T + b                                          summed in float32
    activations as well   y = sum over groups of columns of (codes of x . codes of W) * scale of x * scale of W, + b

A group's columns share the scale of x and that of W. Its sum of codes is exact, so a token's result does not depend on
the tokens beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.kernels.interface import QuantizedWeight
from mini_infer.quantization.formats import (
    ActivationFormat,
    Number,
    Quantized,
    WeightFormat,
    dequantize,
    quantize_tokens,
)
from mini_infer.quantization.packing import unpack_int4

_EXACT_COLUMNS = (2**24 - 1) // 128**2  # so many products of int8 codes add up to a whole number that float32 has


def unpacked(weight: QuantizedWeight, columns: int) -> Quantized:
    """The codes [N, columns] one a byte, with scales in float32."""
    codes, scales, zeros, form = weight
    if form.number is Number.int4:
        codes = unpack_int4(codes, columns).to(torch.int8)
        codes = codes - 8 if zeros is None else codes
    return Quantized(codes, scales.float(), zeros)


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activations: ActivationFormat | None
) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] of x's dtype."""
    columns, form = x.shape[1], weight.form
    quantized = unpacked(weight, columns)
    if activations is None:
        y = F.linear(x.float(), dequantize(quantized, form), None if bias is None else bias.float())
        return y.to(x.dtype)
    codes, scales = quantize_tokens(x, activations)
    widths = [width for width in (form.columns, activations.columns) if width is not None]
    width = min(widths, default=columns)
    if any(other % width for other in widths):
        raise ValueError(f"groups of {widths[0]} columns of a weight do not go with {widths[1]} of activations")
    out_size = quantized.codes.shape[0]
    y = torch.zeros(len(x), out_size, device=x.device)
    for start in range(0, columns, width):
        group = slice(start, min(start + width, columns))
        w_codes = quantized.codes[:, group]
        exact = torch.float32 if form.number is not Number.fp8 and width <= _EXACT_COLUMNS else torch.float64
        if quantized.zeros is not None:
            zeros = quantized.zeros[:, start // (form.columns or columns), None]
            w_codes = w_codes - zeros
        product = F.linear(codes[:, group].to(exact), w_codes.to(exact)).float()
        y += product * scales[:, start // (activations.columns or columns), None] * _of_group(quantized, form, start)
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype)


def _of_group(quantized: Quantized, form: WeightFormat, start: int) -> Tensor:
    """The scale of each output in the group of columns that begins at `start`: [N]."""
    scales = quantized.scales[:, 0 if form.columns is None else start // form.columns]
    return scales.repeat_interleave(form.rows)[: quantized.codes.shape[0]]
