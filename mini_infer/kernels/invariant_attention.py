"""Attention over the paged cache whose every number is the same in any batch, for decode rows and prompts alike.

A query's keys are cut into chunks at fixed positions, a chunk is added up tile by tile, and chunks are merged from the
first to the last. So the sums of a query depend on its position alone:

    keys     | 0 ....... 1023 | 1024 .... 2047 | 2048 . p |          the chunks of a query at position p
    order    ((chunk 0  +  chunk 1)  +  chunk 2)

Prompts have a program a tile of queries, which merges chunks as it goes. Few rows that decode have several programs
each, which leave the states of their chunks in memory, and a second kernel merges those in the same order. Within a
chunk the softmax goes on from tile to tile (FlashAttention-2, Dao 2023, arXiv:2307.08691), as in paged_prefill.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.paged_prefill import DOT_DTYPES, LIMITS, LOWEST, attend, find_row

CHUNK = 1024  # keys
_PROGRAMS = 264  # that decode rows should at least be spread over: two for each SM of an H200


@triton.jit
def _merged(state, part):
    """The state of the chunks up to here, and the next one's: of all. What is fused is said, as in `attend`."""
    acc, total, maximum = state
    part_acc, part_total, part_maximum = part
    new_maximum = tl.maximum(maximum, part_maximum)
    keep, take = tl.exp2(maximum - new_maximum), tl.exp2(part_maximum - new_maximum)
    total = tl.fma(total, keep, part_total * take)
    return tl.fma(acc, keep[:, None], part_acc * take[:, None]), total, new_maximum


# Neither lengths nor where a step's rows begin in a tensor may decide which variant is compiled.
_VARYING = ["tables_ptr", "query_starts_ptr", "seq_lens_ptr", "window", "num_rows", "num_tokens", "table_stride"]


@triton.jit(do_not_specialize=_VARYING)
def _attention_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    accs_ptr,  # [chunks, T, Hq, HEAD_DIM] float32; these three only where SPREAD
    totals_ptr,  # [chunks, T, Hq] float32
    maxima_ptr,  # [chunks, T, Hq] float32
    tables_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    window,
    scale_log2,
    num_rows,
    num_tokens,
    table_stride,
    q_stride,  # between tokens
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPREAD: tl.constexpr,  # a tile's chunks are shared by programs, and merged by _merge_kernel
    DOT: tl.constexpr,
):
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest work, at a prompt's end, first
    kv_head, tile = program % NUM_KV_HEADS, program // NUM_KV_HEADS
    row, packed, query_start, query_len = find_row(query_starts_ptr, tile, num_rows, GROUP, BLOCK_M)
    if packed < query_len * GROUP:
        start = tl.load(seq_lens_ptr + row) - query_len  # tokens before this step's
        queries = packed + tl.arange(0, BLOCK_M)
        tokens = queries // GROUP
        real = tokens < query_len
        columns = tl.arange(0, HEAD_PAD)
        inside = real[:, None] & (columns < HEAD_DIM)[None, :]
        rows = (query_start + tokens).to(tl.int64)
        heads = kv_head * GROUP + queries % GROUP
        q = tl.load(q_ptr + (rows * q_stride + heads * HEAD_DIM)[:, None] + columns[None, :], mask=inside, other=0.0)
        q = q.to(DOT)

        # Keys [all_begin, all_end) are seen by every query of the tile; on both sides of them some see some.
        first = start + packed // GROUP
        last = start + tl.minimum((packed + BLOCK_M - 1) // GROUP, query_len - 1)
        length = last + 1
        begin = 0
        all_begin = 0
        if window is not None:
            begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            all_begin = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
        all_end = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, all_begin)

        keys_ptr += kv_head * HEAD_DIM
        values_ptr += kv_head * HEAD_DIM
        table_ptr = tables_ptr + row * table_stride
        SLOT: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        position = start + tokens
        places = rows * (NUM_KV_HEADS * GROUP) + heads
        outputs = places[:, None] * HEAD_DIM + columns[None, :]
        lowest = tl.full([BLOCK_M], LOWEST, tl.float32)
        nothing = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32), tl.zeros([BLOCK_M], tl.float32), lowest
        state = nothing
        for chunk in range(begin // CHUNK + tl.program_id(1), tl.cdiv(length, CHUNK), tl.num_programs(1)):
            chunk_begin = tl.maximum(chunk * CHUNK, begin)
            chunk_end = tl.minimum(chunk * CHUNK + CHUNK, length)
            to_all = tl.minimum(tl.maximum(all_begin, chunk_begin), chunk_end)
            to_last = tl.minimum(tl.maximum(all_end, chunk_begin), chunk_end)
            part = nothing
            if window is not None:
                part = attend(
                    part, q, position, keys_ptr, values_ptr, table_ptr, chunk_begin, to_all, length, window, scale_log2,
                    BLOCK_SIZE, SLOT, HEAD_DIM, True, BLOCK_N, DOT,
                )  # fmt: skip
            part = attend(
                part, q, position, keys_ptr, values_ptr, table_ptr, to_all, to_last, length, window, scale_log2,
                BLOCK_SIZE, SLOT, HEAD_DIM, False, BLOCK_N, DOT,
            )  # fmt: skip
            part = attend(
                part, q, position, keys_ptr, values_ptr, table_ptr, to_last, chunk_end, length, window, scale_log2,
                BLOCK_SIZE, SLOT, HEAD_DIM, True, BLOCK_N, DOT,
            )  # fmt: skip
            if SPREAD:
                ahead = num_tokens.to(tl.int64) * chunk * (NUM_KV_HEADS * GROUP)
                tl.store(accs_ptr + ahead * HEAD_DIM + outputs, part[0], mask=inside)
                tl.store(totals_ptr + ahead + places, part[1], mask=real)
                tl.store(maxima_ptr + ahead + places, part[2], mask=real)
            else:
                state = _merged(state, part)
        if not SPREAD:
            tl.store(out_ptr + outputs, (state[0] / state[1][:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seq_lens_ptr", "window", "num_tokens"])
def _merge_kernel(
    accs_ptr,
    totals_ptr,
    maxima_ptr,
    out_ptr,
    seq_lens_ptr,
    window,
    num_tokens,
    query_len,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a token of rows that have query_len each."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(seq_lens_ptr + token // query_len) - query_len + (token % query_len).to(tl.int32)
    heads, columns = tl.arange(0, HEADS_PAD), tl.arange(0, HEAD_PAD)
    real = heads < HEADS
    inside = real[:, None] & (columns < HEAD_DIM)[None, :]
    outputs = (token * HEADS + heads)[:, None] * HEAD_DIM + columns[None, :]
    begin = 0
    if window is not None:
        begin = tl.maximum(position - window + 1, 0) // CHUNK
    lowest = tl.full([HEADS_PAD], LOWEST, tl.float32)
    state = tl.zeros([HEADS_PAD, HEAD_PAD], tl.float32), tl.zeros([HEADS_PAD], tl.float32), lowest
    for chunk in range(begin, position // CHUNK + 1):
        ahead = num_tokens.to(tl.int64) * chunk * HEADS
        acc = tl.load(accs_ptr + ahead * HEAD_DIM + outputs, mask=inside, other=0.0)
        total = tl.load(totals_ptr + ahead + token * HEADS + heads, mask=real, other=1.0)
        maximum = tl.load(maxima_ptr + ahead + token * HEADS + heads, mask=real, other=0.0)
        state = _merged(state, (acc, total, maximum))
    tl.store(out_ptr + outputs, (state[0] / state[1][:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def invariant_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    query_len: int | None = None,
    out: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """As `paged_prefill`, in the order above.

    Args:
        query_len: tokens of each row where all have as many, as rows that decode do: long rows are then spread over the
            SMs where rows are few. Which programs do so does not depend on lengths, as a CUDA graph needs it.
        chunk: a multiple of 64, for tests.
    """
    tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    refusal = LIMITS.refusal(head_dim, block_size, q.dtype)
    if refusal is not None:
        raise ValueError(f"batch-invariant attention: {refusal}")
    if out is None:
        out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    group, head_pad, num_rows = num_heads // num_kv_heads, max(triton.next_power_of_2(head_dim), 16), len(seq_lens)
    # One tile for all: what a tile adds up at a time is part of the order.
    block_m, block_n = (32, 32) if q.element_size() == 4 else (64, 64 if head_pad <= 128 else 32)
    num_tiles = (tokens * group // block_m + num_rows) * num_kv_heads
    num_chunks = triton.cdiv(block_tables.shape[1] * block_size, chunk)
    spread = 1 if query_len is None else max(1, min(num_chunks, _PROGRAMS // num_tiles))
    accs = totals = maxima = None
    if spread > 1:
        accs = torch.empty((num_chunks, tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
        totals, maxima = (accs.new_empty((num_chunks, tokens, num_heads)) for _ in range(2))
    heads = {"HEAD_DIM": head_dim, "HEAD_PAD": head_pad, "CHUNK": chunk, "num_warps": 4}
    _attention_kernel[(num_tiles, spread)](
        q, keys, values, out, accs, totals, maxima, block_tables, query_starts, seq_lens, window,
        scale * math.log2(math.e), num_rows, tokens, block_tables.stride(0), q.stride(0), NUM_KV_HEADS=num_kv_heads,
        GROUP=group, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=block_n, SPREAD=spread > 1,
        DOT=DOT_DTYPES[q.dtype], num_stages=1 if q.element_size() == 4 else 2, **heads,
    )  # fmt: skip
    if spread > 1:
        _merge_kernel[(tokens,)](
            accs, totals, maxima, out, seq_lens, window, tokens, query_len, HEADS=num_heads,
            HEADS_PAD=triton.next_power_of_2(num_heads), **heads,
        )  # fmt: skip
    return out
