"""The Triton kernels of experts.py, which says what they are for.

`weight` is (codes [E, OUT, IN], scales, zeros), and FORM says how to read it (experts.py's _Weight).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from mini_infer.kernels.gemv_kernels import _halves
from mini_infer.kernels.invariant_linear import end_of_tree, wait_in_tree
from mini_infer.kernels.pdl import take_turn
from mini_infer.kernels.quantized.unpack import waited


@triton.jit
def _owned(block, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr, OUT: tl.constexpr):
    """Of the block-th program: columns of the result [OUT], BLOCK_OUT rows of the weight, and which of these exist.

    GATED: the weight is gate [OUT, IN] over up. Half the rows are gate's, and the others up's for the same columns.
    """
    COLUMNS: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    tile = tl.arange(0, BLOCK_OUT)
    first = block * COLUMNS + tile % COLUMNS
    return block * COLUMNS + tl.arange(0, COLUMNS), first + tile // COLUMNS * OUT, first < OUT


@triton.jit
def _scales(weight, expert, outs, real, group, OUT: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Of the rows `outs` of an expert's weight, in one group of columns."""
    rows = expert.to(tl.int64) * ((OUT + ROWS - 1) // ROWS) + outs // ROWS
    return tl.load(weight[1] + rows * GROUPS + group, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _weights(
    weight,
    expert,
    outs,
    real,
    k,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    CHUNKS: tl.constexpr = 1,
):
    """Of an expert's weight [OUT, IN] the rows `outs` and BLOCK columns from k on, which share a scale. Scales of whole
    rows are left to `_scaled`. k is a multiple of BLOCK, within each of the CHUNKS of IN."""
    codes, _, zeros = weight
    row = expert.to(tl.int64) * OUT + outs
    columns = k + tl.arange(0, BLOCK)
    mask = real[:, None]
    if IN // CHUNKS % BLOCK != 0:
        mask = mask & (columns < IN)[None, :]
    if FORM is None:
        values = tl.load(codes + row[:, None] * IN + columns[None, :], mask=mask, other=0.0)
    else:
        PACKED: tl.constexpr = FORM[0]
        WIDTH: tl.constexpr = FORM[1]
        GROUPS: tl.constexpr = 1 if WIDTH is None else (IN + WIDTH - 1) // WIDTH
        group = 0 if WIDTH is None else k // WIDTH
        if PACKED:
            place = columns // 128 * 64 + columns % 32 * 2 + columns % 128 // 64  # as pack_int4 has them
            both = tl.load(codes + row[:, None] * ((IN + 127) // 128 * 64) + place[None, :], mask=mask, other=0)
            values = ((both >> (columns % 64 // 32 * 4).to(tl.uint8)[None, :]) & 15).to(tl.float32)
            if zeros is None:
                values -= 8
            else:
                values -= tl.load(zeros + row * GROUPS + group, mask=real, other=0).to(tl.float32)[:, None]
        else:
            values = tl.load(codes + row[:, None] * IN + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if WIDTH is not None:
            values *= _scales(weight, expert, outs, real, group, OUT, GROUPS, FORM[2])[:, None]
    return values


@triton.jit
def _scaled(sums, weight, expert, outs, real, OUT: tl.constexpr, FORM: tl.constexpr):
    """Sums [outs, ...], times what the whole row of the weight is multiplied by."""
    if FORM is not None:  # noqa: SIM102 Triton looks at both sides of an `and`
        if FORM[1] is None:
            scales = _scales(weight, expert, outs, real, 0, OUT, 1, FORM[2])
            sums *= tl.expand_dims(scales, 1) if len(sums.shape) == 2 else scales
    return sums


@triton.jit
def _silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@dataclass(frozen=True)
class FewShape:
    """What the kernels for few tokens are compiled for, which call it S."""

    chosen: int
    shared: int  # experts that every token goes to, beside the chosen: their weights are one product's
    size: int
    inner: int
    form: tuple | None
    elsewhere: bool  # some experts are -1, and nothing is read of them
    block_out: int
    block_k: int
    unroll: int


@dataclass(frozen=True)
class GroupedShape:
    """What a product for many tokens is compiled for, whose kernel calls it S."""

    gated: bool
    chosen: int
    out_size: int
    in_size: int
    chunks: int  # of in_size, added up as the tree of invariant_linear.py: 1, 2, 4 or 8
    form: tuple | None
    block_rows: int
    block_out: int
    block_k: int
    dot: tl.dtype


# --- few tokens ------------------------------------------------------------------------------------------------


@triton.jit
def few_gate_up_kernel(x_ptr, ids_ptr, weight, shared_ptr, out_ptr, S: tl.constexpr, PDL: tl.constexpr):
    """shared_ptr [2 S.shared * I, H], gate over up; out_ptr [T, chosen and shared, I]."""
    take_turn(PDL)
    BLOCK_OUT: tl.constexpr = S.block_out
    FORM: tl.constexpr = S.form  # Triton 3.6 hands tuples on as such alone
    BLOCK_K: tl.constexpr = S.block_k
    pair = tl.program_id(1)
    token, place = pair // (S.chosen + S.shared), pair % (S.chosen + S.shared)
    outs, rows, real = _owned(tl.program_id(0), BLOCK_OUT, True, S.inner)
    if S.shared == 0:
        expert = tl.load(ids_ptr + pair)
    else:
        codes, scales, zeros = weight
        behind = place - S.chosen
        expert = tl.load(ids_ptr + token * S.chosen + place, mask=behind < 0, other=0)
        if behind >= 0:
            codes = shared_ptr
            rows += behind * S.inner + tl.arange(0, BLOCK_OUT) // (BLOCK_OUT // 2) * ((S.shared - 1) * S.inner)
        weight = (codes, scales, zeros)
    if S.elsewhere:
        real = real & (expert >= 0)
    sums = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    for k in tl.range(0, S.size, BLOCK_K, loop_unroll_factor=S.unroll):
        columns = k + tl.arange(0, BLOCK_K)
        inside = columns < S.size
        if S.elsewhere:
            inside = inside & (expert >= 0)
        x = tl.load(x_ptr + token * S.size + columns, mask=inside, other=0.0).to(tl.float32)
        w = _weights(weight, expert, rows, real, k, 2 * S.inner, S.size, BLOCK_K, FORM)
        sums += w.to(tl.float32) * x[None, :]
    both = _scaled(tl.sum(sums, axis=1), weight, expert, rows, real, 2 * S.inner, FORM)
    gate, up = _halves(both, tl.float32, BLOCK_OUT // 2, 1)
    h = tl.reshape(_silu_mul(gate, up), [BLOCK_OUT // 2])
    tl.store(out_ptr + pair * S.inner + outs, h.to(out_ptr.dtype.element_ty), mask=outs < S.inner)


@triton.jit
def few_down_kernel(
    h_ptr, ids_ptr, shares_ptr, weight, shared_ptr, residual_ptr, out_ptr, S: tl.constexpr, PDL: tl.constexpr
):
    """h_ptr [T, chosen and shared, I], shared_ptr [H, S.shared * I]."""
    take_turn(PDL)
    CHOSEN: tl.constexpr = S.chosen
    BLOCK_OUT: tl.constexpr = S.block_out
    FORM: tl.constexpr = S.form
    BLOCK_K: tl.constexpr = S.block_k
    token = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = outs < S.size
    sums = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    h_ptr += token * ((CHOSEN + S.shared) * S.inner)
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        expert, share = tl.load(ids_ptr + pair), tl.load(shares_ptr + pair)
        there = real
        if S.elsewhere:
            there = there & (expert >= 0)
        for k in tl.range(0, S.inner, BLOCK_K, loop_unroll_factor=S.unroll):
            columns = k + tl.arange(0, BLOCK_K)
            h = tl.load(h_ptr + place * S.inner + columns, mask=columns < S.inner, other=0.0).to(tl.float32) * share
            w = _weights(weight, expert, outs, there, k, S.size, S.inner, BLOCK_K, FORM)
            part = w.to(tl.float32) * h[None, :]
            sums += _scaled(part, weight, expert, outs, there, S.size, FORM)
    if S.shared > 0:
        SHARED: tl.constexpr = S.shared * S.inner
        for k in tl.static_range(0, SHARED, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = columns < SHARED
            h = tl.load(h_ptr + CHOSEN * S.inner + columns, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(shared_ptr + outs[:, None] * SHARED + columns, mask=real[:, None] & inside, other=0.0)
            sums += w.to(tl.float32) * h[None, :]
    places = out_ptr + token.to(tl.int64) * S.size + outs
    _store_sums(places, tl.sum(sums, axis=1), residual_ptr, token, outs, real, S.size)


@triton.jit
def _store_sums(places, sums, residual_ptr, token, columns, real, SIZE: tl.constexpr):
    dtype: tl.constexpr = places.dtype.element_ty
    tl.store(places, with_residual(sums, residual_ptr, token, columns, real, SIZE, dtype), mask=real)


@triton.jit
def with_residual(sums, residual_ptr, token, columns, real, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Sums of a token's experts, plus the residual where there is one, after rounding as between two operations."""
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + token.to(tl.int64) * SIZE + columns, mask=real, other=0.0)
        sums = sums.to(DTYPE).to(tl.float32) + residual.to(tl.float32)
    return sums.to(DTYPE)


# --- many tokens -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def place_kernel(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is an expert. It counts the pairs of those before it, which is where its own begin, and leaves room for
    a tile that is not full at the end of each: its tiles begin at (pairs before) // BLOCK_ROWS + expert, which nobody
    else's can reach. Pairs without an expert, -1, come last and get no tile."""
    take_turn(PDL)
    expert = tl.program_id(0)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        before += ((ids < expert) & (ids >= 0)).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    begin = tl.sum(before)
    end = begin + tl.sum(own)
    first, last = begin // BLOCK_ROWS + expert, end // BLOCK_ROWS + expert + 1  # the last is the next expert's first
    if expert == tl.num_programs(0) - 1:
        last = num_tiles
    for start in range(first, last, 32):  # most experts have a tile or two
        tile = start + tl.arange(0, 32)
        row = begin + (tile - first) * BLOCK_ROWS
        tl.store(tiles_ptr + tile, tl.where(row < end, expert, -1), mask=tile < last)
        tl.store(tiles_ptr + num_tiles + tile, row, mask=tile < last)
        tl.store(tiles_ptr + 2 * num_tiles + tile, tl.minimum(row + BLOCK_ROWS, end), mask=tile < last)
    at = begin
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert
        tl.store(order_ptr + at + tl.cumsum(mine.to(tl.int32), 0) - 1, pairs, mask=mine)
        at += tl.sum(mine.to(tl.int32))


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_kernel(x_ptr, weight, order_ptr, tiles_ptr, out_ptr, num_tiles, S: tl.constexpr, PDL: tl.constexpr):
    """S.gated: x [T, H] of tokens -> h [T k, I] in the order of experts. Else x is h -> [T k, H] by pairs."""
    take_turn(PDL)
    tile = tl.program_id(1)
    expert, begin = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    BLOCK_ROWS: tl.constexpr = S.block_rows
    HALF: tl.constexpr = BLOCK_ROWS // 2
    if expert >= 0:
        if BLOCK_ROWS >= 128:
            # The last tile of an expert is half full or less in every other case.
            if end - begin <= HALF:
                _product(x_ptr, weight, order_ptr, out_ptr, expert, begin, end, S, HALF, True)
            else:
                _product(x_ptr, weight, order_ptr, out_ptr, expert, begin, end, S, BLOCK_ROWS, True)
        else:
            _product(x_ptr, weight, order_ptr, out_ptr, expert, begin, end, S, BLOCK_ROWS, False)


@triton.jit
def _product(
    x_ptr,
    weight,
    order_ptr,
    out_ptr,
    expert,
    begin,
    end,
    S: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TALL_PAIRS: tl.constexpr,
):
    """Of the pairs [begin, end) of an expert. The tensor cores' tall side is the pairs' or the weight's."""
    BLOCK_OUT: tl.constexpr = S.block_out
    FORM: tl.constexpr = S.form
    rows = begin + tl.arange(0, BLOCK_ROWS)
    exists = rows < end
    pairs = tl.load(order_ptr + rows, mask=exists, other=0)
    source, target = rows.to(tl.int64), pairs.to(tl.int64)
    if S.gated:
        source, target = target // S.chosen, source
    HEIGHT: tl.constexpr = 2 * S.out_size if S.gated else S.out_size
    outs, w_rows, real = _owned(tl.program_id(0), BLOCK_OUT, S.gated, S.out_size)
    zeros = tl.zeros([BLOCK_ROWS, BLOCK_OUT] if TALL_PAIRS else [BLOCK_OUT, BLOCK_ROWS], tl.float32)
    sums, one, two, four = zeros, zeros, zeros, zeros
    CHUNK: tl.constexpr = S.in_size // S.chunks
    WIDTH: tl.constexpr = (CHUNK + S.block_k - 1) // S.block_k * S.block_k
    for at in range(0, S.chunks * WIDTH, S.block_k):
        chunk, k, stop = at // WIDTH, at, S.in_size
        if S.chunks > 1:
            stop = (chunk + 1) * CHUNK
            if WIDTH != CHUNK:  # else nothing is divided on the way to an address
                k = chunk * CHUNK + at % WIDTH
        columns = k + tl.arange(0, S.block_k)
        mask = exists[:, None]
        if CHUNK % S.block_k != 0:
            mask = mask & (columns < stop)[None, :]
        x = tl.load(x_ptr + source[:, None] * S.in_size + columns[None, :], mask=mask, other=0.0).to(S.dot)
        w = _weights(weight, expert, w_rows, real, k, HEIGHT, S.in_size, S.block_k, FORM, S.chunks).to(S.dot)
        if TALL_PAIRS:
            sums = tl.dot(x, w.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(w, x.T, sums, input_precision="ieee")
            if FORM is not None:  # w is made in registers
                sums = waited(sums)
        if S.chunks > 1:  # noqa: SIM102 Triton looks at both sides of an `and`
            if at % WIDTH == WIDTH - S.block_k and chunk < S.chunks - 1:
                one, two, four = wait_in_tree(sums, chunk, one, two, four)
                sums = zeros
    if S.chunks > 1:
        sums = end_of_tree(sums, one, two, four, S.chunks)
    if TALL_PAIRS:
        sums = sums.T
    sums = _scaled(sums, weight, expert, w_rows, real, HEIGHT, FORM)
    if S.gated:
        gate, up = _halves(sums, tl.float32, BLOCK_OUT // 2, BLOCK_ROWS)
        sums = _silu_mul(gate, up)
    places = out_ptr + target[None, :] * S.out_size + outs[:, None]
    tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=(outs < S.out_size)[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def tall_kernel(x, half, weight, order_ptr, tiles_ptr, out_ptr, num_tiles, S: tl.constexpr, PDL: tl.constexpr):
    """As grouped_kernel, of many pairs an expert and weights that are not quantized, [E * HEIGHT, IN], which a
    descriptor brings; h's rows, too, `half` of a tile's or all. S.gated: both are a pointer to x."""
    take_turn(PDL)
    tile = tl.program_id(1)
    expert, begin = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    HALF: tl.constexpr = S.block_rows // 2
    if expert >= 0:
        if end - begin <= HALF:
            _tall_product(half, weight, order_ptr, out_ptr, expert, begin, end, S, HALF)
        else:
            _tall_product(x, weight, order_ptr, out_ptr, expert, begin, end, S, S.block_rows)


@triton.jit
def _tall_product(x, weight, order_ptr, out_ptr, expert, begin, end, S: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """As _product, whose sums these are to the bit."""
    COLUMNS: tl.constexpr = S.block_out // 2 if S.gated else S.block_out
    HEIGHT: tl.constexpr = 2 * S.out_size if S.gated else S.out_size
    rows = begin + tl.arange(0, BLOCK_ROWS)
    exists = rows < end
    pairs = tl.load(order_ptr + rows, mask=exists, other=0)
    source, target = (pairs // S.chosen).to(tl.int64), (rows if S.gated else pairs).to(tl.int64)
    outs = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = expert * HEIGHT + tl.program_id(0) * COLUMNS
    sums = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32)
    up = sums
    for k in range(0, S.in_size, S.block_k):  # descriptors give zeros beyond the ends
        if S.gated:
            columns = k + tl.arange(0, S.block_k)
            mask = exists[:, None]
            if S.in_size % S.block_k != 0:
                mask = mask & (columns < S.in_size)[None, :]
            own = tl.load(x + source[:, None] * S.in_size + columns[None, :], mask=mask, other=0.0).to(S.dot)
        else:
            own = x.load([begin, k]).to(S.dot)  # rows of others, where the tile is not full, which nobody stores
        sums = tl.dot(own, weight.load([first, k]).to(S.dot).T, sums, input_precision="ieee")
        if S.gated:
            up = tl.dot(own, weight.load([first + S.out_size, k]).to(S.dot).T, up, input_precision="ieee")
    if S.gated:
        sums = _silu_mul(sums, up)
    places = out_ptr + target[:, None] * S.out_size + outs[None, :]
    tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (outs < S.out_size)[None, :])


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,  # None: each pair has an expert
    shares_ptr,
    residual_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        there = inside
        if ids_ptr is not None:
            there = inside & (tl.load(ids_ptr + pair) >= 0)
        y = tl.load(y_ptr + pair * SIZE + columns, mask=there, other=0.0).to(tl.float32)
        total += y * tl.load(shares_ptr + pair)
    _store_sums(out_ptr + token * SIZE + columns, total, residual_ptr, token, columns, inside, SIZE)
