"""Scales for a weight: those that just hold its largest values, or those that fit it better."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_infer.quantization.formats import Number, Quantized, WeightFormat, dequantize, encode, grouped, quantize

SHRUNK = tuple(1 - step / 50 for step in range(1, 21))  # of the range that scales hold: 0.98 to 0.6


def rounded(weight: Tensor, form: WeightFormat, dtype: torch.dtype = torch.float32) -> Quantized:
    """weight [N, K] rounded to nearest (RTN), its scales numbers of `dtype`, in which they will be stored."""
    return _with_scales(weight, quantize(weight, form), form, dtype)


def fitted(weight: Tensor, form: WeightFormat, importance: Tensor, dtype: torch.dtype = torch.float32) -> Quantized:
    """As `rounded`, but a group's scale may cut off its largest values, so far that the squared error, summed over its
    columns by `importance` [K], is least. Formats of 8 bits lose by that: they are `rounded`."""
    best = rounded(weight, form, dtype)
    if form.number is not Number.int4:
        return best
    least = _errors(weight, best, form, importance)
    scales, zeros = best.scales, best.zeros
    for share in SHRUNK:
        tried = _with_scales(weight, quantize(weight * share, form), form, dtype)
        errors = _errors(weight, tried, form, importance)
        better = errors < least
        least, scales = torch.where(better, errors, least), torch.where(better, tried.scales, scales)
        if zeros is not None and tried.zeros is not None:
            zeros = torch.where(better, tried.zeros, zeros)
    return Quantized(encode(weight, scales, zeros, form), scales, zeros)


def _with_scales(weight: Tensor, chosen: Quantized, form: WeightFormat, dtype: torch.dtype) -> Quantized:
    scales = chosen.scales.to(dtype).float()
    return Quantized(encode(weight, scales, chosen.zeros, form), scales, chosen.zeros)


def _errors(weight: Tensor, quantized: Quantized, form: WeightFormat, importance: Tensor) -> Tensor:
    """Of each group, as scales are."""
    squares = (dequantize(quantized, form) - weight).square() * importance
    return grouped(squares, form).sum((1, 3))
