"""Before and after a step of rows with drafts, in one launch each instead of about twenty.

    gather_rows   history, block table and parameters of R rows  ->  tokens, positions, KV slots, drafts to verify
    settle_rows   the tokens that were picked                    ->  history, and where each row goes on

The definitions, in torch, are speculative/draft_rows.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.uniforms import DRAFT, SYNTHETIC
from mini_infer.kernels.sample_shared import NUM_PARAMS, SEEDED, TEMPERATURE, uniform

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
) -> tuple[Tensor, ...]:
    """The fields of GatheredRows. Arguments as of the definition."""
    rows, device = packed.shape[1], packed.device
    width, tokens = state.shape[1], rows * query_len
    samples = rows if drafting else tokens

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    out = (
        new(tokens),  # token ids
        new(tokens),  # positions
        new(tokens),  # KV slots
        new(rows, params - table, dtype=torch.int32),  # block tables
        new(rows, dtype=torch.int32),  # sequence lengths
        new(samples, width - params, dtype=torch.int32),  # parameters
        new(samples),  # places
        new(samples),  # sampled positions
        new(samples),  # drafts
        new(samples),  # sources
    )
    tile = 1024
    _gather[(rows, triton.cdiv(params - table, tile))](
        state, next_starts, packed, *out, rows, width, table, params, block_size, shift,
        QUERY=query_len, QUERIES=triton.next_power_of_2(query_len), DRAFTING=drafting, TILE=tile,
        PARAMS=triton.next_power_of_2(NUM_PARAMS),
    )  # fmt: skip
    return out


@triton.jit
def _gather(
    state,
    next_starts,
    packed,
    token_ids,
    positions,
    slot_mapping,
    block_tables,
    seq_lens,
    param_rows,
    places,
    sampled_positions,
    drafts,
    sources,
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
    tl.store(block_tables + row.to(tl.int64) * (first_param - first_entry) + column, entries, mask=inside)
    if part > 0:
        return

    start = tl.where(start < 0, tl.load(next_starts + req_index), start)
    count = tl.load(packed + 2 * num_rows + row)
    place = tl.arange(0, QUERIES)
    some = place < QUERY
    position = tl.maximum(start + shift + place, 0)
    at = row * QUERY + place
    tl.store(seq_lens + row, start + shift + QUERY)
    tl.store(token_ids + at, tl.load(begin + position, mask=some, other=0).to(tl.int64), mask=some)
    tl.store(positions + at, position.to(tl.int64), mask=some)
    block = tl.load(begin + first_entry + position // block_size, mask=some, other=0).to(tl.int64)
    tl.store(slot_mapping + at, block * block_size + position % block_size, mask=some)

    p = tl.arange(0, PARAMS)
    num_params = width - first_param
    own = tl.load(begin + first_param + p, mask=p < num_params, other=0)
    certain = tl.load(begin + first_param + SEEDED) != 0
    sampled = start + shift + place + 1
    if DRAFTING:
        own = tl.where((p == TEMPERATURE) & certain, 0, own)
        tl.store(param_rows + row * num_params + p, own, mask=p < num_params)
        last = place == QUERY - 1
        tl.store(places + row + place * 0, req_index * width + sampled, mask=last)
        tl.store(sampled_positions + row + place * 0, sampled.to(tl.int64) + _DRAFT, mask=last)
    else:
        here = at[:, None] * num_params + p[None, :]
        tl.store(param_rows + here, own[None, :], mask=some[:, None] & (p < num_params)[None, :])
        tl.store(places + at, req_index * width + sampled, mask=some)
        tl.store(sampled_positions + at, sampled.to(tl.int64), mask=some)
        has_draft = place < count - 1
        draft = tl.load(begin + sampled, mask=has_draft, other=_NO_DRAFT).to(tl.int64)
        tl.store(drafts + at, draft, mask=some)
        drawn = (tl.load(begin + first_param + TEMPERATURE) != 0) & ~certain
        tl.store(sources + at, tl.where(has_draft & drawn, place * num_rows + row, _NO_DRAFT).to(tl.int64), mask=some)


def settle_rows(
    state: Tensor,
    next_starts: Tensor,
    packed: Tensor,
    param_rows: Tensor,
    places: Tensor,
    sampled_positions: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    rate: float | None,
    vocab_size: int,
) -> None:
    """Arguments as of the definition."""
    num_rows = packed.shape[1]
    query_len = len(token_ids) // num_rows
    _settle[(num_rows,)](
        state, next_starts, packed, param_rows, places, sampled_positions, drafts, token_ids,
        0.0 if rate is None else rate, vocab_size, num_params=param_rows.shape[1], QUERY=query_len,
        QUERIES=triton.next_power_of_2(query_len), AT_RATE=rate is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _settle(
    state,
    next_starts,
    packed,
    param_rows,
    places,
    sampled_positions,
    drafts,
    token_ids,
    rate,
    vocab_size,
    num_params,
    QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    AT_RATE: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, QUERIES)
    some = place < QUERY
    at = row * QUERY + place
    draft = tl.load(drafts + at, mask=some, other=_NO_DRAFT)
    token = tl.load(token_ids + at, mask=some, other=0)
    position = tl.load(sampled_positions + at, mask=some, other=0)
    if AT_RATE:
        stands = uniform(param_rows + row * QUERY * num_params, position + _SYNTHETIC) < rate
        token = tl.where(token == draft, (token + 1) % vocab_size, token)
        token = tl.where(stands & (draft != _NO_DRAFT), draft, token)
        tl.store(token_ids + at, token, mask=some)
    tl.store(state + tl.load(places + at, mask=some, other=0), token.to(tl.int32), mask=some)
    accepted = tl.min(tl.where((draft != _NO_DRAFT) & (token == draft), QUERIES, place))
    first = tl.load(sampled_positions + row * QUERY)
    tl.store(next_starts + tl.load(packed + row), (first + accepted).to(tl.int32))
