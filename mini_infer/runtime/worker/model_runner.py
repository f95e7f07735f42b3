"""The runner: StepPlan -> tensors -> tokens.

    launch    start transfers -> one captured graph, or: apply changes -> build the input -> model -> sample
              -> the tokens set out for the host
    collect   wait for them

Everything in `launch` is queued on the device without waiting for it. The model (with its KV memory), the sampler and
the graphs are parts that it is given; the dry model is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan, StepResult, Transfer
from mini_infer.core.request import TokenLogprob
from mini_infer.runtime.sampling.prompt_logprobs import RowLogprobs, prompt_logprobs
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.worker.launched import HostTokens, LaunchedStep
from mini_infer.runtime.worker.request_states import RequestStates, Samples, StepInput
from mini_infer.runtime.worker.threads import Threads, as_it_is
from mini_infer.speculative.draft_steps import DraftSteps


class StepModel(Protocol):
    """A model together with its KV memory."""

    def forward(self, step: StepInput) -> Tensor:
        """Computes the step's tokens and returns a hidden state for each, [T, ...]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, ...] -> [N, vocab_size]"""

    def start_transfer(self, transfer: Transfer) -> None:
        """Queues copies of blocks behind all that was launched so far."""

    def poll_transfers(self, wait: bool) -> tuple[int, ...]:
        """Ids of transfers that have ended since the last call; all that were started, if it is to `wait` for them."""


class Graphs(Protocol):
    def replay(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Logits and tokens of a step that was captured; None where there is no graph for it."""


class Runner:
    """
    Args:
        drafts: launches steps with drafts.
        threads: what a step runs inside, on a CPU.
    """

    def __init__(
        self,
        model: StepModel,
        req_indices: RequestStates,
        sampler: Sampler,
        graphs: Graphs,
        drafts: DraftSteps | None = None,
        threads: Threads = as_it_is,
    ) -> None:
        self._model = model
        self._states = req_indices
        self._sampler = sampler
        self._graphs = graphs
        self._threads = threads
        self._drafts = drafts or DraftSteps(model, req_indices, sampler)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a plan that is not empty."""
        with self._threads(plan.num_tokens):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        params = [self._sampler.admit(a.req_index, a.params, a.seed, a.prompt_len, a.stop_ids) for a in plan.admissions]
        for transfer in plan.transfers:
            self._model.start_transfer(transfer)
            self._drafts.transfer(transfer)
        if not plan.req_indices:
            return LaunchedStep(plan)
        self._drafts.follow(plan)
        if plan.has_drafts:
            self._states.apply(plan, params)
            return self._drafts.launch(plan)
        sampled = Samples.of(plan)
        req_indices, positions = sampled.req_indices, sampled.positions
        masks = sampled.index(plan.masks)
        history = self._states.history
        of_prompts: list[RowLogprobs] = []
        drafting = None
        replayed = self._graphs.replay(plan)
        if replayed is not None:
            logits, token_ids = replayed
            rare, logprobs = self._sampler.rare(req_indices, positions, masks), None
            if rare is not None:
                logprobs = self._sampler.resample(logits, token_ids, rare, history)
                self._states.overwrite(req_indices, positions, token_ids)
        else:
            self._states.apply(plan, params)
            drafting = self._drafts.keep_up(plan)
            step = self._states.build(plan, sampled)
            hidden = self._model.forward(step)
            compute_logits = self._model.compute_logits
            if plan.prompt_logprobs:
                of_prompts = prompt_logprobs(plan, hidden, history, self._sampler.vocab_size, compute_logits)
            if not len(req_indices):
                tokens = HostTokens(step.places) if of_prompts else None  # none of them, but they say when to read
                return LaunchedStep(plan, tokens=tokens, prompt_logprobs=of_prompts, drafting=drafting)
            logits = compute_logits(step.sampled(hidden))
            token_ids, logprobs = self._sampler.sample(logits, step, req_indices, positions, history, masks)
            self._states.append(step, token_ids)
        return LaunchedStep(plan, sampled, logits, HostTokens(token_ids), logprobs, of_prompts, drafting)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for a step's tokens. Row i of the result belongs to row i of the plan."""
        plan = launched.plan
        tokens: list[list[int]] = [[] for _ in plan.req_indices]
        if launched.tokens is None:
            return StepResult(tokens, transfers_done=self._model.poll_transfers(wait=not tokens))
        rows = [] if launched.sampled is None else launched.sampled.rows.tolist()
        arrived = launched.tokens.read()
        if plan.has_drafts:
            picked = arrived if launched.real is None else arrived[:, launched.real]
            keep_accepted(tokens, rows, *picked.tolist())
        else:
            for row, token in zip(rows, arrived.tolist(), strict=True):
                tokens[row].append(token)
        logprobs: dict[int, list[TokenLogprob]] = {}
        for index, entry in ({} if launched.logprobs is None else launched.logprobs.finish()).items():
            own = logprobs.setdefault(rows[index], [])
            if len(own) < len(tokens[rows[index]]):
                own.append(entry)
        of_prompts = {part.row: part.finish() for part in launched.prompt_logprobs}
        draft_s = 0.0 if launched.drafting is None else launched.drafting.read()
        return StepResult(tokens, logprobs, of_prompts, draft_s, self._model.poll_transfers(wait=False))

    def force_token(self, req_index: int, position: int, token_id: int) -> None:
        """Puts another token where the next step reads it."""
        token = torch.tensor([token_id], device=self._states.rows.device)
        self._states.overwrite(np.array([req_index]), np.array([position]), token)


def keep_accepted(tokens: list[list[int]], rows: Sequence[int], picked: Sequence[int], drafts: Sequence[int]) -> None:
    """Puts into `tokens` what each row keeps: it goes on as long as the token is the draft that stands there.

    Args:
        rows: of each token; those of a row are neighbours.
        picked: what the target says comes there.
        drafts: what stands there; NO_DRAFT for nothing.
    """
    last, goes_on = -1, True
    for row, token, draft in zip(rows, picked, drafts, strict=True):
        if row != last or goes_on:
            tokens[row].append(token)
            goes_on = token == draft
        last = row
