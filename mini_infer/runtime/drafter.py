"""The draft model's part of a step: it catches up on what the target has computed, and writes its drafts behind each
request's last token, where the target then reads them.

    history      p p p p p t | d d d          t: the last token, whose KV nobody has yet; d: drafts
    draft's KV   . . . ^                      catches up: everything before t, in the pass that computes t
                          ^ ^                 one pass for each further draft; the last one's KV is not needed
    target                  t d d d           verifies all of them in one pass

Its KV lies in blocks of its own store with the target's block numbers: one block table serves both models, a shared
prefix is shared by both, and a block that is freed, swapped or evicted is so for both. What it has computed of them is
known to DraftKV: it does nothing while drafts are not worth making, and catches up when they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.draft_kv import DraftKV
from mini_infer.runtime.row_graphs import NoRowGraphs, RowGraphs
from mini_infer.runtime.sampler import DraftLogits, Sampler
from mini_infer.runtime.slots import IntArray, Samples, SlotState
from mini_infer.runtime.torch_model import TorchModel
from mini_infer.speculative.verify import NO_DRAFT


class Drafter(Protocol):
    """Who proposes on the device."""

    def follow(self, plan: StepPlan) -> None:
        """Takes in a plan without drafts or prompts, which it has no part in."""

    def draft(self, plan: StepPlan, samples: Samples) -> DraftLogits | None:
        """Writes the plan's drafts into the history, and keeps up with its prompts. Returns what the drafts were drawn
        from; None where nothing random drew them, as in a plan of greedy rows."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class NoDrafter:
    """There are no drafts, or the plan brings them."""

    def follow(self, plan: StepPlan) -> None:
        pass

    def draft(self, plan: StepPlan, samples: Samples) -> None:
        return None

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass


class DraftModel:
    """
    Args:
        model: with a KV store that has the target's number of blocks.
        kv: what it has computed, which is nothing.
        vocab_size: tokens that both models know, and it may propose.
        max_tokens: that it computes in one pass.
        graphs: captured forwards of rows of one and of two tokens.
    """

    def __init__(
        self,
        model: TorchModel,
        kv: DraftKV,
        slots: SlotState,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_tokens: int,
        graphs: RowGraphs | NoRowGraphs | None = None,
    ) -> None:
        self._graphs = graphs or NoRowGraphs()
        self._model, self._slots, self._sampler = model, slots, sampler
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._kv = kv
        self.follow = kv.follow

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._kv.swap_out(pairs)
        self._model.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._kv.swap_in(pairs)
        self._model.swap_in(pairs)

    def draft(self, plan: StepPlan, samples: Samples) -> DraftLogits | None:
        self._kv.follow(plan)
        slots, starts = np.array(plan.slots, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        n = plan.num_decode_rows
        if plan.keeps_up and n < plan.num_rows:
            self._catch_up(slots[n:], np.add(starts, plan.counts)[n:])
        if not plan.num_drafts:
            return None
        counts = np.array(plan.counts[:n])
        first = int(np.searchsorted(counts, 2))  # rows with more drafts come later
        self._catch_up(slots[first:n], starts[first:n] - 1)  # all but two at most, which the first round computes
        logits = []
        for place in range(int(counts[-1]) - 1):
            first = int(np.searchsorted(counts, place + 2))
            logits.append(self._round(slots[first:n], starts[first:n] + place))
            if not place:
                self._kv.advance(slots[first:n], starts[first:n] + 1)
            self._kv.hope(slots[first:n], starts[first:n] + place + 1)
        if self._sampler.all_greedy(slots[:n]):
            return None
        # Round by round: [drafts of place 0 | drafts of place 1 | ...], and in each the rows in order.
        drafted = np.flatnonzero(samples.have_drafts())
        sources = np.full(len(samples.rows), NO_DRAFT, dtype=np.int64)
        sources[drafted[np.argsort(samples.places()[drafted], kind="stable")]] = np.arange(len(drafted))
        return DraftLogits(torch.cat(logits), self._slots.mail.send(sources)[0].long())

    def _round(self, slots: IntArray, positions: IntArray) -> Tensor:
        """Drafts a token behind those at `positions`. Returns the logits that it was drawn from."""
        plan = _rows(slots, self._kv.computed(slots), positions + 1, samples=True)
        samples = Samples.of(plan)
        step = self._slots.build(plan, samples)
        hidden = self._graphs.forward(plan)
        if hidden is None:
            hidden = self._model.forward(step)
        logits = self._model.compute_logits(step.sampled(hidden))[:, : self._vocab_size]
        self._slots.append(step, self._sampler.propose(logits, step, samples.slots, samples.positions))
        return logits

    def _catch_up(self, slots: IntArray, ends: IntArray) -> None:
        """Computes the KV of the slots' tokens up to `ends`, as many in a pass as one may have."""
        while True:
            missing = np.maximum(ends - self._kv.computed(slots), 0)
            before = np.cumsum(missing) - missing
            take = np.clip(self._max_tokens - before, 0, missing)
            rows = np.flatnonzero(take)
            if not rows.size:
                return
            own, starts = slots[rows], self._kv.computed(slots[rows])
            plan = _rows(own, starts, starts + take[rows], samples=False)
            step = self._slots.build(plan, Samples.of(plan))
            self._model.forward(step)
            self._kv.advance(own, starts + take[rows])


def _rows(slots: IntArray, starts: IntArray, ends: IntArray, samples: bool) -> StepPlan:
    counts = ends - starts
    one_each = bool((counts == 1).all())
    return StepPlan(
        step=0,
        slots=slots.tolist(),
        starts=starts.tolist(),
        counts=counts.tolist(),
        samples=[samples] * len(slots),
        num_decode_rows=len(slots) if one_each else 0,
    )
