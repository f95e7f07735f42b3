"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), alone and fused with the residual addition before it and the
quantization after it.

A program normalises one row, which it holds in registers: every element is read once and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.pdl import launch_options, let_next_start, wait_for_previous
from mini_infer.kernels.quantized.tokens import empty_tokens, store_encoded
from mini_infer.kernels.silu_mul import load_sum
from mini_infer.quantization.formats import ActivationFormat
from mini_infer.quantization.weight import QuantizedTokens


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, computed in float32. Arguments as `rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The definition. Arguments as `add_rms_norm`."""
    residual = residual + x
    return rms_norm_reference(residual, weight, eps), residual


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    more_ptr,  # None, or what is added to x
    residual_ptr,
    weight_ptr,
    normed_ptr,
    scales_ptr,  # None, or where the scales of codes go, which normed_ptr then is for
    sum_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,  # these three of the codes
    SCALE_MAX: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE
    # Ahead of the wait, and of the reduction, behind either of which its latency would come on top.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = load_sum(x_ptr + row, more_ptr if more_ptr is None else more_ptr + row, columns, inside)
    if ADD:
        x += tl.load(residual_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = (x * scale * weight).to(x_ptr.dtype.element_ty)
    if scales_ptr is None:
        tl.store(normed_ptr + row + columns, normed, mask=inside)
    else:  # rounded as between two operations
        program = tl.program_id(0).to(tl.int64)
        store_encoded(normed.to(tl.float32), normed_ptr, scales_ptr, program, 0, SIZE, GROUP, SCALE_MAX, FP8)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32.

    x [T, H] and weight [H], contiguous, of any floating dtypes -> x's shape and dtype. The weight is read early: it may
    not still be being written on the GPU (rule 3 of kernels/pdl.py).
    """
    normed = torch.empty_like(x)
    _launch(x, None, weight, eps, normed)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x), both new, or the sum in `total`; it is rounded to x's dtype before it is
    normalised. `more` is added to x, and may be of another stream's kernel.

    x, more and residual [T, H] of one dtype and weight [H], contiguous; the weight as in `rms_norm`.
    """
    normed = torch.empty_like(x)
    return normed, _launch(x, residual, weight, eps, normed, total=total, more=more)


def quantized_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: ActivationFormat
) -> tuple[QuantizedTokens, Tensor]:
    """As `quantize_tokens` of the norm of `add_rms_norm`, or of `rms_norm` without a residual, to the bit; and the
    sum, or x."""
    tokens, constants = empty_tokens(x, x.shape[1], form)
    return tokens, _launch(x, residual, weight, eps, tokens.codes, tokens.scales, None, None, **constants)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    scales: Tensor | None = None,
    total: Tensor | None = None,
    more: Tensor | None = None,
    **constants: Any,
) -> Tensor:
    rows, size = x.shape
    if total is None:
        total = x if residual is None else torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(size)
        constants = constants or {"GROUP": block, "SCALE_MAX": 1.0, "FP8": False}
        _rms_norm_kernel[(rows,)](
            x, more, residual, weight, normed, scales, total, eps, SIZE=size, BLOCK=block, ADD=residual is not None,
            num_warps=num_warps(block), **constants, **launch_options(x.device, ordinary=more is not None),
        )  # fmt: skip
    return total


def num_warps(block: int) -> int:
    """On an H200 4 are best, or within 1 % of it, for rows of 1024 to 4096, be there 1 of them or 8192."""
    return min(max(block // 1024, 4), 16)
