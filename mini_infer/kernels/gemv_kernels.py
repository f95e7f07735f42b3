"""The kernels of kernels/gemv.py, which says what they compute and launches them.

    x [T, K] --> [ NORM ] --> W [N, K], bias --> [ SILU_MUL ] --> [ ADD residual ] --> out [T, outs]
                                             '-> [ HALF: rotation ] --> q in out, k and v in places' slots

A program owns some rows of W and all of K. What is in capitals above is `Ends`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.interface import Places
from mini_infer.kernels.pdl import let_next_start, wait_for_previous
from mini_infer.kernels.rope_and_store import rotate

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Ends:
    """What of a product's neighbours a kernel does, and how many rows of W its programs own."""

    block_n: int
    silu_mul: bool
    add: bool
    q_heads: int = 0
    kv_heads: int = 0
    half: int = 0  # of the size of the heads that W's rows make; 0: they are not to be rotated

    @classmethod
    def of(cls, block_n: int, silu_mul: bool, residual: Tensor | None, q: Tensor, places: Places | None) -> Ends:
        """With places W's rows are those of heads, and q [T, Hq, D] is the result."""
        if places is None:
            return cls(block_n, silu_mul, residual is not None)
        _, q_heads, head_dim = q.shape  # a program's rows are of one head
        block_n = math.gcd(block_n, head_dim)
        return cls(block_n, silu_mul, residual is not None, q_heads, places.key_slots.shape[1], head_dim // 2)


@triton.jit
def _owned_rows(N, ENDS: tl.constexpr):
    """Of this program: columns of `out`, which may lie beyond the end, and BLOCK_N rows of W, the last instead of such.

    With silu_mul W is gate [N, K] over up [N, K]: half the rows are gate's, and the others up's for the same columns.
    With heads half the rows are of the first half of one head, and the others their pairs, HALF rows on.
    """
    BLOCK_N: tl.constexpr = ENDS.block_n
    HALF: tl.constexpr = ENDS.half
    if HALF:
        pairs: tl.constexpr = BLOCK_N // 2
        tile = tl.arange(0, BLOCK_N)
        pair = tl.program_id(0) * pairs
        outs = pair + pair // HALF * HALF + tile % pairs + tile // pairs * HALF
        w_rows = outs
    elif ENDS.silu_mul:
        half: tl.constexpr = BLOCK_N // 2
        tile = tl.arange(0, BLOCK_N)
        outs = tl.program_id(0) * half + tl.arange(0, half)
        w_rows = tl.minimum(tl.program_id(0) * half + tile % half, N - 1) + tile // half * N
    else:
        outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        w_rows = tl.minimum(outs, N - 1)
    return outs, w_rows


@triton.jit
def _halves(y, dtype: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr):
    """y [2 * ROWS, T] -> its first and its last ROWS, float32 but rounded as they are in memory."""
    return tl.split(tl.permute(tl.reshape(y, [2, ROWS, T]), (1, 2, 0)).to(dtype).to(tl.float32))


@triton.jit
def _silu_mul(y, dtype: tl.constexpr, OUTS: tl.constexpr, T: tl.constexpr):
    """y [2 * OUTS, T], gate over up -> silu(gate) * up [OUTS, T]; rounded as gate, up and silu(gate) are in memory."""
    gate, up = _halves(y, dtype, OUTS, T)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def _load_places(places, rotary_stride, q_ptr, tokens, some, ENDS: tl.constexpr):
    """For `_rotate_and_store`: cos and sin of the program's pairs, [BLOCK_N / 2, T], which a v head does not use; and
    [1, T] pointers: of each token, behind them by a row's number is the place of that row, if the program owns it.

    tokens [T], of which those are there that `some` says.
    """
    BLOCK_N: tl.constexpr = ENDS.block_n
    HALF: tl.constexpr = ENDS.half
    Q_SIZE: tl.constexpr = ENDS.q_heads * 2 * HALF
    KV_SIZE: tl.constexpr = ENDS.kv_heads * 2 * HALF
    row = tl.program_id(0) * BLOCK_N
    pairs = row // 2 % HALF + tl.arange(0, BLOCK_N // 2)
    at = tokens[None, :] * rotary_stride + pairs[:, None]
    # The other halves, cos again and -sin, are not read.
    cos = tl.load(places.cos + at, mask=some[None, :], other=0.0)
    sin = tl.load(places.sin + HALF + at, mask=some[None, :], other=0.0)
    slots = tl.load(places.slot_mapping + tokens, mask=some, other=0)
    # Pointers are chosen here, not stores at the end: each store would exchange its values between threads.
    if row < Q_SIZE:
        starts = q_ptr + tokens.to(tl.int64) * Q_SIZE
    elif row < Q_SIZE + KV_SIZE:
        starts = places.key_slots + (slots * KV_SIZE - Q_SIZE)
    else:
        starts = places.value_slots + (slots * KV_SIZE - Q_SIZE - KV_SIZE)
    return cos, sin, starts[None, :]


@triton.jit
def _rotate_and_store(y, loaded, rows, some, dtype: tl.constexpr, T: tl.constexpr, ENDS: tl.constexpr):
    """y [BLOCK_N, T], `rows` of W, which are pairs of one head: turned, if it is one of q or k, and to their places.

    Rounded twice, as the product is in memory and then the rotated head. loaded: of `_load_places`.
    """
    BLOCK_N: tl.constexpr = ENDS.block_n
    ROTARY_ROWS: tl.constexpr = (ENDS.q_heads + ENDS.kv_heads) * 2 * ENDS.half
    cos, sin, starts = loaded
    first, second = _halves(y, dtype, BLOCK_N // 2, T)
    if tl.program_id(0) * BLOCK_N < ROTARY_ROWS:
        first, second = rotate(first, second, cos.to(tl.float32), sin.to(tl.float32))
    y = tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), [BLOCK_N, T])
    tl.store(starts + rows[:, None], y.to(dtype), mask=tl.broadcast_to(some[None, :], [BLOCK_N, T]))


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
    places,
    N,
    K,
    stride_x,
    rotary_stride,
    eps,
    T: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    UNROLL: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    BLOCK_N: tl.constexpr = ENDS.block_n
    dtype = out_ptr.dtype.element_ty
    outs, w_rows = _owned_rows(N, ENDS)
    inside = outs < N
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * K + columns[None, :]
    w = _load_columns(w_ptrs, columns[None, :], K, EVEN_K, "evict_first")
    g = columns
    if NORM:
        g = _load_columns(norm_ptr + columns, columns, K, EVEN_K, "evict_last")
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    wait_for_previous(PDL)
    late = ()  # of each token what the end needs, asked for now, so that nothing waits for it there
    for t in tl.static_range(T):
        if ENDS.add:
            late += (tl.load(residual_ptr + t * N + outs, mask=inside, other=0.0),)  # type: ignore[assignment]
        if ENDS.half:
            token = t + tl.arange(0, 1)
            late += (_load_places(places, rotary_stride, out_ptr, token, token < T, ENDS),)  # type: ignore[assignment]
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
        if ENDS.half:
            _rotate_and_store(y, late[t], outs, token < T, dtype, 1, ENDS)
        else:
            if ENDS.silu_mul:
                y = tl.reshape(_silu_mul(y, dtype, BLOCK_N // 2, 1), [BLOCK_N // 2])
            if ENDS.add:
                y = y.to(dtype).to(tl.float32) + late[t].to(tl.float32)
            tl.store(out_ptr + t * N + outs, y.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    places,
    N,
    K,
    stride_x,
    rotary_stride,
    T,
    ENDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    BLOCK_N: tl.constexpr = ENDS.block_n
    dtype = out_ptr.dtype.element_ty
    outs, w_rows = _owned_rows(N, ENDS)
    columns = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, BLOCK_T)
    some = tokens < T
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * K + columns[None, :]
    x_ptrs = x_ptr + tokens[None, :] * stride_x + columns[:, None]
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    wait_for_previous(PDL)
    loaded = ()
    if ENDS.half:  # asked for now, so that nothing waits for it at the end
        loaded = _load_places(places, rotary_stride, out_ptr, tokens, some, ENDS)
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
    if ENDS.half:
        _rotate_and_store(y, loaded, outs, some, dtype, BLOCK_T, ENDS)
    else:
        if ENDS.silu_mul:
            y = _silu_mul(y, dtype, BLOCK_N // 2, BLOCK_T)
        inside = some[None, :] & (outs < N)[:, None]
        at = tokens[None, :] * N + outs[:, None]
        if ENDS.add:
            y = y.to(dtype).to(tl.float32) + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(dtype), mask=inside)
