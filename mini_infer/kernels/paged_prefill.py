"""Causal attention of prompts and chunks of prompts over the paged cache.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) with K and V read through block tables (Kwon et al. 2023,
arXiv:2309.06180), rows of different lengths in one launch, and the query heads of a KV head packed into one tile:

    tile of one KV head    | token 0: heads 0 1 .. G-1 | token 1: heads 0 1 .. G-1 | ...      BLOCK_M queries

A tile of few tokens wastes less above the diagonal than a tile of one head, and K and V are read once for the group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.limits import FP8_CACHE, AttentionLimits
from mini_infer.kernels.paged_decode import attention_reference


def paged_prefill_reference(*tensors: Tensor, max_query_len: int, **rest: Any) -> Tensor:
    """What paged_prefill computes. Arguments as there."""
    return attention_reference(*tensors, **rest)


@dataclass(frozen=True)
class PrefillShape:
    """What the kernel is compiled for, which calls it S."""

    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    head_pad: int  # head_dim and value_dim, or the next powers of two
    value_dim: int
    value_pad: int
    block_size: int
    block_m: int  # queries of a tile
    block_n: int  # keys
    chunk: int | None  # keys that are added up for themselves; None: all
    dot: tl.dtype  # of the factors


def grid_and_shape(
    q: Tensor, keys: Tensor, value_dim: int, rows: int, block_m: int, block_n: int, chunk: int | None = None
) -> tuple[int, PrefillShape]:
    """(programs for all tiles of so many rows, the shape)."""
    (tokens, num_heads, head_dim), (_, block_size, kv_heads, _) = q.shape, keys.shape
    group, pads = num_heads // kv_heads, padded(head_dim, value_dim)
    sizes = kv_heads, group, head_dim, pads[0], value_dim, pads[1], block_size
    shape = PrefillShape(*sizes, block_m, block_n, chunk, DOT_DTYPES[q.dtype])
    return (tokens * group // block_m + rows) * kv_heads, shape


def padded(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The next powers of two, and at least what a matrix product sums over."""
    return max(triton.next_power_of_2(head_dim), 16), max(triton.next_power_of_2(value_dim), 16)


LOWEST = tl.constexpr(-3.0e38)  # finite: where all is masked yet, -inf - -inf is NaN


@triton.jit
def _first_tile(query_start, row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows share one range of tiles without a table of it: from here to the next row's first tile are as many tiles
    as the row's queries can fill, or one too many."""
    return query_start * GROUP // BLOCK_M + row


@triton.jit
def find_row(query_starts_ptr, tile, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's row, the first of the row's packed queries that is its own, and the row's first token and number of
    tokens. Where the first is beyond the row's last, the tile has nothing to do."""
    row = -1  # the last one whose first tile is not after this one
    for first_row in range(0, num_rows, 64):
        candidates = first_row + tl.arange(0, 64)
        real = candidates < num_rows
        query_start = tl.load(query_starts_ptr + candidates, mask=real, other=0)
        row += tl.sum((real & (_first_tile(query_start, candidates, GROUP, BLOCK_M) <= tile)).to(tl.int32))
    query_start = tl.load(query_starts_ptr + row)
    query_len = tl.load(query_starts_ptr + row + 1) - query_start
    return row, (tile - _first_tile(query_start, row, GROUP, BLOCK_M)) * BLOCK_M, query_start, query_len


@triton.jit
def _attend(state, q, position, source, begin, end, S: tl.constexpr, MASKED: tl.constexpr):
    """Adds the keys [begin, end) of a source to state (accumulator, sum, maximum). Reads [begin, length) at most."""
    acc, total, maximum = state
    keys_ptr, values_ptr, table_ptr, length, window, scale_log2 = source
    columns = tl.arange(0, q.shape[1])
    value_columns = tl.arange(0, acc.shape[1])
    lanes = tl.arange(0, S.block_n)
    # A tile's blocks are looked up one tile ahead, so that the prefetch of its K and V does not wait for them.
    next_block = tl.load(table_ptr + tl.minimum(begin + lanes, length - 1) // S.block_size)
    for first in range(begin, end, S.block_n):
        key = first + lanes
        # A key past the end is masked below, and read where there is a number: 0 * NaN would not be 0.
        place = tl.minimum(key, length - 1) if MASKED else key
        block = next_block.to(tl.int64)
        next_block = tl.load(table_ptr + tl.minimum(key + S.block_n, length - 1) // S.block_size)
        slot = ((block * S.block_size + place % S.block_size) * S.kv_heads)[:, None]
        k_ptr, v_ptr = keys_ptr + slot * S.head_dim + columns, values_ptr + slot * S.value_dim + value_columns
        if q.shape[1] == S.head_dim:
            k = tl.load(k_ptr)
        else:
            k = tl.load(k_ptr, mask=columns[None, :] < S.head_dim, other=0.0)
        if acc.shape[1] == S.value_dim:
            v = tl.load(v_ptr)
        else:
            v = tl.load(v_ptr, mask=value_columns[None, :] < S.value_dim, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(S.dot)), input_precision="tf32x3")
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if window is not None:
                visible &= key[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        # Which product and sum are fused is no compiler's choice: in invariant_attention.py every bit counts.
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(tl.fma(scores, scale_log2, -new_maximum[:, None]))
        decay = tl.exp2(maximum - new_maximum)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(S.dot), v.to(S.dot), acc * decay[:, None], input_precision="tf32x3")
        maximum = new_maximum
    return acc, total, maximum


@triton.jit
def _attend_range(state, q, position, source, begin, end, all_begin, all_end, S: tl.constexpr):
    """`_attend` to the keys [begin, end), of which every query of the tile sees [all_begin, all_end)."""
    all_begin = tl.minimum(tl.maximum(all_begin, begin), end)
    all_end = tl.minimum(tl.maximum(all_end, begin), end)
    if source[4] is not None:  # there is a window
        state = _attend(state, q, position, source, begin, all_begin, S, True)
    state = _attend(state, q, position, source, all_begin, all_end, S, False)
    return _attend(state, q, position, source, all_end, end, S, True)


@triton.jit
def merged(state, part):
    """The state of the chunks up to here, and the next one's: of all. What is fused is said, as in `_attend`."""
    acc, total, maximum = state
    part_acc, part_total, part_maximum = part
    new_maximum = tl.maximum(maximum, part_maximum)
    keep, take = tl.exp2(maximum - new_maximum), tl.exp2(part_maximum - new_maximum)
    total = tl.fma(total, keep, part_total * take)
    return tl.fma(acc, keep[:, None], part_acc * take[:, None]), total, new_maximum


# Neither lengths nor where a step's rows begin in a tensor may decide which variant is compiled.
_VARYING = ["tables_ptr", "query_starts_ptr", "seq_lens_ptr", "window", "num_rows", "num_tokens", "table_stride"]


@triton.jit(do_not_specialize=_VARYING)
def paged_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    parts,  # None, or float32 for states of chunks: [chunks, T, Hq, VALUE_DIM], sums and maxima [chunks, T, Hq]
    kv_scales_ptr,  # None, or [2, NUM_KV_HEADS] float32, what keys and values are multiplied by
    tables_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    window,
    scale_log2,
    num_rows,
    num_tokens,
    table_stride,
    q_stride,  # between tokens
    S: tl.constexpr,
):
    BLOCK_M: tl.constexpr = S.block_m
    VALUE_PAD: tl.constexpr = S.value_pad
    CHUNK: tl.constexpr = S.chunk
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest work, at a prompt's end, first
    kv_head, tile = program % S.kv_heads, program // S.kv_heads

    row, packed, query_start, query_len = find_row(query_starts_ptr, tile, num_rows, S.group, BLOCK_M)
    if packed < query_len * S.group:
        start = tl.load(seq_lens_ptr + row) - query_len  # tokens before this step's
        queries = packed + tl.arange(0, BLOCK_M)
        tokens, heads = queries // S.group, kv_head * S.group + queries % S.group
        columns = tl.arange(0, S.head_pad)
        real = tokens < query_len
        value_columns = tl.arange(0, VALUE_PAD)
        inside = real[:, None] & (value_columns < S.value_dim)[None, :]
        rows = (query_start + tokens).to(tl.int64)
        places = (rows * q_stride + heads * S.head_dim)[:, None] + columns[None, :]
        q = tl.load(q_ptr + places, mask=real[:, None] & (columns < S.head_dim)[None, :], other=0.0)
        q = q.to(S.dot)

        # Keys [all_begin, all_end) are seen by every query of the tile; on both sides of them some see some.
        first = start + packed // S.group
        last = start + tl.minimum((packed + BLOCK_M - 1) // S.group, query_len - 1)
        length = last + 1
        begin = 0
        all_begin = 0
        if window is not None:
            begin = tl.maximum(first - window + 1, 0) // S.block_n * S.block_n
            all_begin = tl.cdiv(tl.maximum(last - window + 1, 0), S.block_n) * S.block_n
        all_end = tl.maximum((first + 1) // S.block_n * S.block_n, all_begin)

        v_scale = 1.0
        if kv_scales_ptr is not None:
            scale_log2 *= tl.load(kv_scales_ptr + kv_head)
            v_scale = tl.load(kv_scales_ptr + S.kv_heads + kv_head)
        keys_ptr += kv_head * S.head_dim
        values_ptr += kv_head * S.value_dim
        table_ptr = tables_ptr + row * table_stride
        position = start + tokens
        places = rows * (S.kv_heads * S.group) + heads
        outputs = places[:, None] * S.value_dim + value_columns[None, :]
        lowest = tl.full([BLOCK_M], LOWEST, tl.float32)
        nothing = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32), tl.zeros([BLOCK_M], tl.float32), lowest
        state = nothing
        source = keys_ptr, values_ptr, table_ptr, length, window, scale_log2
        if CHUNK is None:
            state = _attend_range(nothing, q, position, source, begin, length, all_begin, all_end, S)
        else:
            for chunk in range(begin // CHUNK + tl.program_id(1), tl.cdiv(length, CHUNK), tl.num_programs(1)):
                chunk_begin, chunk_end = tl.maximum(chunk * CHUNK, begin), tl.minimum(chunk * CHUNK + CHUNK, length)
                part = _attend_range(nothing, q, position, source, chunk_begin, chunk_end, all_begin, all_end, S)
                if parts is None:
                    state = merged(state, part)
                else:
                    ahead = num_tokens.to(tl.int64) * chunk * (S.kv_heads * S.group)
                    tl.store(parts[0] + ahead * S.value_dim + outputs, part[0], mask=inside)
                    tl.store(parts[1] + ahead + places, part[1], mask=real)
                    tl.store(parts[2] + ahead + places, part[2], mask=real)
        if parts is None:
            result = state[0] / state[1][:, None] * v_scale
            tl.store(out_ptr + outputs, result.to(out_ptr.dtype.element_ty), mask=inside)


# Heads are padded to a power of two by masks; tiles of 512 would not fit into shared memory.
LIMITS = AttentionLimits(
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_sizes=range(1, 257),
    unequal_values=True,
    **FP8_CACHE,
)
DOT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
if triton.knobs.runtime.interpret:
    DOT_DTYPES[torch.bfloat16] = tl.float32  # the interpreter multiplies the bits of a bfloat16


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_memory(self, head_pad: int, value_pad: int, itemsize: int) -> int:
        """Bytes: the queries, and K and V of every stage."""
        return (self.block_m * head_pad + self.num_stages * self.block_n * (head_pad + value_pad)) * itemsize


def _tile(head_pad: int, value_pad: int, itemsize: int, max_queries: int, shared_memory: int) -> _Tile:
    """The best that fits, for rows of up to max_queries queries of a KV head.

    TFLOP/s on an H200, bfloat16, 28/4 heads of 128, blocks of 16, for tokens from 0 and for 512 after 3,584:

        8,192  4,096  512@3,584  8 x 1,024  16 x 512  32 x 256  64 x 128
          431    393        340        276       198       126        71    128, 64, 8, 3
          358    339        296        259       199       135        82    64, 64, 4, 2
    """
    if itemsize == 4:
        return _Tile(32, 32, 4, 1)
    large = [_Tile(128, 64, 8, 3), _Tile(128, 64, 8, 2)] if max_queries > 2048 else []
    tiles = [*large, _Tile(64, 64, 4, 2), _Tile(64, 32, 4, 2)]
    return next(
        (tile for tile in tiles if tile.shared_memory(head_pad, value_pad, itemsize) <= shared_memory), tiles[-1]
    )


@functools.cache
def shared_memory(device: torch.device) -> int | None:
    """Bytes that a program may use; None on a CPU, where it does not matter."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None,
    out: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Each row's queries are the last tokens of its sequence, whose K and V are in the cache already.

    A query at position p sees the keys (p - window, p], or [0, p] without a window; head h reads KV head
    h // (num_heads // num_kv_heads). Softmax and accumulation are in float32.

    Args:
        q: [T, num_heads, head_dim] as LIMITS says, a token's heads contiguous.
        keys, values: [num_blocks, block_size, num_kv_heads, head_dim or value_dim], contiguous, of q's dtype; or
            float8_e4m3fn.
        block_tables: [R, W] int32. Entries past a row's last block are not read.
        query_starts: [R + 1] int32 from 0: row r's queries are the tokens [query_starts[r], query_starts[r + 1]).
        seq_lens: [R] int32, tokens of each sequence, at least its queries.
        max_query_len: of the longest row, at least.
        scale: positive, multiplies q.k.
        out: takes the result where it is given.
        kv_scales: [2, num_kv_heads] float32, what float8 keys and values are multiplied by.

    Returns:
        [T, num_heads, value_dim] of q's dtype, contiguous.

    Raises:
        ValueError: LIMITS says no.
    """
    tokens, num_heads, head_dim = q.shape
    (_, block_size, num_kv_heads, _), value_dim = keys.shape, values.shape[3]
    refusal = LIMITS.refusal(head_dim, block_size, q.dtype, value_dim)
    if refusal is not None:
        raise ValueError(f"paged prefill: {refusal}")
    if out is None:
        out = torch.empty((tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    rows, group = seq_lens.shape[0], num_heads // num_kv_heads
    pads = padded(head_dim, value_dim)
    tile = _tile(*pads, q.element_size(), max_query_len * group, shared_memory(q.device) or 0)
    programs, shape = grid_and_shape(q, keys, value_dim, rows, tile.block_m, tile.block_n)
    paged_prefill_kernel[(programs,)](
        q, keys, values, out, None, kv_scales, block_tables, query_starts, seq_lens, window, scale * math.log2(math.e),
        rows, tokens, block_tables.stride(0), q.stride(0), shape, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
