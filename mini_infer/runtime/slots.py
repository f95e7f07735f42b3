"""Per-slot state of the batch, and the model's input for one step built from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mini_infer.core.plan import StepPlan

IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class StepInput:
    """One step's batch: R rows with T tokens in all. Complete when constructed.

    A row's tokens are adjacent; the first `num_decode_rows` rows are running requests.
    """

    slots: IntArray  # [R] int64
    starts: IntArray  # [R] int64: tokens of the request computed before this step
    counts: IntArray  # [R] int64: tokens computed in this step
    num_decode_rows: int
    token_ids: IntArray  # [T] int64
    positions: IntArray  # [T] int64
    slot_mapping: IntArray  # [T] int64: where each token's K and V go, block * block_size + offset
    block_tables: IntArray  # [R, W] int32: W covers the longest row
    sampled_rows: IntArray  # [S] int64: rows that sample
    sampled_tokens: IntArray  # [S] int64: index in T of those rows' last token

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.counts[self.num_decode_rows :].sum())


class SlotState:
    """Tokens and block tables of the requests in the batch, kept between steps so that a plan need only carry
    what changed.

    Args:
        max_num_seqs: slots.
        max_model_len: the longest request, in tokens.
        block_size: tokens a KV block.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Takes in the plan's admissions and grown block tables."""
        for admission in plan.admissions:
            self.token_ids[admission.slot, : len(admission.token_ids)] = admission.token_ids
            self.block_tables[admission.slot, : len(admission.block_table)] = admission.block_table
        for slot, first, blocks in plan.growths:
            self.block_tables[slot, first : first + len(blocks)] = blocks

    def build(self, plan: StepPlan) -> StepInput:
        slots = np.array(plan.slots, dtype=np.int64)
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        ends = np.cumsum(counts)
        row = np.repeat(np.arange(len(slots)), counts)  # [T]: the row each token belongs to
        positions = np.arange(len(row)) - (ends - counts)[row] + starts[row]
        slot = slots[row]
        block, offset = np.divmod(positions, self.block_size)
        sampled_rows = np.flatnonzero(plan.samples)
        width = -(-int((starts + counts).max()) // self.block_size)
        return StepInput(
            slots=slots,
            starts=starts,
            counts=counts,
            num_decode_rows=plan.num_decode_rows,
            token_ids=self.token_ids[slot, positions].astype(np.int64),
            positions=positions,
            slot_mapping=self.block_tables[slot, block].astype(np.int64) * self.block_size + offset,
            block_tables=self.block_tables[slots, :width],
            sampled_rows=sampled_rows,
            sampled_tokens=ends[sampled_rows] - 1,
        )

    def append(self, step: StepInput, token_ids: IntArray) -> None:
        """Writes the sampled tokens [S] behind their rows' tokens, where the next step reads them."""
        rows = step.sampled_rows
        self.token_ids[step.slots[rows], (step.starts + step.counts)[rows]] = token_ids
