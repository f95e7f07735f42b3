"""Before and after a step: its input gathered from the requests' state, and what it leaves there. These are the
definitions, in torch; row_kernels.py does each in one launch.

    gather_rows   history, block table and parameters of R rows of Q tokens -> tokens, positions, KV slots, drafts
    settle_rows   the tokens that were picked                               -> history, and where each row goes on

A decode step is the case of Q = 1, without drafts. Where a row goes on is kept on the device, so that the next step
need not wait for the host to read it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.core.plan import NO_DRAFT
from mini_infer.core.uniforms import DRAFT, SYNTHETIC, uniforms
from mini_infer.kernels.sampling.draw import PARAM_COLUMNS, SEEDED, TEMPERATURE

PACKED = 5  # numbers a row of `packed`


class GatheredRows(NamedTuple):
    """R rows of Q tokens, of which S sample: all, or each row's last."""

    token_ids: Tensor  # [R * Q] int64
    positions: Tensor  # [R * Q] int64
    slot_mapping: Tensor  # [R * Q] int64
    block_tables: Tensor  # [R, W] int32
    seq_lens: Tensor  # [R] int32
    param_rows: Tensor  # [S, P] int32
    places: Tensor  # [S] int64: where in the flat state the next token goes
    sampled_positions: Tensor  # [S] int64; where drafts are made, in the stream of core/uniforms.py for them
    drafts: Tensor  # [S] int64: the draft that stands at that place, NO_DRAFT for none
    sources: Tensor  # [S] int64: the row of the draft model's logits that it was drawn from; NO_DRAFT: nothing random


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
    """
    Args:
        state: [requests, width] int32: token history | block table | sampling parameters. Grown blocks are entered.
        next_starts: [requests] int32: where each request's last step has left it.
        packed: [PACKED, R] int32: rows of `state`; first positions, -1 for `next_starts`; numbers of tokens, drafts
            included; the column of the block table that has grown, or -1; the block that it holds now.
        query_len: Q.
        shift: added to the first positions.
        drafting: the last token of each row samples, by parameters that are greedy where the request brings a seed.
            Else all tokens do.
        table, params: first columns of the block table and of the parameters.
        block_size: tokens a block.
    """
    req_indices, starts, counts, grown, blocks = packed.long()
    column = table + grown.clamp(min=0)
    state[req_indices, column] = torch.where(grown < 0, state[req_indices, column], blocks.int())
    starts = torch.where(starts < 0, next_starts[req_indices], starts)
    place = torch.arange(query_len)
    positions = (starts[:, None] + shift + place).clamp(min=0)  # [R, Q]
    tables, own = state[req_indices, table:params], state[req_indices, params:]
    held = tables.gather(1, positions // block_size).long()
    sampled = positions + 1
    param_rows = own.repeat_interleave(query_len, dim=0)
    seeded = own[:, SEEDED] != 0
    has_draft = place < counts[:, None] - 1
    drawn = has_draft & (own[:, TEMPERATURE] != 0)[:, None] & ~seeded[:, None]
    drafts = state[req_indices[:, None], sampled].long().where(has_draft, NO_DRAFT)
    sources = (place * len(req_indices) + torch.arange(len(req_indices))[:, None]).where(drawn, NO_DRAFT)
    if drafting:
        sampled, drafts, sources = sampled[:, -1:], drafts[:, -1:], sources[:, -1:]
        param_rows = own.clone()
        param_rows[:, TEMPERATURE] *= ~seeded
    return GatheredRows(
        token_ids=state[req_indices[:, None], positions].long().flatten(),
        positions=positions.flatten(),
        slot_mapping=(held * block_size + positions % block_size).flatten(),
        block_tables=tables,
        seq_lens=(starts + shift + query_len).int(),
        param_rows=param_rows,
        places=(req_indices[:, None] * state.shape[1] + sampled).flatten(),
        sampled_positions=sampled.flatten() + (DRAFT if drafting else 0),
        drafts=drafts.flatten(),
        sources=sources.flatten(),
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
    """Writes the tokens that were picked behind their rows' tokens, and where each row goes on: behind the first of
    them that is not its draft.

    Args:
        state, next_starts, params: as of `gather_rows`.
        req_indices: [R] int32, rows of `state`.
        sample_starts: [R + 1] int32: row i has picked tokens [sample_starts[i], sample_starts[i + 1]), one at least.
        sampled_positions: [S] int64: the token's place in its sequence.
        drafts: [S] int64: what stands there, NO_DRAFT for nothing; None where each row has picked one token.
        token_ids: [S] int64, contiguous.
        most: tokens that a row has picked.
        rate: drafts are accepted at this rate, whatever was picked; `token_ids` is then changed. None: as picked.
    """
    flat, width = state.view(-1), state.shape[1]
    if drafts is None:
        own = req_indices.long()
        flat.index_copy_(0, own * width + sampled_positions, token_ids.int())
        next_starts.index_copy_(0, own, sampled_positions.int())
        return
    starts = sample_starts.long()
    row = torch.repeat_interleave(torch.arange(len(req_indices)), starts.diff(), output_size=len(token_ids))
    owners = req_indices.long()[row]
    if rate is not None:
        keys = state[owners, params:].numpy().view(PARAM_COLUMNS)["key"][:, 0]
        stands = torch.from_numpy(uniforms(keys, sampled_positions.numpy() + SYNTHETIC) < rate)
        other = torch.where(token_ids == drafts, (token_ids + 1) % vocab_size, token_ids)
        token_ids.copy_(torch.where(stands & (drafts != NO_DRAFT), drafts, other))
    flat.index_copy_(0, owners * width + sampled_positions, token_ids.int())
    first = sampled_positions[starts[:-1]]
    place = torch.arange(len(row)) - starts[row]
    ends_here = torch.where((drafts != NO_DRAFT) & (token_ids == drafts), most, place)
    accepted = torch.full_like(first, most).scatter_reduce(0, row, ends_here, "amin")
    next_starts[req_indices.long()] = (first + accepted).int()
