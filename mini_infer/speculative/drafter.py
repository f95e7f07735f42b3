"""The draft model's part of a step: it catches up on what the target has computed, and writes its drafts behind each
request's last token, where the target then reads them.

    history      p p p p p t | d d d          t: the last token, whose KV nobody has yet; d: drafts
    draft's KV   . . . . ^                    catches up: everything before the token before t
                         ^ ^ ^ ^              the first round computes two tokens, each further round one

Two, since after a step whose drafts were all accepted it lacks the token before t: whether it does is known on the
device alone, where steps overlap, and a second token costs next to nothing.

Its KV lies in blocks of its own store with the target's block numbers: one block table serves both models, a shared
prefix is shared by both, and a block that is freed, swapped or evicted is so for both. What it has computed of them is
known to DraftKV: it does nothing while drafts are not worth making, and catches up when they are.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan, Transfer
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.worker.request_states import IntArray, RequestStates, Samples
from mini_infer.runtime.worker.torch_model import TorchModel
from mini_infer.speculative.draft_kv import DraftKV


class Drafter(Protocol):
    """Who proposes on the device."""

    has_model: bool

    def follow(self, plan: StepPlan) -> None:
        """Takes in a plan's admissions and growths, and where its rows stand. For every plan, in order, and first."""

    def keep_up(self, plan: StepPlan) -> None:
        """Computes the plan's prompts beside the target."""

    def prepare(self, plan: StepPlan) -> None:
        """Catches up on the plan's rows with drafts, so that `chain` can go on from there."""

    def chain(self, num_rows: int, query_len: int, out: Tensor | None = None) -> Tensor | None:
        """Writes query_len - 1 drafts behind the last token of each packed row, into the history.

        Args:
            out: [largest, V'], memory for the logits where the call is captured in a CUDA graph.

        Returns:
            what they were drawn from [(query_len - 1) * num_rows, V']: all rows' first drafts, their second ones, ...
        """

    def transfer(self, transfer: Transfer) -> None:
        """Starts it for the draft's part of the blocks."""


class NoDrafter:
    """There are no drafts, or the plan brings them."""

    has_model = False

    def follow(self, plan: StepPlan) -> None:
        pass

    def keep_up(self, plan: StepPlan) -> None:
        pass

    def prepare(self, plan: StepPlan) -> None:
        pass

    def chain(self, num_rows: int, query_len: int, out: Tensor | None = None) -> None:
        return None

    def transfer(self, transfer: Transfer) -> None:
        pass


class DraftModel:
    """
    Args:
        model: with a KV store that has the target's number of blocks.
        kv: what it has computed, which is nothing.
        vocab_size: tokens that both models know, and it may propose.
        max_tokens: that it computes in one pass.
    """

    has_model = True

    def __init__(
        self,
        model: TorchModel,
        kv: DraftKV,
        req_indices: RequestStates,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        self._model, self._states, self._sampler = model, req_indices, sampler
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._kv = kv
        self.follow = kv.follow

    def transfer(self, transfer: Transfer) -> None:
        self._kv.transfer(transfer)
        self._model.start_transfer(transfer)
        self._model.poll_transfers(wait=True)  # the target's transfer is all that the scheduler hears of

    def keep_up(self, plan: StepPlan) -> None:
        n = plan.num_decode_rows
        if n < plan.num_rows:
            self._catch_up(np.array(plan.req_indices[n:]), np.add(plan.starts[n:], plan.counts[n:]))

    def prepare(self, plan: StepPlan) -> None:
        n = plan.num_decode_rows
        req_indices, starts, counts = (np.array(column[:n]) for column in (plan.req_indices, plan.starts, plan.counts))
        drafting = counts > 1
        self._catch_up(req_indices[drafting], starts[drafting] - 1)
        known = drafting.copy()
        known[list(plan.following)] = False
        self._kv.advance(req_indices[known], starts[known] + 1)
        self._kv.hope(req_indices[drafting], (starts + counts)[drafting] - 1)

    def chain(self, num_rows: int, query_len: int, out: Tensor | None = None) -> Tensor:
        forward = self._model.forward if out is None else self._model.forward_eagerly
        logits = []
        for place in range(query_len - 1):
            step = self._states.build_rows(num_rows, 1 if place else 2, shift=place or -1, drafting=True).step
            own = None if out is None else out[place * num_rows : (place + 1) * num_rows]
            logits.append(self._model.compute_logits(step.sampled(forward(step)), out=own))
            drafts = self._sampler.main(logits[-1][:, : self._vocab_size], step.param_rows, step.sampled_positions)
            self._states.append(step, drafts)
        drawn_from = torch.cat(logits) if out is None else out[: (query_len - 1) * num_rows]
        return drawn_from[:, : self._vocab_size]

    def _catch_up(self, req_indices: IntArray, ends: IntArray) -> None:
        """Computes the KV of the slots' tokens up to `ends`, as many in a pass as one may have."""
        while True:
            missing = np.maximum(ends - self._kv.computed(req_indices), 0)
            before = np.cumsum(missing) - missing
            take = np.clip(self._max_tokens - before, 0, missing)
            rows = np.flatnonzero(take)
            if not rows.size:
                return
            own, starts, counts = req_indices[rows], self._kv.computed(req_indices[rows]), take[rows]
            plan = StepPlan(
                step=0,
                req_indices=own.tolist(),
                starts=starts.tolist(),
                counts=counts.tolist(),
                samples=[False] * len(rows),
                num_decode_rows=0,
            )
            self._model.forward(self._states.build(plan, Samples.of(plan)))
            self._kv.advance(own, starts + counts)
