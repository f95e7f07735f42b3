"""Quantized numbers: codes, the scales that they are multiplied by, and how both are made of floating point.

A weight W [N, K] becomes codes [N, K] and scales [N / rows, K / columns], each of which `rows` x `columns` codes share:

    a channel   rows 1, columns K        int8 and fp8 weights
    a group     rows 1, columns 128      int4 weights (and their zeros, where they have such)
    a block     rows 128, columns 128    fp8 weights of DeepSeek-V3 (arXiv:2412.19437)

A scale for a whole tensor is kept as one a channel, all equal. Activations x [T, K] get scales [T, K / columns] in the
step that needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class Number(str, Enum):
    int4 = "int4"  # -8 to 7, or 0 to 15 with zeros
    int8 = "int8"  # -127 to 127
    fp8 = "fp8"  # float8_e4m3fn, up to 448

    @property
    def largest(self) -> float:
        """The largest code of a symmetric format: the scale is the largest value divided by it."""
        return {"int4": 7.0, "int8": 127.0, "fp8": 448.0}[self.value]

    @property
    def bits(self) -> int:
        return 4 if self is Number.int4 else 8

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Number.fp8 else torch.int8


@dataclass(frozen=True)
class WeightFormat:
    """
    Attributes:
        columns: neighbours of a row that share a scale; None: the whole row.
        rows: that share a scale, one under the other.
        symmetric: a code of 0 is 0.0; else each scale has a zero beside it: value = (code - zero) * scale. int4 only.
    """

    number: Number
    columns: int | None = None
    rows: int = 1
    symmetric: bool = True

    def scales_shape(self, out_size: int, in_size: int) -> tuple[int, int]:
        """Of a weight [out_size, in_size]. The last group of rows or columns may be smaller."""
        return -(-out_size // self.rows), -(-in_size // (self.columns or in_size))


@dataclass(frozen=True)
class ActivationFormat:
    """Made anew in each step, symmetric, with a scale for each token and `columns` neighbours (None: all K)."""

    number: Number
    columns: int | None = None


@dataclass(frozen=True)
class Scheme:
    """How a linear layer computes. `activations` None: in the model's dtype, and weights are made that dtype again.

    Attributes:
        outliers: the share of input columns that stay in the model's dtype beside the quantized rest.
    """

    weights: WeightFormat
    activations: ActivationFormat | None = None
    outliers: float = 0.0

    def grouped(self, columns: int, symmetric: bool) -> Scheme:
        """With groups of so many columns, where weights are int4; other formats have theirs."""
        if self.weights.number is not Number.int4:
            return self
        return replace(self, weights=replace(self.weights, columns=columns, symmetric=symmetric))

    def num_outliers(self, in_size: int) -> int:
        """In eights, so that rows of their weight begin at multiples of 16 bytes."""
        return min(8 * math.ceil(self.outliers * in_size / 8), in_size)

    def describe(self) -> str:
        """For a run's record: "int4 weights in groups of 128 with zeros", "fp8 weights, fp8 activations"."""
        form, x = self.weights, self.activations
        text = f"{form.number.value} weights"
        if form.rows > 1:
            text += f" in blocks of {form.rows} x {form.columns}"
        elif form.columns is not None:
            text += f" in groups of {form.columns}"
        text += "" if form.symmetric else " with zeros"
        if x is not None:
            text += f", {x.number.value} activations" + (f" in groups of {x.columns}" if x.columns else "")
        return text + (f", {self.outliers:.0%} of columns as they are" if self.outliers else "")


INT8, FP8 = WeightFormat(Number.int8), WeightFormat(Number.fp8)
SCHEMES = {
    "w8a8": Scheme(INT8, ActivationFormat(Number.int8)),
    "w8a16": Scheme(INT8),
    "mixed": Scheme(INT8, ActivationFormat(Number.int8), outliers=0.01),
    "fp8": Scheme(FP8, ActivationFormat(Number.fp8)),
    "fp8_block": Scheme(WeightFormat(Number.fp8, columns=128, rows=128), ActivationFormat(Number.fp8, columns=128)),
    "w4a16": Scheme(WeightFormat(Number.int4, columns=128)),
}


@dataclass(frozen=True)
class Quantized:
    """A matrix in a number format.

    Attributes:
        codes: [N, K] of the number's `code_dtype`; int4 one a byte.
        scales: as `WeightFormat.scales_shape`, float32.
        zeros: as scales, int8, 0 to 15; None where symmetric.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


def quantize(values: Tensor, form: WeightFormat) -> Quantized:
    """values [N, K] floating -> each rounded to the nearest code (RTN), with the scales that just hold the largest.

    Raises ValueError where a value is not finite.
    """
    if not bool(torch.isfinite(values).all()):
        raise ValueError("a weight that is not finite cannot be quantized")
    return _rounded(values, form)


def _rounded(values: Tensor, form: WeightFormat) -> Quantized:
    spread = grouped(values.float(), form)  # [rows of scales, rows, columns of scales, columns]
    if form.symmetric:
        largest = spread.abs().amax((1, 3))
        # By a tensor: on a GPU torch divides by a number as it multiplies by its inverse, which rounds otherwise.
        scales = largest / torch.full_like(largest, form.number.largest)
        return Quantized(encode(values, scales, None, form), scales)
    low, high = spread.amin((1, 3)).clamp_(max=0), spread.amax((1, 3)).clamp_(min=0)
    scales = (high - low) / torch.full_like(low, 15)
    zeros = _divided(-low, scales).round_().to(torch.int8)
    return Quantized(encode(values, scales, zeros, form), scales, zeros)


def encode(values: Tensor, scales: Tensor, zeros: Tensor | None, form: WeightFormat) -> Tensor:
    """The codes [N, K] of values [N, K] with scales and zeros that are given."""
    scaled = _divided(values.float(), spread_scales(scales, form, values.shape))
    if form.number is Number.fp8:
        return scaled.clamp_(-448, 448).to(torch.float8_e4m3fn)
    codes = scaled.round_()
    if zeros is not None:
        return codes.add_(spread_scales(zeros, form, values.shape)).clamp_(0, 15).to(torch.int8)
    largest = form.number.largest
    return codes.clamp_(-largest - (form.number is Number.int4), largest).to(torch.int8)


def dequantize(quantized: Quantized, form: WeightFormat) -> Tensor:
    """[N, K] float32, exact products of codes and scales."""
    codes = quantized.codes.float()
    if quantized.zeros is not None:
        codes = codes - spread_scales(quantized.zeros, form, codes.shape)
    return codes * spread_scales(quantized.scales, form, codes.shape)


def quantize_tokens(x: Tensor, form: ActivationFormat) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes [T, K], scales [T, groups] float32. Rounds to nearest, ties to even."""
    quantized = _rounded(x, WeightFormat(form.number, form.columns))
    return quantized.codes, quantized.scales


def rounded_tokens(x: Tensor, form: ActivationFormat) -> Tensor:
    """x [T, K] -> the numbers that its codes stand for, float32."""
    return dequantize(_rounded(x, WeightFormat(form.number, form.columns)), WeightFormat(form.number, form.columns))


def as_stored(keys: Tensor, values: Tensor, dtype: torch.dtype, kv_scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values [T, Hkv, D] as a cache of `dtype` holds them: divided by kv_scales [2, Hkv], if there are such,
    and float8 as its bytes, which every device can copy."""
    if kv_scales is not None:
        keys, values = keys.float() / kv_scales[0, :, None], values.float() / kv_scales[1, :, None]
    if dtype is torch.float8_e4m3fn:
        return tuple(side.float().clamp(-448, 448).to(dtype).view(torch.uint8) for side in (keys, values))  # type: ignore[return-value]
    return keys.to(dtype), values.to(dtype)


def spread_scales(scales: Tensor, form: WeightFormat, shape: torch.Size) -> Tensor:
    """Scales or zeros of a matrix, one for each of its elements: [N, K]."""
    rows, columns = shape
    wide = scales.repeat_interleave(form.rows, 0)[:rows] if form.rows > 1 else scales
    return wide.repeat_interleave(form.columns or columns, 1)[:, :columns]


def grouped(values: Tensor, form: WeightFormat) -> Tensor:
    """values [N, K], filled up with zeros -> [rows of scales, rows, columns of scales, columns]."""
    rows, columns = values.shape
    high, wide = form.rows, form.columns or columns
    padded = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high))
    return padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)


def _divided(values: Tensor, scales: Tensor) -> Tensor:
    """Where a scale is 0 all its values are, too."""
    return values / torch.where(scales == 0, torch.ones_like(scales), scales)
