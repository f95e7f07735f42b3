"""The two kernels of gemv.py, which says what they are for and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from mini_infer.kernels.gemv_kernels import _load_places, _owned_rows, _rotate_and_store, _silu_mul
from mini_infer.kernels.pdl import bring_to_l2, let_next_start, wait_for_previous
from mini_infer.kernels.quantized.int4_products import add_int4_products, dot4, group_values
from mini_infer.kernels.quantized.split import added_up
from mini_infer.kernels.quantized.unpack import CHUNK, PLANE, group_scales, scaled_sum, unpacked_planes

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _early(residual_ptr, out_ptr, places, rotary_stride, outs, tokens, some, N: tl.constexpr, ENDS: tl.constexpr):
    """What the end needs beside y, asked for before the loop, so that nothing waits for it there."""
    loaded = ()
    if residual_ptr is not None:
        inside = some[None, :] & (outs < N)[:, None]
        loaded = (tl.load(residual_ptr + tokens[None, :] * N + outs[:, None], mask=inside, other=0.0),)  # type: ignore[assignment]
    if ENDS.half:
        loaded = _load_places(places, rotary_stride, out_ptr, tokens, some, ENDS)
    return loaded


@triton.jit
def _finish(y, x_scales_ptr, scales, bias, loaded, out_ptr, outs, tokens, some, N: tl.constexpr, ENDS: tl.constexpr):
    """Of sums y [BLOCK_N, tokens] the result to its place, rounded as between operations. scales, bias [BLOCK_N]."""
    dtype = out_ptr.dtype.element_ty
    T: tl.constexpr = y.shape[1]
    factors = tl.broadcast_to(scales[:, None], y.shape)
    if x_scales_ptr is not None:  # in the order of linear.py
        factors = tl.load(x_scales_ptr + tokens, mask=some, other=0.0)[None, :] * factors
    y = tl.fma(y.to(tl.float32), factors, tl.broadcast_to(bias[:, None], y.shape))
    if ENDS.half:
        _rotate_and_store(y, loaded, outs, some, dtype, T, ENDS)
    else:
        if ENDS.silu_mul:
            y = _silu_mul(y, dtype, ENDS.block_n // 2, T)
        if ENDS.add:
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
    ENDS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # words
    PDL: tl.constexpr,
):
    """A program has all of K for some rows of W."""
    BLOCK_N: tl.constexpr = ENDS.block_n
    let_next_start(PDL)
    outs, w_rows = _owned_rows(N, ENDS)
    WIDTH: tl.constexpr = K // 8 if BITS == 4 else K // 4  # of a row of W, in words
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    ZEROS: tl.constexpr = BITS == 0 and WIDTH % BLOCK_K != 0  # whole numbers are multiplied by zeros of x
    next_w = _load_tile(w_ptrs, columns, 0, WIDTH, ZEROS)
    next_scales, next_zeros = (), ()
    if BITS == 4:
        next_scales = group_values(scales_ptr, w_rows, 0, K, GROUP, BLOCK_K)
        if zeros_ptr is not None:
            next_zeros = group_values(zeros_ptr, w_rows, 0, K, GROUP, BLOCK_K)
    scales, bias = _row_values(scales_ptr, bias_ptr, w_rows, GROUP)
    wait_for_previous(PDL)
    late = ()
    for t in tl.static_range(T):
        token = t + tl.arange(0, 1)
        late += (  # type: ignore[assignment]
            _early(residual_ptr, out_ptr, places, rotary_stride, outs, token, token < T, N, ENDS),
        )
    SUM: tl.constexpr = tl.int32 if BITS == 8 else tl.float32
    sums = (tl.zeros([BLOCK_N, BLOCK_K // 4 if BITS == 4 else BLOCK_K], SUM),) * T
    for start in range(0, WIDTH, BLOCK_K):
        here = start + columns
        left = here < WIDTH
        w, w_scales, w_zeros = next_w, next_scales, next_zeros
        if BLOCK_K < WIDTH:  # a turn ahead, and the first before the kernel before has ended
            next_w = _load_tile(w_ptrs, columns, start + BLOCK_K, WIDTH, ZEROS)
            if BITS == 4:
                next_scales = group_values(scales_ptr, w_rows, start + BLOCK_K, K, GROUP, BLOCK_K)
                if zeros_ptr is not None:
                    next_zeros = group_values(zeros_ptr, w_rows, start + BLOCK_K, K, GROUP, BLOCK_K)
        if BITS == 4:
            sums = add_int4_products(
                sums, w, w_scales, w_zeros, x_ptr, stride_x, start, T, K, GROUP, BLOCK_N, BLOCK_K,
                out_ptr.dtype.element_ty,
            )  # fmt: skip
        else:
            more = ()
            for t in tl.static_range(T):
                x = tl.load(x_ptr + t * stride_x + here, mask=left, other=0, eviction_policy="evict_last")
                if BITS == 8:
                    more += (dot4(w, tl.broadcast_to(x[None, :], w.shape), sums[t]),)  # type: ignore[assignment]
                else:
                    more += (_add_fp8_products(sums[t], w, x[None, :]),)  # type: ignore[assignment]
            sums = more
    for t in tl.static_range(T):
        token = t + tl.arange(0, 1)
        y = tl.sum(sums[t], axis=1)[:, None]
        if BITS == 0:
            y *= 8.0
        _finish(y, x_scales_ptr, scales, bias, late[t], out_ptr, outs, token, token < T, N, ENDS)


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
    ENDS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one of SPLITS parts of K, axis 1 of the grid, for some rows of W and all of x."""
    BLOCK_N: tl.constexpr = ENDS.block_n
    let_next_start(PDL)
    outs, w_rows = _owned_rows(N, ENDS)
    STEPS: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS
    k_begin = tl.program_id(1) * STEPS * BLOCK_K
    k_end = tl.minimum(k_begin + STEPS * BLOCK_K, K)
    WIDTH: tl.constexpr = K // 4 if PACKED else K
    if PREFETCH:
        BYTES: tl.constexpr = K // 2 if PACKED else K
        bring_to_l2(weight_ptr + k_begin // (K // WIDTH), w_rows, BYTES, PREFETCH)
    scales, bias = _row_values(scales_ptr, bias_ptr, w_rows, GROUP)
    wait_for_previous(PDL)
    tokens = tl.arange(0, BLOCK_T)
    some = tokens < T
    loaded = _early(residual_ptr, out_ptr, places, rotary_stride, outs, tokens, some, N, ENDS)
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
    _finish(y, x_scales_ptr, scales, bias, loaded, out_ptr, outs, tokens, some, N, ENDS)
