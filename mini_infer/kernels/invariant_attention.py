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

from mini_infer.kernels.paged_prefill import LIMITS, LOWEST, grid_and_shape, merged, padded, paged_prefill_kernel

CHUNK = 1024  # keys
_PROGRAMS = 264  # that decode rows should at least be spread over: two for each SM of an H200


@triton.jit(do_not_specialize=["seq_lens_ptr", "window", "num_tokens"])
def _merge_kernel(
    parts,
    out_ptr,
    kv_scales_ptr,
    seq_lens_ptr,
    window,
    num_tokens,
    query_len,
    HEADS: tl.constexpr,
    S: tl.constexpr,
    HEADS_PAD: tl.constexpr,
):
    """One program a token of rows that have query_len each."""
    VALUE_PAD: tl.constexpr = S.value_pad
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(seq_lens_ptr + token // query_len) - query_len + (token % query_len).to(tl.int32)
    heads, columns = tl.arange(0, HEADS_PAD), tl.arange(0, VALUE_PAD)
    real = heads < HEADS
    inside = real[:, None] & (columns < S.value_dim)[None, :]
    outputs = (token * HEADS + heads)[:, None] * S.value_dim + columns[None, :]
    begin = 0
    if window is not None:
        begin = tl.maximum(position - window + 1, 0) // S.chunk
    lowest = tl.full([HEADS_PAD], LOWEST, tl.float32)
    state = tl.zeros([HEADS_PAD, VALUE_PAD], tl.float32), tl.zeros([HEADS_PAD], tl.float32), lowest
    for chunk in range(begin, position // S.chunk + 1):
        ahead = num_tokens.to(tl.int64) * chunk * HEADS
        acc = tl.load(parts[0] + ahead * S.value_dim + outputs, mask=inside, other=0.0)
        total = tl.load(parts[1] + ahead + token * HEADS + heads, mask=real, other=1.0)
        maximum = tl.load(parts[2] + ahead + token * HEADS + heads, mask=real, other=0.0)
        state = merged(state, (acc, total, maximum))
    result = state[0] / state[1][:, None]
    if kv_scales_ptr is not None:
        result *= tl.load(kv_scales_ptr + (HEADS + heads) // S.group, mask=real, other=0.0)[:, None]
    tl.store(out_ptr + outputs, result.to(out_ptr.dtype.element_ty), mask=inside)


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
    kv_scales: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """As `paged_prefill`, in the order above.

    Args:
        query_len: tokens of each row where all have as many, as rows that decode do: long rows are then spread over the
            SMs where rows are few. Which programs do so does not depend on lengths, as a CUDA graph needs it.
        chunk: a multiple of 64, for tests.
    """
    tokens, num_heads, head_dim = q.shape
    block_size, value_dim = keys.shape[1], values.shape[3]
    refusal = LIMITS.refusal(head_dim, block_size, q.dtype, value_dim)
    if refusal is not None:
        raise ValueError(f"batch-invariant attention: {refusal}")
    if out is None:
        out = torch.empty((tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    # One tile for all: what a tile adds up at a time is part of the order.
    wide = max(padded(head_dim, value_dim)) > 128
    block_m, block_n = (32, 32) if q.element_size() == 4 else (64, 32 if wide else 64)
    num_tiles, shape = grid_and_shape(q, keys, value_dim, len(seq_lens), block_m, block_n, chunk)
    num_chunks = triton.cdiv(block_tables.shape[1] * block_size, chunk)
    spread = 1 if query_len is None else max(1, min(num_chunks, _PROGRAMS // num_tiles))
    parts = None
    if spread > 1:
        accs = torch.empty((num_chunks, tokens, num_heads, value_dim), dtype=torch.float32, device=q.device)
        parts = accs, accs.new_empty(accs.shape[:3]), accs.new_empty(accs.shape[:3])
    paged_prefill_kernel[(num_tiles, spread)](
        q, keys, values, out, parts, kv_scales, block_tables, query_starts, seq_lens, window,
        scale * math.log2(math.e), len(seq_lens), tokens, block_tables.stride(0), q.stride(0), shape, num_warps=4,
        num_stages=1 if q.element_size() == 4 else 2,
    )  # fmt: skip
    if parts is not None:
        _merge_kernel[(tokens,)](
            parts, out, kv_scales, seq_lens, window, tokens, query_len, S=shape, HEADS=num_heads,
            HEADS_PAD=triton.next_power_of_2(num_heads), num_warps=4,
        )  # fmt: skip
    return out
