"""The input of a step of rows, and what it leaves, in one launch each instead of about twenty, which a step of a small
model would feel.

The definitions, in torch, are rows.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.uniforms import DRAFT, SYNTHETIC
from mini_infer.kernels.rows import GatheredRows
from mini_infer.kernels.sampling.shared import NUM_PARAMS, SEEDED, TEMPERATURE, uniform

_DRAFT, _SYNTHETIC = tl.constexpr(DRAFT), tl.constexpr(SYNTHETIC)
_NO_DRAFT = tl.constexpr(-1)


def gather_rows(
    state: Tensor,
    next_starts: Tensor,
    packed: Tensor,
    query_len: int,
    *,
    shift: int,
    drafting: bool,
    table: int,
    params: int,
    block_size: int,
) -> GatheredRows:
    """Arguments as of the definition."""
    rows, device = packed.shape[1], packed.device
    width, tokens = state.shape[1], rows * query_len
    samples = rows if drafting else tokens

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    out = GatheredRows(
        token_ids=new(tokens),
        positions=new(tokens),
        slot_mapping=new(tokens),
        block_tables=new(rows, params - table, dtype=torch.int32),
        seq_lens=new(rows, dtype=torch.int32),
        param_rows=new(samples, width - params, dtype=torch.int32),
        places=new(samples),
        sampled_positions=new(samples),
        drafts=new(samples),
        sources=new(samples),
    )
    tile = 1024
    _gather[(rows, triton.cdiv(params - table, tile))](
        state, next_starts, packed, out, rows, width, table, params, block_size, shift,
        QUERY=query_len, QUERIES=triton.next_power_of_2(query_len), DRAFTING=drafting, TILE=tile,
        PARAMS=triton.next_power_of_2(NUM_PARAMS),
    )  # fmt: skip
    return out


@triton.jit
def _gather(
    state,
    next_starts,
    packed,
    out,
    num_rows,
    width,
    first_entry,
    first_param,
    block_size,
    shift,
    QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    DRAFTING: tl.constexpr,
    TILE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    req_index, start = tl.load(packed + row).to(tl.int64), tl.load(packed + num_rows + row)
    begin = state + req_index * width

    column = part * TILE + tl.arange(0, TILE)
    inside = column < first_param - first_entry
    entries = tl.load(begin + first_entry + column, mask=inside, other=0)
    grown, grown_block = tl.load(packed + 3 * num_rows + row), tl.load(packed + 4 * num_rows + row)
    # Entered here and below: a program must not count on reading what it has just stored.
    entries = tl.where(column == grown, grown_block, entries)
    tl.store(begin + first_entry + column, entries, mask=inside & (column == grown))
    tl.store(out.block_tables + row.to(tl.int64) * (first_param - first_entry) + column, entries, mask=inside)
    if part > 0:
        return

    start = tl.where(start < 0, tl.load(next_starts + req_index, mask=start < 0, other=0), start)
    count = tl.load(packed + 2 * num_rows + row)
    place = tl.arange(0, QUERIES)
    some = place < QUERY
    position = tl.maximum(start + shift + place, 0)
    at = row * QUERY + place
    tl.store(out.seq_lens + row, start + shift + QUERY)
    tl.store(out.token_ids + at, tl.load(begin + position, mask=some, other=0).to(tl.int64), mask=some)
    tl.store(out.positions + at, position.to(tl.int64), mask=some)
    own_entry = position // block_size
    block = tl.load(begin + first_entry + own_entry, mask=some, other=0)
    block = tl.where(own_entry == grown, grown_block, block).to(tl.int64)
    tl.store(out.slot_mapping + at, block * block_size + position % block_size, mask=some)

    p = tl.arange(0, PARAMS)
    num_params = width - first_param
    own = tl.load(begin + first_param + p, mask=p < num_params, other=0)
    certain = tl.load(begin + first_param + SEEDED) != 0
    sampled = start + shift + place + 1
    if DRAFTING:
        own = tl.where((p == TEMPERATURE) & certain, 0, own)
        tl.store(out.param_rows + row * num_params + p, own, mask=p < num_params)
        last = place == QUERY - 1
        tl.store(out.places + row + place * 0, req_index * width + sampled, mask=last)
        tl.store(out.sampled_positions + row + place * 0, sampled.to(tl.int64) + _DRAFT, mask=last)
    else:
        here = at[:, None] * num_params + p[None, :]
        tl.store(out.param_rows + here, own[None, :], mask=some[:, None] & (p < num_params)[None, :])
        tl.store(out.places + at, req_index * width + sampled, mask=some)
        tl.store(out.sampled_positions + at, sampled.to(tl.int64), mask=some)
        has_draft = place < count - 1
        draft = tl.load(begin + sampled, mask=has_draft, other=_NO_DRAFT).to(tl.int64)
        tl.store(out.drafts + at, draft, mask=some)
        drawn = (tl.load(begin + first_param + TEMPERATURE) != 0) & ~certain
        tl.store(
            out.sources + at, tl.where(has_draft & drawn, place * num_rows + row, _NO_DRAFT).to(tl.int64), mask=some
        )


def settle_rows(
    state: Tensor,
    next_starts: Tensor,
    req_indices: Tensor,
    sample_starts: Tensor,
    sampled_positions: Tensor,
    drafts: Tensor | None,
    token_ids: Tensor,
    *,
    most: int,
    params: int,
    rate: float | None,
    vocab_size: int,
) -> None:
    """Arguments as of the definition."""
    _settle[(len(req_indices),)](
        state, next_starts, req_indices, sample_starts, sampled_positions, token_ids if drafts is None else drafts,
        token_ids, rate or 0.0, vocab_size, state.shape[1], params, PLACES=triton.next_power_of_2(most),
        HAS_DRAFTS=drafts is not None, AT_RATE=drafts is not None and rate is not None, num_warps=1,
    )  # fmt: skip


# Of any step both lie somewhere in what the host has sent: compiled once, however they are aligned.
@triton.jit(do_not_specialize_on_alignment=["req_indices", "sample_starts"])
def _settle(
    state,
    next_starts,
    req_indices,
    sample_starts,
    sampled_positions,
    drafts,
    token_ids,
    rate,
    vocab_size,
    width,
    first_param,
    PLACES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    AT_RATE: tl.constexpr,
):
    row = tl.program_id(0)
    req_index = tl.load(req_indices + row).to(tl.int64)
    begin, end = tl.load(sample_starts + row), tl.load(sample_starts + row + 1)
    own = state + req_index * width
    place = tl.arange(0, PLACES)
    at = begin + place
    some = at < end
    token = tl.load(token_ids + at, mask=some, other=0)
    position = tl.load(sampled_positions + at, mask=some, other=0)
    goes_on = tl.load(sampled_positions + begin)
    if HAS_DRAFTS:
        draft = tl.load(drafts + at, mask=some, other=_NO_DRAFT)
        if AT_RATE:
            stands = uniform(own + first_param, position + _SYNTHETIC) < rate
            token = tl.where(token == draft, (token + 1) % vocab_size, token)
            token = tl.where(stands & (draft != _NO_DRAFT), draft, token)
            tl.store(token_ids + at, token, mask=some)
        goes_on += tl.min(tl.where((draft != _NO_DRAFT) & (token == draft), PLACES, place))
    tl.store(own + position, token.to(tl.int32), mask=some)
    tl.store(next_starts + req_index, goes_on.to(tl.int32))
