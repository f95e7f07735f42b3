"""The input of a decode step, gathered from the slots' state on the device in one launch.

It would be about twenty small gathers and sums otherwise, which a step of a small model would feel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class DecodeInput(NamedTuple):
    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    slot_mapping: Tensor  # [R] int64
    block_tables: Tensor  # [R, W] int32
    param_rows: Tensor  # [R, P] int32
    places: Tensor  # [R] int64: where in the flat state the next token goes


def decode_input(state: Tensor, packed: Tensor, *, table: int, params: int, block_size: int) -> DecodeInput:
    """
    Args:
        state: [slots, width] int32: token history | block table | sampling parameters. A grown block is entered in it.
        packed: [4, R] int32: slots, sequence lengths (this step's token among them), the column of the block table
            that has grown or -1, and the block that it holds now.
        table, params: first columns of the block table and of the parameters.
        block_size: tokens a block.
    """
    rows, device = packed.shape[1], packed.device
    width = state.shape[1]
    table_width, num_params = params - table, width - params
    out = DecodeInput(
        token_ids=torch.empty(rows, dtype=torch.int64, device=device),
        positions=torch.empty(rows, dtype=torch.int64, device=device),
        slot_mapping=torch.empty(rows, dtype=torch.int64, device=device),
        block_tables=torch.empty(rows, table_width, dtype=torch.int32, device=device),
        param_rows=torch.empty(rows, num_params, dtype=torch.int32, device=device),
        places=torch.empty(rows, dtype=torch.int64, device=device),
    )
    tile = 1024
    _gather[(rows, triton.cdiv(table_width, tile))](
        state,
        packed,
        *out,
        rows,
        width,
        table,
        params,
        block_size,
        TILE=tile,
        PARAMS=triton.next_power_of_2(max(1, num_params)),
    )
    return out


@triton.jit
def _gather(
    state,
    packed,
    token_ids,
    positions,
    slot_mapping,
    block_tables,
    param_rows,
    places,
    num_rows,
    width,
    first_entry,
    first_param,
    block_size,
    TILE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    req_index, seq_len = tl.load(packed + row).to(tl.int64), tl.load(packed + num_rows + row)
    grown, block = tl.load(packed + 2 * num_rows + row), tl.load(packed + 3 * num_rows + row)
    begin = state + req_index * width

    column = part * TILE + tl.arange(0, TILE)
    inside = column < first_param - first_entry
    entries = tl.load(begin + first_entry + column, mask=inside, other=0)
    # Entered here and below: a program must not count on reading what it has just stored.
    entries = tl.where(column == grown, block, entries)
    tl.store(begin + first_entry + column, entries, mask=inside & (column == grown))
    tl.store(block_tables + row.to(tl.int64) * (first_param - first_entry) + column, entries, mask=inside)

    if part == 0:
        position = seq_len - 1
        tl.store(token_ids + row, tl.load(begin + position).to(tl.int64))
        tl.store(positions + row, position.to(tl.int64))
        tl.store(places + row, req_index * width + seq_len)
        own = position // block_size
        holding = tl.where(own == grown, block, tl.load(begin + first_entry + own)).to(tl.int64)
        tl.store(slot_mapping + row, holding * block_size + position % block_size)
        p = tl.arange(0, PARAMS)
        num_params = width - first_param
        values = tl.load(begin + first_param + p, mask=p < num_params, other=0)
        tl.store(param_rows + row * num_params + p, values, mask=p < num_params)


def decode_input_reference(state: Tensor, packed: Tensor, *, table: int, params: int, block_size: int) -> DecodeInput:
    """The definition. Arguments as `decode_input`."""
    req_indices, seq_lens, grown, blocks = packed.long()
    grows = grown >= 0
    state[req_indices[grows], table + grown[grows]] = blocks[grows].int()
    positions = seq_lens - 1
    held = state[req_indices, table + positions // block_size].long()
    return DecodeInput(
        token_ids=state[req_indices, positions].long(),
        positions=positions,
        slot_mapping=held * block_size + positions % block_size,
        block_tables=state[req_indices, table:params],
        param_rows=state[req_indices, params:],
        places=req_indices * state.shape[1] + seq_lens,
    )
