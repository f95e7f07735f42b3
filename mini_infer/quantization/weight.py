"""A weight as kernels want it, and what a product with it is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.quantization.formats import (
    ActivationFormat,
    Number,
    Quantized,
    WeightFormat,
    dequantize,
    quantize_tokens,
)
from mini_infer.quantization.packing import pack_int4, unpack_int4


class QuantizedWeight(NamedTuple):
    """A weight [N, K] in a number format; int4 is packed, two codes a byte (`pack_int4`)."""

    codes: Tensor  # [N, K] int8 or float8_e4m3fn, or [N, K / 2] uint8; contiguous
    scales: Tensor  # as WeightFormat.scales_shape: float32, of int4 also the model's dtype
    zeros: Tensor | None  # as scales, int8
    form: WeightFormat

    @classmethod
    def of(cls, quantized: Quantized, form: WeightFormat) -> QuantizedWeight:
        codes = pack_int4(quantized.codes, form.symmetric) if form.number is Number.int4 else quantized.codes
        return cls(codes, quantized.scales, quantized.zeros, form)

    def dequantized(self, in_size: int | None = None) -> Tensor:
        """[N, K] float32. `in_size` is K, of packed codes by default a multiple of 128."""
        codes = self.codes
        if self.form.number is Number.int4:
            codes = unpack_int4(codes, self.form.symmetric, in_size)
        return dequantize(Quantized(codes, self.scales.float(), self.zeros), self.form)


class QuantizedTokens(NamedTuple):
    """Activations x [T, K] after `quantize_tokens`: what some kernel before a product has made already."""

    codes: Tensor  # [T, K] int8 or float8_e4m3fn
    scales: Tensor  # [T, groups] float32
    dtype: torch.dtype  # of x


def quantized_linear_reference(
    x: Tensor | QuantizedTokens,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    activations: ActivationFormat | None = None,
) -> Tensor:
    """The definition: x W^T + b, summed in float32 (in float64 where x is), with x made codes and scales first where
    `activations` says how, if it is not yet. x [T, K], bias [N] -> [T, N] of x's dtype."""
    if isinstance(x, Tensor) and activations is not None:
        x = QuantizedTokens(*quantize_tokens(x, activations), x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    if isinstance(x, Tensor):
        values = x.to(wide)
    else:
        assert activations is not None
        form = WeightFormat(activations.number, activations.columns)
        values = dequantize(Quantized(x.codes, x.scales), form).to(wide)
    y = values @ weight.dequantized(values.shape[1]).to(wide).T
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
