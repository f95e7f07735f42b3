"""Activations become 8-bit codes and scales in the step that needs them, of few rows each by several programs.

A scale is the largest value divided by the largest code, codes are rounded to nearest with ties to even, and both are
true divisions: the codes are those of quantization/formats.py to the bit. Kernels that make x can do it themselves, by
`store_encoded`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.pdl import launch_options, take_turn
from mini_infer.kernels.silu_mul import gated
from mini_infer.quantization.formats import ActivationFormat, Number
from mini_infer.quantization.weight import QuantizedTokens

_TIES_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it keeps no digits behind the point
_BLOCK = 4096  # columns at a time: 16 bytes a thread
_PROGRAMS = 64  # with fewer rows, a row is shared
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
def _scales(largest, SCALE_MAX: tl.constexpr):
    """(scales, what values are divided by): of zeros the scale is 0."""
    scales = tl.math.div_rn(largest, SCALE_MAX)
    return scales, tl.where(scales == 0.0, 1.0, scales)


@triton.jit
def _codes(x, divisors, SCALE_MAX: tl.constexpr, FP8: tl.constexpr):
    """x [G, C] float32 in units of divisors [G, 1], rounded."""
    if _INTERPRETED:
        scaled = tl.math.div_rn(x, divisors)
    else:  # the same, since the inverse is made once: two steps of Newton's from it (Markstein 1990)
        inverses = tl.broadcast_to(tl.math.div_rn(tl.full(divisors.shape, 1.0, tl.float32), divisors), x.shape)
        divisors = tl.broadcast_to(divisors, x.shape)
        scaled = x * inverses
        scaled = tl.fma(tl.fma(-scaled, divisors, x), inverses, scaled)
        scaled = tl.fma(tl.fma(-scaled, divisors, x), inverses, scaled)
    if FP8:
        codes = as_fp8(scaled)
    else:
        scaled = tl.minimum(tl.maximum(scaled, -SCALE_MAX), SCALE_MAX)
        codes = ((scaled + _TIES_TO_EVEN) - _TIES_TO_EVEN).to(tl.int8)
    return codes


@triton.jit
def store_encoded(
    x, codes_ptr, scales_ptr, row, start, SIZE: tl.constexpr, GROUP: tl.constexpr, SCALE_MAX: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """x [BLOCK] float32, columns from `start` on of a row of SIZE, and zeros behind them -> its codes and scales to
    their places."""
    BLOCK: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [BLOCK // GROUP, GROUP])
    scales, divisors = _scales(tl.max(tl.abs(x), axis=1, keep_dims=True), SCALE_MAX)
    codes = _codes(x, divisors, SCALE_MAX, FP8)
    columns, groups = start + tl.arange(0, BLOCK), start // GROUP + tl.arange(0, BLOCK // GROUP)
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    tl.store(scales_ptr + row * GROUPS + groups[:, None], scales, mask=(groups < GROUPS)[:, None])
    tl.store(codes_ptr + row * SIZE + columns, tl.reshape(codes, [BLOCK]), mask=columns < SIZE)


@triton.jit
def _values(x_ptr, columns, SIZE: tl.constexpr, SILU_MUL: tl.constexpr):
    x = gated(x_ptr, columns, SIZE) if SILU_MUL else tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,  # of a row's columns a program's, a multiple of BLOCK
    SCALE_MAX: tl.constexpr,
    FP8: tl.constexpr,
    SILU_MUL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has a share of a row, and reads the others for the largest value alone."""
    take_turn(PDL)
    SHARES: tl.constexpr = (SIZE + SHARE - 1) // SHARE
    row = (tl.program_id(0) // SHARES).to(tl.int64)
    begin = tl.program_id(0) % SHARES * SHARE
    x_ptr += row * x_stride
    columns = tl.arange(0, BLOCK)
    if SIZE <= BLOCK:
        x = _values(x_ptr, columns, SIZE, SILU_MUL)
        store_encoded(x, codes_ptr, scales_ptr, row, 0, SIZE, GROUP, SCALE_MAX, FP8)
    elif GROUP < BLOCK:
        for start in tl.static_range(0, SHARE, BLOCK):
            x = _values(x_ptr, begin + start + columns, SIZE, SILU_MUL)
            store_encoded(x, codes_ptr, scales_ptr, row, begin + start, SIZE, GROUP, SCALE_MAX, FP8)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        own = ()
        PADDED: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK * BLOCK
        for start in tl.static_range(0, SIZE, BLOCK):
            # The share comes first, and from the last column it goes on with the first.
            here = tl.multiple_of((begin + start) % PADDED, BLOCK) + columns
            x = _values(x_ptr, here, SIZE, SILU_MUL)
            largest = tl.maximum(largest, tl.abs(x))
            if start < SHARE:
                own += (x,)  # type: ignore[assignment]
        scale, divisor = _scales(tl.max(largest, axis=0), SCALE_MAX)
        tl.store(scales_ptr + row, scale)  # every share the same
        for start in tl.static_range(0, SHARE, BLOCK):
            here = begin + start + columns
            codes = _codes(own[start // BLOCK][None, :], tl.full([1, 1], 0.0, tl.float32) + divisor, SCALE_MAX, FP8)
            tl.store(codes_ptr + row * SIZE + here, tl.reshape(codes, [BLOCK]), mask=here < SIZE)


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
    return min(max(block // 256, 4), 16)


def quantize_tokens(x: Tensor, form: ActivationFormat, silu_mul: bool = False) -> QuantizedTokens:
    """x [T, K] of any floating dtype, elements of a row adjacent; with `silu_mul` [T, 2K], of which silu_mul.py's
    product becomes the codes, to the bit. Raises ValueError as `empty_tokens`."""
    rows, size = x.shape[0], x.shape[1] // 2 if silu_mul else x.shape[1]
    tokens, constants = empty_tokens(x, size, form)
    block = min(max(triton.next_power_of_2(size), 16), _BLOCK)
    if rows:
        warps = 32 if size > block and rows <= _PROGRAMS else num_warps(block)
        shares = min(triton.cdiv(size, block), max(_PROGRAMS // rows, 1))
        share = triton.cdiv(triton.cdiv(size, block), shares) * block
        _quantize_kernel[(rows * triton.cdiv(size, share),)](
            x, tokens.codes, tokens.scales, x.stride(0), SIZE=size, BLOCK=block, SHARE=share, SILU_MUL=silu_mul,
            num_warps=warps, **constants, **launch_options(x.device),
        )  # fmt: skip
    return tokens
