"""How much of each request a draft model has computed: counts and blocks, on the host.

    table of a slot    [ 17 | 3 | 42 | 8 ]
    complete           [ y  | y | n  | n ]     of blocks: the draft's part of all their tokens is there
    computed           9 tokens, of block size 4: what is in block 42 so far is known by the slot alone

A draft model need not compute what the target computes: where drafts are not worth making, it does nothing. A block
that the target alone has filled may be found by a later request that shares it, and is computed then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.slots import IntArray

_UNSETTLED = -1  # how much comes with its blocks: its first row will tell


class DraftKV:
    """
    Args:
        num_slots, longest: of the engine; `longest` in tokens.
        num_blocks, num_host_blocks: of both models' stores.
    """

    def __init__(self, num_slots: int, longest: int, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._computed = np.zeros(num_slots, dtype=np.int64)
        self._hoped = np.zeros(num_slots, dtype=bool)  # the last of them are drafts, and may have been rejected
        self._num_unsettled = 0
        self._tables = np.zeros((num_slots, -(-longest // block_size)), dtype=np.int64)
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)
        self._complete = np.zeros(num_blocks, dtype=bool)
        self._on_host = np.zeros(num_host_blocks, dtype=bool)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        device, host = np.array(pairs).T
        self._on_host[host] = self._complete[device]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        host, device = np.array(pairs).T
        self._complete[device] = self._on_host[host]

    def follow(self, plan: StepPlan) -> None:
        """Takes in who has come, which tables have grown, and where requests stand now. For every plan, in order."""
        for admission in plan.admissions:
            slot, table = admission.slot, admission.block_table
            self._num_unsettled += self._computed[slot] != _UNSETTLED
            self._computed[slot], self._hoped[slot] = _UNSETTLED, False
            self._tables[slot, : len(table)], self._num_blocks[slot] = table, len(table)
        for slot, first, blocks in plan.growths:
            self._num_blocks[slot] = first + len(blocks)
            self._tables[slot, first : first + len(blocks)] = blocks
            self._complete[blocks] = False
        if not self._num_unsettled and not self._hoped.any():
            return
        slots, starts = np.array(plan.slots, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        for row in np.flatnonzero(self._computed[slots] == _UNSETTLED):
            self._settle(slots[row], int(starts[row]))
        hoped = self._hoped[slots]
        hoped[list(plan.following)] = False  # as the host is told by a later plan
        self._hoped[slots[hoped]] = False
        self.advance(slots[hoped], np.minimum(self._computed[slots[hoped]], starts[hoped]))

    def computed(self, slots: IntArray) -> IntArray:
        """Leading tokens of each slot whose KV is there."""
        return self._computed[slots]

    def advance(self, slots: IntArray, ends: IntArray) -> None:
        """The slots' tokens up to `ends` are computed."""
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self._complete[self._tables[slot, : end // self._block_size]] = True
            self._computed[slot] = end

    def hope(self, slots: IntArray, ends: IntArray) -> None:
        """Likewise, the last of them being drafts. The next plan says how many of them stand."""
        self._computed[slots], self._hoped[slots] = ends, True

    def _settle(self, slot: int, start: int) -> None:
        """A slot's new owner begins at `start`. Blocks behind are new; those before may lack the draft's part."""
        shared = start // self._block_size
        table = self._tables[slot, : self._num_blocks[slot]]
        known = self._complete[table[:shared]]
        self._complete[table[shared:]] = False
        self._computed[slot] = (shared if known.all() else int(known.argmin())) * self._block_size
        self._num_unsettled -= 1
