"""Before and after a step of rows with drafts: its input gathered from the slots' state, and what it leaves there.
These are the definitions; kernels/draft_rows.py does each in one launch.

Where a row goes on is kept on the device, so that the next step need not wait for the host to read it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.core.plan import NO_DRAFT
from mini_infer.core.uniforms import DRAFT
from mini_infer.kernels.draw import PARAM_COLUMNS, SEEDED, TEMPERATURE
from mini_infer.speculative.proposers.synthetic import stands_at_rate


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
        state: [slots, width] int32: token history | block table | sampling parameters.
        next_starts: [slots] int32: where each slot's last step of this kind has left it.
        packed: [3, R] int32: slots; first positions, -1 for `next_starts`; numbers of tokens, drafts included.
        query_len: Q.
        shift: added to the first positions.
        drafting: the last token of each row samples, by parameters that are greedy where the request brings a seed.
            Else all tokens do.
        table, params: first columns of the block table and of the parameters.
    """
    req_indices, starts, counts = packed.long()
    starts = torch.where(starts < 0, next_starts[req_indices], starts)
    place = torch.arange(query_len)
    positions = (starts[:, None] + shift + place).clamp(min=0)  # [R, Q]
    tables, own = state[req_indices, table:params], state[req_indices, params:]
    blocks = tables.gather(1, positions // block_size).long()
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
        param_rows[seeded, TEMPERATURE] = 0
    return GatheredRows(
        token_ids=state[req_indices[:, None], positions].long().flatten(),
        positions=positions.flatten(),
        slot_mapping=(blocks * block_size + positions % block_size).flatten(),
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
    packed: Tensor,
    param_rows: Tensor,
    places: Tensor,
    sampled_positions: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    rate: float | None,
    vocab_size: int,
) -> None:
    """Writes the picked tokens behind their rows' tokens, and where each row goes on: behind the first of them that is
    not its draft.

    Args:
        state, next_starts, packed: as of `gather_rows`, from which the next four come, for all tokens.
        token_ids: [R * Q] int64, contiguous.
        rate: drafts are accepted at this rate, whatever was picked; `token_ids` is then changed. None: as picked.
    """
    has_draft = drafts != NO_DRAFT
    if rate is not None:
        keys = param_rows.numpy().view(PARAM_COLUMNS)["key"][:, 0]
        stands = torch.from_numpy(stands_at_rate(keys, sampled_positions.numpy(), rate))
        other = torch.where(token_ids == drafts, (token_ids + 1) % vocab_size, token_ids)
        token_ids.copy_(torch.where(stands & has_draft, drafts, other))
    state.view(-1).index_copy_(0, places, token_ids.int())
    stands = (has_draft & (token_ids == drafts)).view(packed.shape[1], -1)
    accepted = stands.long().cumprod(dim=1).sum(dim=1)
    first = sampled_positions.view(packed.shape[1], -1)[:, 0]
    next_starts.index_copy_(0, packed[0].long(), (first + accepted).int())
