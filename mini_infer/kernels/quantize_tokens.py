"""Activations become 8-bit codes and scales in the step that needs them: one program a row.

A scale is the largest value divided by the largest code, codes are rounded to nearest with ties to even, and both are
true divisions: the codes are those of quantization/formats.py to the bit. Kernels that make x can do it themselves, by
`store_encoded`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.pdl import launch_options
from mini_infer.quantization.formats import ActivationFormat, Number
from mini_infer.quantization.weight import QuantizedTokens

_TIES_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it keeps no digits behind the point
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rounded_to_fp8(x):
    """x float32 -> float32 of 3 bits behind the first one, or a multiple of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
    small = (x + _TIES_TO_EVEN / 512) - _TIES_TO_EVEN / 512
    return tl.where(tl.abs(x) < 2**-6, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def as_fp8(x):
    """x float32 -> float8_e4m3fn, the nearest, ties to even, and the largest instead of more."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if _INTERPRETED:  # it cuts digits off
        x = _rounded_to_fp8(x)
    return x.to(tl.float8e4nv)


@triton.jit
def _encoded(x, SCALE_MAX: tl.constexpr, FP8: tl.constexpr):
    """x [G, C] float32, a group a row -> codes [G, C], scales [G, 1]. Of zeros the scale is 0."""
    scales = tl.math.div_rn(tl.max(tl.abs(x), axis=1, keep_dims=True), SCALE_MAX)
    scaled = tl.math.div_rn(x, tl.where(scales == 0.0, 1.0, scales))
    if FP8:
        codes = as_fp8(scaled)
    else:
        scaled = tl.minimum(tl.maximum(scaled, -SCALE_MAX), SCALE_MAX)
        codes = ((scaled + _TIES_TO_EVEN) - _TIES_TO_EVEN).to(tl.int8)
    return codes, scales


@triton.jit
def store_encoded(
    x, codes_ptr, scales_ptr, row, SIZE: tl.constexpr, GROUP: tl.constexpr, SCALE_MAX: tl.constexpr, FP8: tl.constexpr
):
    """x [BLOCK] float32, a row of SIZE columns and zeros behind them -> its codes and scales to their places."""
    BLOCK: tl.constexpr = x.shape[0]
    codes, scales = _encoded(tl.reshape(x, [BLOCK // GROUP, GROUP]), SCALE_MAX, FP8)
    columns, groups = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    tl.store(scales_ptr + row * GROUPS + groups[:, None], scales, mask=(groups < GROUPS)[:, None])
    tl.store(codes_ptr + row * SIZE + columns, tl.reshape(codes, [BLOCK]), mask=columns < SIZE)


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of the row, up to a power of two
    SCALE_MAX: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    store_encoded(x, codes_ptr, scales_ptr, row, SIZE, GROUP, SCALE_MAX, FP8)


def empty_tokens(x: Tensor, size: int, form: ActivationFormat) -> tuple[QuantizedTokens, dict[str, object]]:
    """Memory for T rows of `size` columns, of x's dtype before; and `store_encoded`'s constants for them.

    Raises ValueError where a group is no power of two, or `size` more than 65,536.
    """
    block = max(triton.next_power_of_2(size), 16)
    group = block if form.columns is None else form.columns
    if group & (group - 1) or block > 65536 or group > block:
        raise ValueError(f"tokens are quantized in groups of a power of two of at most 65,536, not {group} of {size}")
    codes = torch.empty((len(x), size), dtype=form.number.code_dtype, device=x.device)
    scales = torch.empty((len(x), -(-size // group)), dtype=torch.float32, device=x.device)
    constants = {"GROUP": group, "SCALE_MAX": form.number.largest, "FP8": form.number is Number.fp8}
    return QuantizedTokens(codes, scales, x.dtype), constants


def num_warps(block: int) -> int:
    return min(max(block // 1024, 4), 16)


def quantize_tokens(x: Tensor, form: ActivationFormat) -> QuantizedTokens:
    """x [T, K] of any floating dtype, elements of a row adjacent. Raises ValueError as `empty_tokens`."""
    tokens, constants = empty_tokens(x, x.shape[1], form)
    block = max(triton.next_power_of_2(x.shape[1]), 16)
    if len(x):
        _quantize_kernel[(len(x),)](
            x, tokens.codes, tokens.scales, x.stride(0), SIZE=x.shape[1], BLOCK=block, num_warps=num_warps(block),
            **constants, **launch_options(x.device),
        )  # fmt: skip
    return tokens
