"""x W^T for a few rows of x and W in 8 or 4 bits, where the time is the time to read W once; and what stands around.

As kernels/gemv.py, whose ends (SiLU-mul, residual, rotation) these kernels have, for formats of linear.py that
have a scale a row, or are int4. Two kernels:

    `_fma_kernel`   one row of x: 16-byte loads of W into registers and multiply-adds there. int8 four products an
                    instruction (dp4a), fp8 two, in float16, whose sums of two change the result by some 0.06 %. For
                    int4, x becomes fixed-point numbers of 16 bits, whose high and low bytes are multiplied like int8:
                    two thirds of the time of products in float32. A unit is 1 / 32,767 of the largest of 32 columns,
                    which changes their sum some 20 times less than rounding the result to bfloat16 does.
    `_dot_kernel`   tensor cores, with as many rows as a tile has. Where W has too few rows for all SMs, a program has a
                    part of K only, by W's shape alone, and the last of a tile to finish adds the parts up, in order.

Sums of int8 products are exact, so that either gives linear.py's bits. Others sum in an order of their own, which
is one for any number of rows that the same kernel and tile take.

Both are programmatic dependents (kernels/pdl.py). Before they wait for x they ask for the first of their weights, which
depend on nobody: into registers, or L2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.gemv_kernels import _load_places, _owned_rows, _rotate_and_store, _silu_mul
from mini_infer.kernels.interface import Places
from mini_infer.kernels.paged_prefill import DOT_DTYPES
from mini_infer.kernels.pdl import bring_to_l2, launch_options
from mini_infer.kernels.quantized.split import added_up, scratch
from mini_infer.kernels.quantized.unpack import CHUNK, PLANE, group_scales, scaled_sum, unpacked_planes
from mini_infer.quantization.formats import ActivationFormat, Number
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PREFETCH = 512  # bytes of a row of W, or of a part of it, that are asked for before x is there


@triton.jit
def _dot4(w, x, sums, UNSIGNED: tl.constexpr = False):
    """int32 words of four int8 each, or of uint8 those of x: sums plus their four products."""
    if _INTERPRETED:
        for i in tl.static_range(4):
            digit = (x >> 8 * i) & 255 if UNSIGNED else x << (24 - 8 * i) >> 24
            sums += (w << (24 - 8 * i) >> 24) * digit
    else:
        OF: tl.constexpr = "s32.u32" if UNSIGNED else "s32.s32"
        sums = tl.inline_asm_elementwise(f"dp4a.{OF} $0, $1, $2, $3;", "=r,r,r,r", [w, x, sums], tl.int32, True, 1)
    return sums


@triton.jit
def _fp8_halves(x):
    """int32 words of four e4m3: the lower and the upper two as float16, an eighth of each, two in a word."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 a, b; .reg .b32 s, t, u; mov.b32 {a, b}, $2; mov.b32 u, 0x30003000;
        cvt.rn.f16x2.e4m3x2 s, a; cvt.rn.f16x2.e4m3x2 t, b; mul.rn.f16x2 $0, s, u; mul.rn.f16x2 $1, t, u; }""",
        "=r,=r,r", [x], (tl.int32, tl.int32), True, 1,
    )  # fmt: skip


@triton.jit
def _add_fp8_products(sums, w, x):
    """sums plus an eighth of four products of e4m3. A product has eight digits and an eighth of two is below float16's
    largest, so that float16 holds it, and rounds the sum of two to eleven digits before float32 takes it."""
    if _INTERPRETED:
        for i in tl.static_range(4):
            one = (w >> 8 * i).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            sums += one * ((x >> 8 * i).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 0.125)
    else:
        low, high = _fp8_halves(x)
        sums = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .b32 s, t; .reg .f32 f, g; mov.b32 {a, b}, $1;
            cvt.rn.f16x2.e4m3x2 s, a; cvt.rn.f16x2.e4m3x2 t, b;
            mul.rn.f16x2 s, s, $2; fma.rn.f16x2 s, t, $3, s; mov.b32 {a, b}, s;
            cvt.f32.f16 f, a; cvt.f32.f16 g, b; add.f32 f, f, g; add.f32 $0, f, $4; }""",
            "=f,r,r,r,f", [w, tl.broadcast_to(low, w.shape), tl.broadcast_to(high, w.shape), sums],
            tl.float32, True, 1,
        )  # fmt: skip
    return sums


@triton.jit
def _early(residual_ptr, out_ptr, places, rotary_stride, outs, tokens, some, N: tl.constexpr, BLOCK_N: tl.constexpr,
           Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """What the end needs beside y, asked for before the loop, so that nothing waits for it there."""
    loaded = ()
    if residual_ptr is not None:
        inside = some[None, :] & (outs < N)[:, None]
        loaded = (tl.load(residual_ptr + tokens[None, :] * N + outs[:, None], mask=inside, other=0.0),)  # type: ignore[assignment]
    if HALF:
        loaded = _load_places(places, rotary_stride, out_ptr, tokens, some, BLOCK_N, Q_HEADS, KV_HEADS, HALF)
    return loaded


@triton.jit
def _finish(
    y, x_scales_ptr, scales, bias, loaded, out_ptr, outs, tokens, some, N: tl.constexpr, BLOCK_N: tl.constexpr,
    SILU_MUL: tl.constexpr, ADD: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Of sums y [BLOCK_N, tokens] the result to its place, rounded as between operations. scales, bias [BLOCK_N]."""
    dtype = out_ptr.dtype.element_ty
    T: tl.constexpr = y.shape[1]
    factors = tl.broadcast_to(scales[:, None], y.shape)
    if x_scales_ptr is not None:  # in the order of linear.py
        factors = tl.load(x_scales_ptr + tokens, mask=some, other=0.0)[None, :] * factors
    y = tl.fma(y.to(tl.float32), factors, tl.broadcast_to(bias[:, None], y.shape))
    if HALF:
        _rotate_and_store(y, loaded, outs, some, dtype, BLOCK_N, T, (Q_HEADS + KV_HEADS) * 2 * HALF)
    else:
        if SILU_MUL:
            y = _silu_mul(y, dtype, BLOCK_N // 2, T)
        if ADD:
            y = y.to(dtype).to(tl.float32) + loaded[0].to(tl.float32)
        at = tokens.to(tl.int64)[None, :] * N + outs[:, None]
        tl.store(out_ptr + at, y.to(dtype), mask=some[None, :] & (outs < N)[:, None])


@triton.jit
def _row_values(scales_ptr, bias_ptr, w_rows, GROUP: tl.constexpr):
    """Scale and bias of rows of W; of a group's scales, which the sums have already, 1."""
    scales = tl.full(w_rows.shape, 1.0, tl.float32)
    if GROUP is None:
        scales = tl.load(scales_ptr + w_rows).to(tl.float32)
    bias = tl.zeros(w_rows.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    return scales, bias


@triton.jit
def _load_tile(w_ptrs, columns, start, WIDTH: tl.constexpr, ZEROS: tl.constexpr):
    """A tile of W from column `start` on, which is read once; beyond the end zeros or anything."""
    left = (start + columns < WIDTH)[None, :]
    if ZEROS:
        w = tl.load(w_ptrs + start, mask=left, other=0.0, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs + start, mask=left, eviction_policy="evict_first")
    return w


@triton.jit
def _fma_kernel(
    x_ptr,  # int32 words of fp8, of int8 or of x's dtype
    x_scales_ptr,
    weight_ptr,  # int32 words of fp8, int8 or int4
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    places,
    stride_x,
    rotary_stride,
    T: tl.constexpr,
    N: tl.constexpr,  # as `outs` of gemv_kernels.py: half the rows of W, where SILU_MUL
    K: tl.constexpr,
    BITS: tl.constexpr,  # 4, 8; of fp8 0
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # words
    SILU_MUL: tl.constexpr,
    ADD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has all of K for some rows of W."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    outs, w_rows = _owned_rows(N, BLOCK_N, SILU_MUL, HALF)
    WIDTH: tl.constexpr = K // 8 if BITS == 4 else K // 4  # of a row of W, in words
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    ZEROS: tl.constexpr = BITS == 0 and WIDTH % BLOCK_K != 0  # whole numbers are multiplied by zeros of x
    next_w = _load_tile(w_ptrs, columns, 0, WIDTH, ZEROS)
    next_scales, next_zeros = (), ()
    if BITS == 4:
        next_scales = _group_values(scales_ptr, w_rows, 0, K, GROUP, BLOCK_K)
        if zeros_ptr is not None:
            next_zeros = _group_values(zeros_ptr, w_rows, 0, K, GROUP, BLOCK_K)
    scales, bias = _row_values(scales_ptr, bias_ptr, w_rows, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
    late = ()
    for t in tl.static_range(T):
        token = t + tl.arange(0, 1)
        late += (  # type: ignore[assignment]
            _early(residual_ptr, out_ptr, places, rotary_stride, outs, token, token < T, N, BLOCK_N,
                   Q_HEADS, KV_HEADS, HALF),
        )  # fmt: skip
    SUM: tl.constexpr = tl.int32 if BITS == 8 else tl.float32
    sums = (tl.zeros([BLOCK_N, BLOCK_K // 4 if BITS == 4 else BLOCK_K], SUM),) * T
    for start in range(0, WIDTH, BLOCK_K):
        here = start + columns
        left = here < WIDTH
        w, w_scales, w_zeros = next_w, next_scales, next_zeros
        if BLOCK_K < WIDTH:  # a turn ahead, and the first before the kernel before has ended
            next_w = _load_tile(w_ptrs, columns, start + BLOCK_K, WIDTH, ZEROS)
            if BITS == 4:
                next_scales = _group_values(scales_ptr, w_rows, start + BLOCK_K, K, GROUP, BLOCK_K)
                if zeros_ptr is not None:
                    next_zeros = _group_values(zeros_ptr, w_rows, start + BLOCK_K, K, GROUP, BLOCK_K)
        if BITS == 4:
            sums = _add_int4_products(
                sums, w, w_scales, w_zeros, x_ptr, stride_x, start, T, K, GROUP, BLOCK_N, BLOCK_K,
                out_ptr.dtype.element_ty,
            )  # fmt: skip
        else:
            more = ()
            for t in tl.static_range(T):
                x = tl.load(x_ptr + t * stride_x + here, mask=left, other=0, eviction_policy="evict_last")
                if BITS == 8:
                    more += (_dot4(w, tl.broadcast_to(x[None, :], w.shape), sums[t]),)  # type: ignore[assignment]
                else:
                    more += (_add_fp8_products(sums[t], w, x[None, :]),)  # type: ignore[assignment]
            sums = more
    for t in tl.static_range(T):
        token = t + tl.arange(0, 1)
        y = tl.sum(sums[t], axis=1)[:, None]
        if BITS == 0:
            y *= 8.0
        _finish(y, x_scales_ptr, scales, bias, late[t], out_ptr, outs, token, token < T, N, BLOCK_N, SILU_MUL, ADD,
                Q_HEADS, KV_HEADS, HALF)  # fmt: skip


@triton.jit
def _group_values(ptr, w_rows, start, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr):
    """Scales or zeros of the groups of BLOCK_W words from `start` on: for each group of a chunk one of a tuple,
    [rows, BLOCK_W / 4], as four words are of one chunk. Where GROUP is None, and the scale is not theirs, of all."""
    QUADS: tl.constexpr = BLOCK_W // 4
    chunks = (start // 4 + tl.arange(0, QUADS)) // (PLANE // 8) * CHUNK
    there = tl.broadcast_to((chunks < K)[None, :], [w_rows.shape[0], QUADS])
    GROUPS: tl.constexpr = 1 if GROUP is None else K // GROUP
    SHARED: tl.constexpr = CHUNK if GROUP is None or GROUP > CHUNK else GROUP
    found = ()
    for column in tl.static_range(0, CHUNK, SHARED):
        at = tl.broadcast_to((w_rows * GROUPS)[:, None], [w_rows.shape[0], QUADS])
        if GROUP is not None:
            at += ((chunks + column) // GROUP)[None, :]
        found += (tl.load(ptr + at, mask=there, other=0),)  # type: ignore[assignment]
    return found


@triton.jit
def _fixed_point(x_ptrs, left, DTYPE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Of the columns of BLOCK_W words: four words of bytes, the low and the high ones of planes 0 and 2 and those of
    1 and 3, and the unit of each four words, [BLOCK_W / 4]: the largest of their 32 columns is 32,767 units."""
    QUADS: tl.constexpr = BLOCK_W // 4
    numbers = ()
    largest = tl.zeros([BLOCK_W], tl.float32)
    for plane in tl.static_range(4):
        pairs = tl.load(x_ptrs + PLANE // 2 * plane, mask=left, other=0)
        first = pairs.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        second = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(tl.abs(first), tl.abs(second)))
        numbers += (first, second)  # type: ignore[assignment]
    # Smaller than any product that counts, and with an inverse.
    largest = tl.maximum(tl.max(tl.reshape(largest, [QUADS, 4]), axis=1), 2.0**-100)
    inverse = tl.broadcast_to((32767.0 / largest)[:, None], [QUADS, 4])
    inverse = tl.reshape(inverse, [BLOCK_W])
    digits = ()
    for plane in tl.static_range(2):
        digits += _bytes(
            _whole(numbers[2 * plane], inverse), _whole(numbers[2 * plane + 1], inverse),
            _whole(numbers[2 * plane + 4], inverse), _whole(numbers[2 * plane + 5], inverse),
        )  # fmt: skip
    return digits, largest / 32767.0


@triton.jit
def _whole(x, inverse):
    """x in units, rounded, in the low 16 bits."""
    return tl.fma(x, inverse, tl.full(x.shape, 12582912.0, tl.float32)).to(tl.int32, bitcast=True)  # 1.5 * 2^23


@triton.jit
def _bytes(a, b, c, d):
    """Of the low 16 bits of four words the low and the high bytes, each a word, in the order a, c, b, d."""
    if _INTERPRETED:
        low = (a & 255) | ((c & 255) << 8) | ((b & 255) << 16) | ((d & 255) << 24)
        high = ((a >> 8) & 255) | (c & 0xFF00) | ((b & 0xFF00) << 8) | ((d & 0xFF00) << 16)
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 p, q; prmt.b32 p, $2, $4, 0x5410; prmt.b32 q, $3, $5, 0x5410;
            prmt.b32 $0, p, q, 0x6420; prmt.b32 $1, p, q, 0x7531; }""",
            "=r,=r,r,r,r,r", [a, b, c, d], (tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    return low, high


@triton.jit
def _byte_products(words, digits, low, high, less, ODD: tl.constexpr, SHARED: tl.constexpr, PLACE: tl.constexpr):
    """low and high plus products of x's bytes and the codes of planes ODD and ODD + 2, which are bytes of a word; less
    plus those of ones. Of these planes, such as are in the chunk's PLACE-th group, which SHARED make up."""
    FIRST: tl.constexpr = 0x00010001 if ODD // SHARED == PLACE else 0
    SECOND: tl.constexpr = 0x01000100 if (ODD + 2) // SHARED == PLACE else 0
    if FIRST + SECOND != 0:
        x_low, x_high = digits[2 * ODD], digits[2 * ODD + 1]
        codes = (words >> (4 * ODD)) & (15 * (FIRST + SECOND))
        low = _dot4(codes, tl.broadcast_to(x_low[None, :], codes.shape), low, True)
        high = _dot4(codes, tl.broadcast_to(x_high[None, :], codes.shape), high)
        ones = tl.full(less.shape, FIRST + SECOND, tl.int32)
        less = _dot4(ones, x_low, less + _dot4(ones, x_high, tl.zeros_like(less)) * 256, True)
    return low, high, less


@triton.jit
def _add_int4_products(
    sums, words, scales, zeros, x_ptr, stride_x, start, T: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, BLOCK_W / 4] of each row of x, plus products of words of eight codes: nibble `plane` of the halves
    of word w of a chunk is of the columns PLANE * plane + 2 * w and the next.

    scales, zeros: of `_group_values`, () where there are none.
    """
    QUADS: tl.constexpr = BLOCK_W // 4  # of words, which have one group and one thread
    SHARED: tl.constexpr = CHUNK // PLANE if GROUP is None or GROUP > CHUNK else GROUP // PLANE  # planes a group
    here = start + tl.arange(0, BLOCK_W)
    x_ptrs = x_ptr + here // (PLANE // 2) * (CHUNK // 2) + here % (PLANE // 2)
    new = ()
    for t in tl.static_range(T):
        digits, unit = _fixed_point(x_ptrs + t * stride_x, here < K // 8, DTYPE, BLOCK_W)
        y = sums[t]
        for begin in tl.static_range(0, CHUNK // PLANE, SHARED):
            low = tl.zeros([BLOCK_N, BLOCK_W], tl.int32)
            high = low
            less = tl.zeros([BLOCK_W], tl.int32)
            for odd in tl.static_range(2):
                low, high, less = _byte_products(words, digits, low, high, less, odd, SHARED, begin // SHARED)
            low = tl.sum(tl.reshape(low, [BLOCK_N, QUADS, 4]), axis=2)
            high = tl.sum(tl.reshape(high, [BLOCK_N, QUADS, 4]), axis=2)
            less = tl.sum(tl.reshape(less, [QUADS, 4]), axis=1)[None, :]
            if len(zeros) == 0:
                part = high * 256 + (low - less * 8)
            else:
                part = high * 256 + (low - less * zeros[begin // SHARED].to(tl.int32))
            scale = tl.broadcast_to(unit[None, :], [BLOCK_N, QUADS])
            if GROUP is not None:
                scale *= scales[begin // SHARED].to(tl.float32)
            y += scale * part.to(tl.float32)
        new += (y,)  # type: ignore[assignment]
    return new


@triton.jit(do_not_specialize=["T"])
def _dot_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,  # [N, K], or int16 words of four int4
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    places,
    parts_ptr,  # of `added_up`, as tickets_ptr
    tickets_ptr,
    stride_x,
    rotary_stride,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ADD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one of SPLITS parts of K, axis 1 of the grid, for some rows of W and all of x."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    outs, w_rows = _owned_rows(N, BLOCK_N, SILU_MUL, HALF)
    STEPS: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS
    k_begin = tl.program_id(1) * STEPS * BLOCK_K
    k_end = tl.minimum(k_begin + STEPS * BLOCK_K, K)
    WIDTH: tl.constexpr = K // 4 if PACKED else K
    if PREFETCH:
        BYTES: tl.constexpr = K // 2 if PACKED else K
        bring_to_l2(weight_ptr + k_begin // (K // WIDTH), w_rows, BYTES, PREFETCH)
    scales, bias = _row_values(scales_ptr, bias_ptr, w_rows, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tokens = tl.arange(0, BLOCK_T)
    some = tokens < T
    loaded = _early(
        residual_ptr, out_ptr, places, rotary_stride, outs, tokens, some, N, BLOCK_N, Q_HEADS, KV_HEADS, HALF
    )
    TILE: tl.constexpr = BLOCK_K if not PACKED else CHUNK if GROUP is None else GROUP
    columns = tl.arange(0, TILE)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, PLANE if PACKED else BLOCK_K)[None, :]
    x_ptrs = x_ptr + tokens[None, :] * stride_x + columns[:, None]
    SUM: tl.constexpr = tl.int32 if tl.int8 == DOT else tl.float32
    y = tl.zeros([BLOCK_N, BLOCK_T], SUM)
    if PACKED:
        next_scales = group_scales(scales_ptr, w_rows, k_begin, K, GROUP, BLOCK_K)  # a step ahead
        for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
            now = next_scales
            next_scales = group_scales(scales_ptr, w_rows, k + BLOCK_K, K, GROUP, BLOCK_K)
            for column in tl.static_range(0, BLOCK_K, TILE):
                if column // PLANE % 4 == 0:  # planes a chunk
                    words = tl.load(w_ptrs + (k + column) // 4, eviction_policy="evict_first")
                x = tl.load(x_ptrs + (k + column), mask=some[None, :], other=0.0).to(DOT)
                w = unpacked_planes(
                    words, column // PLANE % 4, TILE // PLANE, zeros_ptr, w_rows, k + column, K, GROUP, DOT
                )
                y = scaled_sum(tl.dot(w, x), now, column, y, GROUP)
    else:
        for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                w = tl.load(w_ptrs + k, eviction_policy="evict_first")
                x = tl.load(x_ptrs + k, mask=some[None, :], other=0.0)
            else:
                left = columns < K - k
                w = tl.load(w_ptrs + k, mask=left[None, :], other=0.0, eviction_policy="evict_first")
                x = tl.load(x_ptrs + k, mask=left[:, None] & some[None, :], other=0.0)
            if _INTERPRETED and tl.float8e4nv == DOT:  # numpy has no such
                w, x = w.to(tl.float32), x.to(tl.float32)
            if tl.float8e4nv == DOT:  # of whose sums tensor cores do not keep all digits
                y += tl.dot(w, x)
            else:
                y = tl.dot(w, x, y, out_dtype=SUM)
    if SPLITS > 1:
        y, last = added_up(y, parts_ptr, tickets_ptr, tl.program_id(0), SPLITS)
        if not last:
            return
    _finish(y, x_scales_ptr, scales, bias, loaded, out_ptr, outs, tokens, some, N, BLOCK_N, SILU_MUL, ADD,
            Q_HEADS, KV_HEADS, HALF)  # fmt: skip


class FmaTile(NamedTuple):
    rows: int  # of W, a program
    k: int  # 16-byte loads of a row a thread of a program
    num_warps: int


class DotTile(NamedTuple):
    rows: int  # of W, a program
    k: int  # columns a step
    tokens: int
    num_warps: int
    num_stages: int
    splits: int  # of K


def tile_for(rows: int, number: Number, out_size: int, in_size: int) -> FmaTile | DotTile | None:
    """The best on an H200 by the products of Qwen2.5-7B; None: linear.py is the faster."""
    most = max(8, triton.next_power_of_2(rows))
    few, long = out_size <= 8192, in_size > 8192  # rows of W, too few for all SMs; rows that go a long way
    if number is Number.int4:
        return _int4_tile_for(rows, most, few, long)
    if rows == 1 and number is Number.int8:
        return FmaTile(2, 1, 8) if long else FmaTile(4, 1, 4)
    if rows == 1:
        return FmaTile(4, 1, 4 if few and not long else 8)
    if rows <= 16:
        return DotTile(16, 256, most, 1, 6 if few else 4, 4 if few and (long or number is Number.fp8) else 1)
    if rows <= 64 and few and long:
        return DotTile(64, 256, most, 4, 3, 4) if number is Number.int8 else DotTile(64, 128, most, 4, 6, 4)
    return None


def _int4_tile_for(rows: int, most: int, few: bool, long: bool) -> FmaTile | DotTile | None:
    if rows == 1:
        return FmaTile(8 if few and not long else 16, 1, 4)
    if rows <= 16:
        if not few:
            return DotTile(32, 256, most, 2, 4, 1)
        return DotTile(64, 512, most, 4, 3, 12 if long else 7)
    if rows <= 64:
        return DotTile(64, 128, most, 4, 4 if long else 3, 4 if few else 1)
    return None


def worth_it(weight: QuantizedWeight, activations: ActivationFormat | None, rows: int, dtype: torch.dtype) -> bool:
    """Whether `quant_gemv` has these formats, and is the fastest."""
    form, (out_size, in_size) = weight.form, weight.codes.shape
    if form.number is Number.int4:
        in_size *= 2
        fits = activations is None and dtype != torch.float32
    else:
        fits = activations is not None and form.columns is None and form.rows == 1 and activations.columns is None
        fits &= in_size % 16 == 0
    return bool(fits) and rows > 0 and tile_for(rows, form.number, out_size, in_size) is not None


def quant_gemv(
    x: Tensor | QuantizedTokens,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    places: Places | None = None,
    tile: FmaTile | DotTile | None = None,
) -> Tensor:
    """x W^T + bias -> [T, N] of x's dtype, rounded as each operation of its own would be.

    Args:
        x: [T, K], of formats that `worth_it` says.
        weight: [N, K]; not still being written on the GPU (rule 3 of kernels/pdl.py), as little as bias.
        bias: [N].
        residual: [T, N], contiguous, of x's dtype, added to the product.
        silu_mul: weight and bias are gate over up: silu(gate) * up, [T, N / 2].
        places: weight's rows are q | k | v heads: of them `rope_and_store` -> q [T, Hq, D], as `gemv.qkv_gemv`.
        tile: instead of the one for these sizes, for tests and measurements.

    The first call on a device must not be under capture (RuntimeError). Calls on one device share their tickets, so
    they must not overlap: one stream, or streams that wait for each other.

    Raises:
        ValueError: a number of rows, or a tile, that it does not have.
    """
    values, x_scales = (x, None) if isinstance(x, Tensor) else (x.codes, x.scales)
    (rows, k), n, form = values.shape, weight.codes.shape[0], weight.form
    tile = tile or tile_for(rows, form.number, n, k)
    if tile is None:
        raise ValueError(f"quant_gemv has no tile for {rows} rows of x; call quantized_linear")
    heads = {"Q_HEADS": 0, "KV_HEADS": 0, "HALF": 0}
    if places is None:
        out = torch.empty((rows, n // 2 if silu_mul else n), dtype=x.dtype, device=values.device)
    else:
        _, kv_heads, head_dim = places.key_slots.shape
        out = torch.empty((rows, n // head_dim - 2 * kv_heads, head_dim), dtype=x.dtype, device=values.device)
        heads = {"Q_HEADS": out.shape[1], "KV_HEADS": kv_heads, "HALF": head_dim // 2}
        tile = tile._replace(rows=math.gcd(tile.rows, head_dim))
    packed, stride = form.number is Number.int4, values.stride(0)
    width = k // 2 if packed else k  # bytes of a row of W
    constants = {
        "N": n // 2 if silu_mul else n, "K": k, "GROUP": form.columns, "BLOCK_N": tile.rows, "SILU_MUL": silu_mul,
        "ADD": residual is not None, **heads, "num_warps": tile.num_warps, **launch_options(values.device),
    }  # fmt: skip
    prefetch = _PREFETCH if constants["PDL"] else 0
    rotary_stride = 0 if places is None else places.cos.stride(0)
    grid = triton.cdiv(n, tile.rows)
    if isinstance(tile, FmaTile):
        bits = 0 if form.number is Number.fp8 else 4 if packed else 8
        stride = stride * values.element_size() // 4
        values, codes = values.view(torch.int32), weight.codes.view(torch.int32)
        most = triton.next_power_of_2(triton.cdiv(width, 16)) * 4
        _fma_kernel[(grid,)](
            values, x_scales, codes, weight.scales, weight.zeros, bias, residual, out, places, stride, rotary_stride,
            T=rows, BITS=bits, BLOCK_K=min(128 * tile.num_warps * tile.k, most),
            **constants,
        )  # fmt: skip
        return out
    dot = tl.int8 if x_scales is not None else DOT_DTYPES[x.dtype]
    if form.number is Number.fp8:
        dot = tl.float8e4nv
    block_k = tile.k if not packed or k % tile.k == 0 else 128
    steps = triton.cdiv(k, block_k)
    each = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, each)  # none of them empty
    shortest = k - (splits - 1) * each * block_k
    sums = torch.int32 if form.number is Number.int8 else torch.float32
    parts, tickets = scratch(grid, splits, (tile.rows, tile.tokens), sums, values.device)
    _dot_kernel[(grid, splits)](
        values, x_scales, weight.codes.view(torch.int16) if packed else weight.codes, weight.scales, weight.zeros, bias,
        residual, out, places, parts, tickets, stride, rotary_stride, rows, PACKED=packed, DOT=dot, BLOCK_K=block_k,
        BLOCK_T=tile.tokens, STAGES=tile.num_stages, SPLITS=splits,
        PREFETCH=min(prefetch, shortest * width // k) // 16 * 16, **constants,
    )  # fmt: skip
    return out
