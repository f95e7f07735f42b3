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


class DraftKV:
    """
    Args:
        num_requests, longest: that can be there at a time, and in tokens.
        num_blocks, num_host_blocks: of both models' stores.
    """

    def __init__(self, num_requests: int, longest: int, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._computed = np.zeros(num_requests, dtype=np.int64)
        self._ends_in_drafts = np.zeros(num_requests, dtype=bool)  # which may have been rejected
        self._tables = np.zeros((num_requests, -(-longest // block_size)), dtype=np.int64)
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
        for req_index, first, blocks in plan.growths:
            self._tables[req_index, first : first + len(blocks)] = blocks
            self._complete[blocks] = False
        if plan.admissions:
            starts_by_index = dict(zip(plan.req_indices, plan.starts, strict=True))
            for admission in plan.admissions:
                self._admit(admission.req_index, np.array(admission.block_table), starts_by_index[admission.req_index])
        if not self._ends_in_drafts.any():
            return
        req_indices, starts = np.array(plan.req_indices, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        judged = self._ends_in_drafts[req_indices]
        judged[list(plan.following)] = False  # of those a later plan tells where they stand
        req_indices, starts = req_indices[judged], starts[judged]
        self._ends_in_drafts[req_indices] = False
        self.advance(req_indices, np.minimum(self._computed[req_indices], starts))

    def computed(self, req_indices: Array) -> Array:
        """Leading tokens of each request whose KV is there."""
        return self._computed[req_indices]

    def advance(self, req_indices: Array, ends: Array) -> None:
        """The requests' tokens up to `ends` are computed."""
        for req_index, end in zip(req_indices.tolist(), ends.tolist(), strict=True):
            self._complete[self._tables[req_index, : end // self._block_size]] = True
            self._computed[req_index] = end

    def advance_drafts(self, req_indices: Array, ends: Array) -> None:
        """Likewise, the last of them being drafts. A later plan says how many of them stand."""
        self._computed[req_indices], self._ends_in_drafts[req_indices] = ends, True

    def _admit(self, req_index: int, table: Array, start: int) -> None:
        """Blocks behind `start` are new; those before may lack the draft's part."""
        shared = start // self._block_size
        known = self._complete[table[:shared]]
        self._complete[table[shared:]] = False
        self._tables[req_index, : len(table)] = table
        self._computed[req_index] = (shared if known.all() else int(known.argmin())) * self._block_size
        self._ends_in_drafts[req_index] = False
