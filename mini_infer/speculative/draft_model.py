"""A draft model beside the target: what speculation does on the device.

    plan      takes in a step's plan: who has come, which block tables have grown, where requests stand
    launch    has the drafts made, behind each request's last token, where the target then reads them
    book      takes down what has been computed of each request

    history      p p p p p t | d d d          t: the last token, whose KV nobody has yet; d: drafts
    draft's KV   . . . . ^                    catches up: everything before the token before t
                         ^ ^ ^ ^              the first round computes two tokens, each further round one

Two, since after a step whose drafts were all accepted it lacks the token before t: whether it does is known on the
device alone, where steps overlap, and a second token costs next to nothing.

Its KV lies in blocks of its own store with the target's block numbers: one block table serves both models, a shared
prefix is shared by both, and a block that is freed, swapped or evicted is so for both. It need not compute what the
target computes: it does nothing while drafts are not worth making, and catches up when they are. DraftKV knows how far
it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.core.uniforms import Array

if TYPE_CHECKING:  # it is handed them
    from mini_infer.runtime.sampling.sampler import Sampler
    from mini_infer.runtime.worker.request_states import RequestStates
    from mini_infer.runtime.worker.torch_model import TorchModel


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
            if not transfer.to_host:  # what was computed of a block is not written to its file
                self._on_host[[block for block, _ in transfer.files]] = False
            transfer.copy(self._complete, self._on_host)
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


class Stopwatch:
    """The time between its making and `stop`: a GPU's own, for what it has been given to do."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = self._end = self._now()

    def stop(self) -> None:
        self._end = self._now()

    def read(self) -> float:
        """Seconds. On a GPU: when what was measured is done."""
        return self._start.elapsed_time(self._end) * 1e-3 if self._on_gpu else self._end - self._start

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Drafted(NamedTuple):
    """What `launch` has had done."""

    logits: Tensor | None = None  # [D, V'] that the drafts were drawn from; None where nothing random proposed them
    time: Stopwatch | None = None  # that it takes; None where no model did anything


class Drafter:
    """Who proposes on the device. Here nobody does: there are no drafts, or the plan brings them."""

    def plan(self, plan: StepPlan) -> None:
        """For every plan, in order, before anything else of it is launched."""

    def launch(self, plan: StepPlan, chain: Callable[[], Tensor | None]) -> Drafted:
        """Has the plan's drafts made, by the `chain` of its rows that it is handed, and computes its prompts beside the
        target where that pays. The plan's changes have been applied, but for a row's one new block."""
        return Drafted()

    def chain(self, num_rows: int, query_len: int, out: Tensor | None = None) -> Tensor | None:
        """Writes query_len - 1 drafts behind the last token of each packed row, into the history. Returns what they
        were drawn from [(query_len - 1) * num_rows, V']: all rows' first drafts, their second ones, ...; in `out`
        [largest, V'] where the call is captured in a CUDA graph."""
        return None

    def book(self, plan: StepPlan) -> None:
        """Behind `launch`: what has been computed of the plan's requests."""


class DraftModel(Drafter):
    """
    Args:
        model: with a KV store that has the target's number of blocks.
        kv: what it has computed, which is nothing.
        vocab_size: tokens that both models know.
        max_tokens: that it computes in one pass.
    """

    def __init__(
        self,
        model: TorchModel,
        kv: DraftKV,
        states: RequestStates,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        self._model, self._states, self._sampler = model, states, sampler
        self._kv, self._vocab_size, self._max_tokens = kv, vocab_size, max_tokens

    def plan(self, plan: StepPlan) -> None:
        self._kv.follow(plan)

    def launch(self, plan: StepPlan, chain: Callable[[], Tensor | None]) -> Drafted:
        n = plan.num_decode_rows
        keeps_up = plan.keeps_up and n < plan.num_rows
        if not (plan.num_drafts or keeps_up):
            return Drafted()
        watch = Stopwatch(self._states.device)
        logits = None
        if keeps_up:
            self._catch_up(np.array(plan.req_indices[n:]), np.add(plan.starts[n:], plan.counts[n:]))
        if plan.num_drafts:
            req_indices, starts, counts = decode_rows(plan)
            self._catch_up(req_indices[counts > 1], starts[counts > 1] - 1)
            logits = chain()
        watch.stop()
        return Drafted(logits, watch)

    def chain(self, num_rows: int, query_len: int, out: Tensor | None = None) -> Tensor | None:
        forward = self._model.forward if out is None else self._model.forward_eagerly
        logits = []
        for place in range(query_len - 1):
            step = self._states.build_rows(num_rows, 1 if place else 2, shift=place or -1, drafting=True)
            own = None if out is None else out[place * num_rows : (place + 1) * num_rows]
            logits.append(self._model.compute_logits(step.sampled(forward(step)), out=own))
            drafts = self._sampler.main(logits[-1][:, : self._vocab_size], step.param_rows, step.sampled_positions)
            self._states.append(step, drafts)
        drawn_from = torch.cat(logits) if out is None else out[: (query_len - 1) * num_rows]
        return drawn_from[:, : self._vocab_size]

    def book(self, plan: StepPlan) -> None:
        if not plan.num_drafts:
            return
        req_indices, starts, counts = decode_rows(plan)
        drafting = counts > 1
        known = drafting.copy()
        known[list(plan.following)] = False
        self._kv.advance(req_indices[known], starts[known] + 1)
        self._kv.advance_drafts(req_indices[drafting], (starts + counts)[drafting] - 1)

    def _catch_up(self, req_indices: Array, ends: Array) -> None:
        """Computes the KV of the requests' tokens up to `ends`, as many in a pass as one may have."""
        while True:
            missing = np.maximum(ends - self._kv.computed(req_indices), 0)
            before = np.cumsum(missing) - missing
            take = np.clip(self._max_tokens - before, 0, missing)
            rows = np.flatnonzero(take)
            if not rows.size:
                return
            own, starts, counts = req_indices[rows], self._kv.computed(req_indices[rows]), take[rows]
            none_samples = [False] * len(rows)
            plan = StepPlan(0, own.tolist(), starts.tolist(), counts.tolist(), none_samples, num_decode_rows=0)
            self._model.forward(self._states.build(plan))
            self._kv.advance(own, starts + counts)


def decode_rows(plan: StepPlan) -> tuple[Array, Array, Array]:
    """req_indices, starts and counts of the plan's decode rows."""
    n = plan.num_decode_rows
    return np.array(plan.req_indices[:n]), np.array(plan.starts[:n]), np.array(plan.counts[:n])
