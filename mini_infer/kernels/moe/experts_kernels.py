"""The Triton kernels of experts.py, which says what they are for.

`weight` is (codes [E, OUT, IN], scales, zeros), and FORM says how to read it (experts.py's _Weight).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scales(weight, expert, outs, real, group, OUT: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Of the rows `outs` of an expert's weight, in one group of columns."""
    rows = expert.to(tl.int64) * ((OUT + ROWS - 1) // ROWS) + outs // ROWS
    return tl.load(weight[1] + rows * GROUPS + group, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _weights(
    weight, expert, outs, real, k, OUT: tl.constexpr, IN: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr
):
    """Of an expert's weight [OUT, IN] the rows `outs` and BLOCK columns from k on, which share a scale. Scales of whole
    rows are left to `_scaled`."""
    codes, _, zeros = weight
    row = expert.to(tl.int64) * OUT + outs
    columns = k + tl.arange(0, BLOCK)
    mask = real[:, None] & (columns < IN)[None, :]
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


# --- few tokens ------------------------------------------------------------------------------------------------


@triton.jit
def few_gate_up_kernel(
    x_ptr,
    ids_ptr,
    weight,
    out_ptr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = outs < INNER
    expert = tl.load(ids_ptr + pair)
    gates, ups = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32), tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    for k in range(0, SIZE, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + pair // CHOSEN * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
        gates += _weights(weight, expert, outs, real, k, 2 * INNER, SIZE, BLOCK_K, FORM).to(tl.float32) * x
        ups += _weights(weight, expert, INNER + outs, real, k, 2 * INNER, SIZE, BLOCK_K, FORM).to(tl.float32) * x
    gate = _scaled(tl.sum(gates, axis=1), weight, expert, outs, real, 2 * INNER, FORM)
    up = _scaled(tl.sum(ups, axis=1), weight, expert, INNER + outs, real, 2 * INNER, FORM)
    tl.store(out_ptr + pair * INNER + outs, _silu_mul(gate, up).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def few_down_kernel(
    h_ptr,
    ids_ptr,
    shares_ptr,
    weight,
    out_ptr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = outs < SIZE
    y = tl.zeros([BLOCK_OUT], tl.float32)
    for pair in range(token * CHOSEN, token * CHOSEN + CHOSEN):
        expert = tl.load(ids_ptr + pair)
        sums = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
        for k in range(0, INNER, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            h = tl.load(h_ptr + pair * INNER + columns, mask=columns < INNER, other=0.0).to(tl.float32)
            sums += _weights(weight, expert, outs, real, k, SIZE, INNER, BLOCK_K, FORM).to(tl.float32) * h[None, :]
        part = _scaled(tl.sum(sums, axis=1), weight, expert, outs, real, SIZE, FORM)
        y += part * tl.load(shares_ptr + pair)
    tl.store(out_ptr + token.to(tl.int64) * SIZE + outs, y.to(out_ptr.dtype.element_ty), mask=real)


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
    else's can reach."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=2**30)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    begin = tl.sum(before)
    end = begin + tl.sum(own)
    first, last = begin // BLOCK_ROWS + expert, end // BLOCK_ROWS + expert + 1  # the last is the next expert's first
    for start in range(first, last, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        row = begin + (tile - first) * BLOCK_ROWS
        tl.store(tiles_ptr + tile, tl.where(row < end, expert, -1), mask=tile < last)
        tl.store(tiles_ptr + num_tiles + tile, row, mask=tile < last)
        tl.store(tiles_ptr + 2 * num_tiles + tile, tl.minimum(row + BLOCK_ROWS, end), mask=tile < last)
    at = begin
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=2**30) == expert
        tl.store(order_ptr + at + tl.cumsum(mine.to(tl.int32), 0) - 1, pairs, mask=mine)
        at += tl.sum(mine.to(tl.int32))


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_kernel(
    x_ptr,
    weight,
    order_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    GATED: tl.constexpr,
    CHOSEN: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: x [T, H] of tokens -> h [T k, I] in the order of experts. Else x is h -> [T k, H] by pairs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    rows = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BLOCK_ROWS)
    exists = rows < tl.load(tiles_ptr + 2 * num_tiles + tile)
    pairs = tl.load(order_ptr + rows, mask=exists, other=0)
    source, target = rows.to(tl.int64), pairs.to(tl.int64)
    if GATED:
        source, target = target // CHOSEN, source
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = outs < OUT
    HEIGHT: tl.constexpr = 2 * OUT if GATED else OUT
    sums, ups = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32), tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for k in range(0, IN, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        mask = exists[:, None] & (columns < IN)[None, :]
        x = tl.load(x_ptr + source[:, None] * IN + columns[None, :], mask=mask, other=0.0).to(DOT).T
        part = _weights(weight, expert, outs, real, k, HEIGHT, IN, BLOCK_K, FORM).to(DOT)
        sums = tl.dot(part, x, sums, input_precision="ieee")
        if GATED:
            part = _weights(weight, expert, OUT + outs, real, k, HEIGHT, IN, BLOCK_K, FORM).to(DOT)
            ups = tl.dot(part, x, ups, input_precision="ieee")
    sums = _scaled(sums, weight, expert, outs, real, HEIGHT, FORM)
    if GATED:
        sums = _silu_mul(sums, _scaled(ups, weight, expert, OUT + outs, real, HEIGHT, FORM))
    places = out_ptr + target[None, :] * OUT + outs[:, None]
    tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=real[:, None] & exists[None, :])


@triton.jit
def combine_kernel(
    y_ptr,
    shares_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(0, CHOSEN):
        pair = token * CHOSEN + place
        y = tl.load(y_ptr + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        total += y * tl.load(shares_ptr + pair)
    tl.store(out_ptr + token * SIZE + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
