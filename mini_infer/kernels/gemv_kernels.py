"""The kernels of kernels/gemv.py, which says what they compute and launches them.

    x [T, K] --> [ NORM ] --> W [N, K], bias --> [ SILU_MUL ] --> [ ADD residual ] --> out [T, outs]

A program owns BLOCK_N rows of W and all of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _owned_rows(N, BLOCK_N: tl.constexpr, SILU_MUL: tl.constexpr):
    """Of this program: columns of `out`, which may lie beyond the end, and BLOCK_N rows of W, the last instead of such.

    With SILU_MUL W is gate [N, K] over up [N, K]: half the rows are gate's, and the others up's for the same columns.
    """
    if SILU_MUL:
        half: tl.constexpr = BLOCK_N // 2
        tile = tl.arange(0, BLOCK_N)
        outs = tl.program_id(0) * half + tl.arange(0, half)
        w_rows = tl.minimum(tl.program_id(0) * half + tile % half, N - 1) + tile // half * N
    else:
        outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_rows = tl.minimum(outs, N - 1)
    return outs, w_rows


@triton.jit
def _silu_mul(y, dtype: tl.constexpr, OUTS: tl.constexpr, T: tl.constexpr):
    """y [2 * OUTS, T], gate over up -> silu(gate) * up [OUTS, T]; rounded as gate, up and silu(gate) are in memory."""
    y = tl.permute(tl.reshape(y, [2, OUTS, T]), (1, 2, 0)).to(dtype).to(tl.float32)
    gate, up = tl.split(y)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def _load_columns(ptrs, columns, K, EVEN_K: tl.constexpr, POLICY: tl.constexpr):
    if EVEN_K:
        tile = tl.load(ptrs, eviction_policy=POLICY)
    else:
        tile = tl.load(ptrs, mask=columns < K, other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def _add_products(
    sums,
    squares,
    w,
    g,
    x_ptr,
    stride_x,
    columns,
    K,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """Two tuples over t, each plus what one tile of W and of x gives, summed over the vector of a load.

    sums[t] [BLOCK_N, BLOCK_K / VECTOR] of the products, squares[t] [BLOCK_K / VECTOR] of x's squares where NORM.
    """
    w = w.to(tl.float32)
    new_sums = ()
    new_squares = ()
    for t in tl.static_range(T):
        x = _load_columns(x_ptr + t * stride_x + columns, columns, K, EVEN_K, "evict_last").to(tl.float32)
        square = squares[t]
        if NORM:
            square += tl.sum(tl.reshape(x * x, [BLOCK_K // VECTOR, VECTOR]), axis=1)
            x *= g.to(tl.float32)
        new_squares += (square,)  # type: ignore[assignment]
        products = tl.reshape(w * x[None, :], [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
        new_sums += (sums[t] + tl.sum(products, axis=2),)  # type: ignore[assignment]
    return new_sums, new_squares


@triton.jit
def _fma_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    K,
    stride_x,
    eps,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype = out_ptr.dtype.element_ty
    outs, w_rows = _owned_rows(N, BLOCK_N, SILU_MUL)
    inside = outs < N
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * K + columns[None, :]
    w = _load_columns(w_ptrs, columns[None, :], K, EVEN_K, "evict_first")
    g = columns
    if NORM:
        g = _load_columns(norm_ptr + columns, columns, K, EVEN_K, "evict_last")
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = ()
    if ADD:  # asked for now, so that nothing waits for it at the end
        for t in tl.static_range(T):
            residual += (tl.load(residual_ptr + t * N + outs, mask=inside, other=0.0),)  # type: ignore[assignment]
    sums = (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),) * T
    squares = (tl.zeros([BLOCK_K // VECTOR], tl.float32),) * T
    sums, squares = _add_products(
        sums, squares, w, g, x_ptr, stride_x, columns, K, T, BLOCK_N, BLOCK_K, VECTOR, EVEN_K, NORM
    )
    for start in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=UNROLL):
        here = columns + start
        w = _load_columns(w_ptrs + start, here[None, :], K, EVEN_K, "evict_first")
        if NORM:
            g = _load_columns(norm_ptr + here, here, K, EVEN_K, "evict_last")
        sums, squares = _add_products(
            sums, squares, w, g, x_ptr, stride_x, here, K, T, BLOCK_N, BLOCK_K, VECTOR, EVEN_K, NORM
        )
    for t in tl.static_range(T):
        if NORM:  # one sum across warps for both: they wait for each other half as often
            square = tl.broadcast_to(squares[t][None, :], [BLOCK_N, BLOCK_K // VECTOR])
            y, square = tl.split(tl.sum(tl.join(sums[t], square), axis=1))
            y *= tl.rsqrt(square / K + eps)
        else:
            y = tl.sum(sums[t], axis=1)
        y += bias
        if SILU_MUL:
            y = tl.reshape(_silu_mul(y, dtype, BLOCK_N // 2, 1), [BLOCK_N // 2])
        if ADD:
            y = y.to(dtype).to(tl.float32) + residual[t].to(tl.float32)
        tl.store(out_ptr + t * N + outs, y.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    K,
    stride_x,
    T,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype = out_ptr.dtype.element_ty
    outs, w_rows = _owned_rows(N, BLOCK_N, SILU_MUL)
    columns = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, BLOCK_T)
    some = tokens < T
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * K + columns[None, :]
    x_ptrs = x_ptr + tokens[None, :] * stride_x + columns[:, None]
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=some[None, :], other=0.0)
        else:
            left = columns < K - start
            w = tl.load(w_ptrs + start, mask=left[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=left[:, None] & some[None, :], other=0.0)
        if _INTERPRETED:  # its products take bfloat16 for integers
            w, x = w.to(tl.float32), x.to(tl.float32)
        y = tl.dot(w, x, y)
    y += bias[:, None]
    if SILU_MUL:
        y = _silu_mul(y, dtype, BLOCK_N // 2, BLOCK_T)
    inside = some[None, :] & (outs < N)[:, None]
    places = tokens[None, :] * N + outs[:, None]
    if ADD:
        y = y.to(dtype).to(tl.float32) + tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(dtype), mask=inside)
