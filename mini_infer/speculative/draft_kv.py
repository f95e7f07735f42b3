"""How much of each request a draft model has computed: counts and blocks, on the host.

    table of a request   [ 17 | 3 | 42 | 8 ]
    complete           [ y  | y | n  | n ]     of blocks: the draft's part of all their tokens is there
    computed           9 tokens, of block size 4: what is in block 42 so far is known by the request alone

A draft model need not compute what the target computes: where drafts are not worth making, it does nothing. A block
that the target alone has filled may be found by a later request that shares it, and is computed then.
"""

from __future__ import annotations

import numpy as np

from mini_infer.core.plan import StepPlan
from mini_infer.core.uniforms import Array

_UNSETTLED = -1  # how much comes with its blocks: its first row will tell


class DraftKV:
    """
    Args:
        num_requests, longest: that can be there at a time, and in tokens.
        num_blocks, num_host_blocks: of both models' stores.
    """

    def __init__(self, num_requests: int, longest: int, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._computed = np.zeros(num_requests, dtype=np.int64)
        self._hoped = np.zeros(num_requests, dtype=bool)  # the last of them are drafts, and may have been rejected
        self._num_unsettled = 0
        self._tables = np.zeros((num_requests, -(-longest // block_size)), dtype=np.int64)
        self._num_blocks = np.zeros(num_requests, dtype=np.int64)
        self._complete = np.zeros(num_blocks, dtype=bool)
        self._on_host = np.zeros(num_host_blocks, dtype=bool)

    def follow(self, plan: StepPlan) -> None:
        """Takes in what has been swapped, who has come, which tables have grown, and where requests stand now. For
        every plan, in order."""
        for transfer in plan.transfers:
            stores = self._complete, self._on_host
            source, destination = stores if transfer.to_host else stores[::-1]
            for place, other in transfer.pairs:
                destination[other] = source[place]
        for admission in plan.admissions:
            req_index, table = admission.req_index, admission.block_table
            self._num_unsettled += self._computed[req_index] != _UNSETTLED
            self._computed[req_index], self._hoped[req_index] = _UNSETTLED, False
            self._tables[req_index, : len(table)], self._num_blocks[req_index] = table, len(table)
        for req_index, first, blocks in plan.growths:
            self._num_blocks[req_index] = first + len(blocks)
            self._tables[req_index, first : first + len(blocks)] = blocks
            self._complete[blocks] = False
        if not self._num_unsettled and not self._hoped.any():
            return
        req_indices, starts = np.array(plan.req_indices, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        for row in np.flatnonzero(self._computed[req_indices] == _UNSETTLED):
            self._settle(req_indices[row], int(starts[row]))
        hoped = self._hoped[req_indices]
        hoped[list(plan.following)] = False  # as the host is told by a later plan
        self._hoped[req_indices[hoped]] = False
        self.advance(req_indices[hoped], np.minimum(self._computed[req_indices[hoped]], starts[hoped]))

    def computed(self, req_indices: Array) -> Array:
        """Leading tokens of each request whose KV is there."""
        return self._computed[req_indices]

    def advance(self, req_indices: Array, ends: Array) -> None:
        """The requests' tokens up to `ends` are computed."""
        for req_index, end in zip(req_indices.tolist(), ends.tolist(), strict=True):
            self._complete[self._tables[req_index, : end // self._block_size]] = True
            self._computed[req_index] = end

    def hope(self, req_indices: Array, ends: Array) -> None:
        """Likewise, the last of them being drafts. The next plan says how many of them stand."""
        self._computed[req_indices], self._hoped[req_indices] = ends, True

    def _settle(self, req_index: int, start: int) -> None:
        """A request begins at `start`. Blocks behind are new; those before may lack the draft's part."""
        shared = start // self._block_size
        table = self._tables[req_index, : self._num_blocks[req_index]]
        known = self._complete[table[:shared]]
        self._complete[table[shared:]] = False
        self._computed[req_index] = (shared if known.all() else int(known.argmin())) * self._block_size
        self._num_unsettled -= 1
