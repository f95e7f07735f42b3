"""The runner's part for steps with drafts: they are made, unless the plan brings them, verified, and settled.

    rows alone           apply changes -> pack rows -> chain (drafts) -> verify: build -> model -> sample -> settle
                         the same whatever is in the rows: as two CUDA graphs where there are some of the size
    rows and prompts     apply changes -> chain -> build -> model -> sample -> the tokens set out for the host

Rows alone may follow a step whose drafts the host has not read yet: the device knows where each of them goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mini_infer.core.plan import NO_DRAFT, StepPlan
from mini_infer.runtime.graphs.decode_graphs import BatchDescriptor
from mini_infer.runtime.graphs.row_graphs import RowGraphs, VerifiedRows
from mini_infer.runtime.sampling.prompt_logprobs import RowLogprobs, prompt_logprobs
from mini_infer.runtime.sampling.sampler import Drawn, Sampler
from mini_infer.runtime.worker.launched import HostTokens, LaunchedStep, Stopwatch
from mini_infer.runtime.worker.request_states import IntArray, RequestStates, Samples
from mini_infer.speculative.drafter import Drafter, NoDrafter
from mini_infer.speculative.proposers.synthetic import stands_at_rate

Result = TypeVar("Result")


class DraftSteps:
    """
    Args:
        drafter: writes drafts that the plan does not bring.
        rate: drafts are accepted at this rate, by a hash of (seed, position), whatever the target says: what comes out
            means nothing, what it costs does. None: as verified.
        always_rows: rows alone never go the way of rows and prompts, so that the next step may follow them unread.
    """

    def __init__(
        self,
        model: Any,
        req_indices: RequestStates,
        sampler: Sampler,
        drafter: Drafter | None = None,
        rate: float | None = None,
        always_rows: bool = False,
    ) -> None:
        self._model, self._states, self._sampler = model, req_indices, sampler
        self._drafter = drafter or NoDrafter()
        self._rate = rate
        self._always_rows = always_rows
        self.graphs = RowGraphs(req_indices, self._drafter.chain, self.verify)
        self.transfer = self._drafter.transfer
        self.follow = self._drafter.follow

    def keep_up(self, plan: StepPlan) -> Stopwatch | None:
        """For a plan without drafts, whose changes have been applied: the draft model computes its prompts, too."""
        if not (plan.keeps_up and self._drafter.has_model and plan.num_decode_rows < plan.num_rows):
            return None
        return self._timed(lambda: self._drafter.keep_up(plan))[1]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a plan with drafts, whose changes have been applied."""
        sampled = Samples.of(plan)
        masks = sampled.index(plan.masks)
        if plan.num_rows == plan.num_decode_rows:
            descriptor = self.graphs.fit(plan.num_rows, plan.counts[-1])
            if descriptor is None and (self._always_rows or plan.following):
                descriptor = BatchDescriptor(plan.num_rows, max(2, plan.counts[-1]))
            if descriptor is not None:
                return self._launch_rows(plan, sampled, masks, descriptor)
        return self._launch_any(plan, sampled, masks)

    # --- rows alone ---------------------------------------------------------------------------------------------------

    def _launch_rows(
        self, plan: StepPlan, sampled: Samples, masks: Mapping[int, bytes], descriptor: BatchDescriptor
    ) -> LaunchedStep:
        draft_logits, drafting = self._draft(plan, 0, descriptor)
        done = self.graphs.verify(descriptor, draft_logits)
        place = np.arange(descriptor.query_len)
        real = np.flatnonzero((place < np.array(plan.counts)[:, None]).ravel())
        rare, logprobs = self._sampler.rare(sampled.req_indices, sampled.positions, masks), None
        if rare is not None:
            rows = done.built.rows
            at = self._states.h2d.send(real)[0].long()
            drawn = None if draft_logits is None else Drawn(rows.drafts[at], draft_logits, rows.sources[at])
            token_ids = done.token_ids[at]
            logprobs = self._sampler.resample(done.logits[at], token_ids, rare, self._states.history, drawn)
            done.token_ids.index_copy_(0, at, token_ids)
            self._settle(done)
        tokens = HostTokens(done.tokens_and_drafts)
        return LaunchedStep(plan, sampled, None, tokens, logprobs, (), drafting, real)

    def verify(
        self, num_rows: int, query_len: int, draft_logits: Tensor | None, out: Tensor | None = None
    ) -> VerifiedRows:
        """As row_graphs.Verify."""
        built = self._states.build_rows(num_rows, query_len)
        step, rows = built.step, built.rows
        if out is None:
            logits = self._model.compute_logits(self._model.forward(step))
        else:
            logits = self._model.compute_logits(self._model.forward_eagerly(step), out=out[: num_rows * query_len])
        tokens_and_drafts = torch.stack((rows.drafts, rows.drafts))
        token_ids = tokens_and_drafts[0]
        token_ids.copy_(
            self._sampler.verify(
                logits, step.param_rows, step.sampled_positions, rows.drafts, draft_logits, rows.sources
            )
        )
        done = VerifiedRows(built, logits, token_ids, tokens_and_drafts)
        self._settle(done)
        return done

    def _settle(self, done: VerifiedRows) -> None:
        self._states.settle(done.built, done.token_ids, self._rate, self._sampler.vocab_size)

    # --- rows and prompts ---------------------------------------------------------------------------------------------

    def _launch_any(self, plan: StepPlan, sampled: Samples, masks: Mapping[int, bytes]) -> LaunchedStep:
        req_indices, sampler = self._states, self._sampler
        first = int(np.searchsorted(plan.counts[: plan.num_decode_rows], 2))  # rows with more drafts come later
        size = plan.num_decode_rows - first, plan.counts[plan.num_decode_rows - 1]
        descriptor = self.graphs.fit(*size) or BatchDescriptor(*size)
        draft_logits, drafting = self._draft(plan, first, descriptor)
        step = req_indices.build(plan, sampled)
        hidden = self._model.forward(step)
        of_prompts: list[RowLogprobs] = []
        if plan.prompt_logprobs:
            of_prompts = prompt_logprobs(
                plan, hidden, req_indices.history, sampler.vocab_size, self._model.compute_logits
            )
        logits = self._model.compute_logits(step.sampled(hidden))
        has_draft = sampled.have_drafts()
        inputs = step.sampled(step.token_ids)
        drafts = inputs.roll(-1).where(req_indices.h2d.send(has_draft)[0].bool(), NO_DRAFT)
        drawn = None
        if draft_logits is not None:
            sources = self._sources(sampled, has_draft, first, descriptor.num_rows)
            drawn = Drawn(drafts, draft_logits, req_indices.h2d.send(sources)[0].long())
        token_ids, logprobs = sampler.sample(
            logits, step, sampled.req_indices, sampled.positions, req_indices.history, masks, drawn
        )
        if self._rate is not None:
            token_ids = self._at_rate(sampled, has_draft, token_ids, drafts, self._rate)
        req_indices.append(step, token_ids)
        tokens = HostTokens(torch.stack((token_ids, drafts)))
        return LaunchedStep(plan, sampled, None, tokens, logprobs, of_prompts, drafting)

    def _draft(self, plan: StepPlan, first: int, descriptor: BatchDescriptor) -> tuple[Tensor | None, Stopwatch | None]:
        """Packs the plan's decode rows from `first` on, and has their drafts made."""

        def draft() -> Tensor | None:
            if plan.keeps_up:
                self._drafter.keep_up(plan)
            self._drafter.prepare(plan)
            self._states.pack_rows(plan, descriptor.num_rows, first)
            return self.graphs.draft(descriptor)

        if not self._drafter.has_model:
            return draft(), None
        return self._timed(draft)

    def _timed(self, run: Callable[[], Result]) -> tuple[Result, Stopwatch]:
        watch = Stopwatch(self._states.rows.device)
        result = run()
        watch.stop()
        return result, watch

    def _sources(self, sampled: Samples, has_draft: NDArray[np.bool_], first: int, num_rows: int) -> IntArray:
        """[S]: where each token's draft has its logits, NO_DRAFT where nothing random drew it."""
        drawn = has_draft & self._sampler.draws_drafts(sampled.req_indices)
        return np.where(drawn, sampled.places() * num_rows + sampled.rows - first, NO_DRAFT)

    def _at_rate(
        self, sampled: Samples, has_draft: NDArray[np.bool_], token_ids: Tensor, drafts: Tensor, rate: float
    ) -> Tensor:
        """As draft_rows.settle_rows, where the host knows all positions."""
        stands = stands_at_rate(self._sampler.keys(sampled.req_indices), sampled.positions, rate)
        forced = self._states.h2d.send(has_draft & stands)[0].bool()
        other = (token_ids + (token_ids == drafts)).remainder(self._sampler.vocab_size)
        return torch.where(forced, drafts, other)
