"""The runner: StepPlan -> tensors -> tokens.

    launch    copy swapped blocks -> one captured graph, or: apply changes -> build the input -> model -> sample
              -> the tokens set out for the host
    collect   wait for them

Everything in `launch` is queued on the device without waiting for it. The model (with its KV memory), the sampler and
the graphs are parts that it is given; the dry model is one of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.request import TokenLogprob
from mini_infer.runtime.acceptance import Acceptance, AsVerified
from mini_infer.runtime.drafter import Drafter, NoDrafter
from mini_infer.runtime.prompt_logprobs import RowLogprobs, prompt_logprobs
from mini_infer.runtime.row_graphs import NoRowGraphs, RowGraphs
from mini_infer.runtime.sampler import DraftLogits, Drawn, Logprobs, Sampler
from mini_infer.runtime.slots import Samples, SlotState, StepInput
from mini_infer.speculative.verify import NO_DRAFT


class StepModel(Protocol):
    """A model together with its KV memory."""

    def forward(self, step: StepInput) -> Tensor:
        """Computes the step's tokens and returns a hidden state for each, [T, ...]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, ...] -> [N, vocab_size]"""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, host block) pairs to the host."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (host block, device block) pairs back."""


class Graphs(Protocol):
    def replay(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Logits and tokens of a step that was captured; None where there is no graph for it."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step under way."""

    plan: StepPlan
    sampled: Samples | None = None
    logits: Tensor | None = None  # [S, vocab_size] until the next launch; None where no row samples
    tokens: HostTokens | None = None
    logprobs: Logprobs | None = None  # can be read when the tokens can, as can those of prompts
    prompt_logprobs: Sequence[RowLogprobs] = ()
    drafting: Stopwatch | None = None  # None where there was none


class Runner:
    """
    Args:
        row_graphs: of steps with drafts.
        drafter: writes drafts that the plan does not bring.
        acceptance: what becomes of drafts.
    """

    def __init__(
        self,
        model: StepModel,
        slots: SlotState,
        sampler: Sampler,
        graphs: Graphs,
        row_graphs: RowGraphs | NoRowGraphs | None = None,
        drafter: Drafter | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        self._model = model
        self._slots = slots
        self._sampler = sampler
        self._graphs = graphs
        self._row_graphs = row_graphs or NoRowGraphs()
        self._drafter = drafter or NoDrafter()
        self._acceptance = acceptance or AsVerified()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a plan that is not empty."""
        params = [self._sampler.admit(a.slot, a.params, a.seed, a.prompt_len, a.stop_ids) for a in plan.admissions]
        if plan.swap_out:
            self._model.swap_out(plan.swap_out)
            self._drafter.swap_out(plan.swap_out)
        if plan.swap_in:
            self._model.swap_in(plan.swap_in)
            self._drafter.swap_in(plan.swap_in)
        if not plan.slots:
            return LaunchedStep(plan)
        sampled = Samples.of(plan)
        slots, positions = sampled.slots, sampled.positions
        masks = {int(np.searchsorted(sampled.rows, row)): mask for row, mask in plan.masks.items()}
        history = self._slots.history
        of_prompts: list[RowLogprobs] = []
        drafting = None
        replayed = None if plan.num_drafts else self._graphs.replay(plan)
        if replayed is not None:
            self._drafter.follow(plan)
            logits, token_ids = replayed
            rare, logprobs = self._sampler.rare(slots, positions, masks), None
            if rare is not None:
                logprobs = self._sampler.resample(logits, token_ids, rare, history)
                self._slots.overwrite(slots, positions, token_ids)
        else:
            self._slots.apply(plan, params)
            draft_logits, drafting = self._draft(plan, sampled)
            step = self._slots.build(plan, sampled)
            captured = self._row_graphs.forward(plan) if plan.num_drafts else None
            hidden = self._model.forward(step) if captured is None else captured
            compute_logits = self._model.compute_logits
            if plan.prompt_logprobs:
                of_prompts = prompt_logprobs(plan, hidden, history, self._sampler.vocab_size, compute_logits)
            if not len(slots):
                tokens = HostTokens(step.places) if of_prompts else None  # none of them, but they say when to read
                return LaunchedStep(plan, tokens=tokens, prompt_logprobs=of_prompts)
            logits = compute_logits(step.sampled(hidden))
            drafts = self._drafts(sampled, step) if plan.num_drafts else None
            drawn = None if drafts is None or draft_logits is None else Drawn(drafts, *draft_logits)
            token_ids, logprobs = self._sampler.sample(logits, step, slots, positions, history, masks, drawn)
            if drafts is not None:
                token_ids = self._acceptance.judge(plan, sampled, token_ids, drafts)
            self._slots.append(step, token_ids)
            if drafts is not None:
                token_ids = torch.stack((token_ids, drafts))
        return LaunchedStep(plan, sampled, logits, HostTokens(token_ids), logprobs, of_prompts, drafting)

    def _draft(self, plan: StepPlan, sampled: Samples) -> tuple[DraftLogits | None, Stopwatch | None]:
        if not plan.num_drafts and not plan.keeps_up:
            return self._drafter.draft(plan, sampled), None
        drafting = Stopwatch(self._slots.rows.device)
        draft_logits = self._drafter.draft(plan, sampled)
        drafting.stop()
        return draft_logits, drafting

    def _drafts(self, sampled: Samples, step: StepInput) -> Tensor:
        """[S] int64: the draft at each sampled token's place, NO_DRAFT for none."""
        inputs = step.sampled(step.token_ids)
        has_draft = self._slots.mail.send(sampled.have_drafts())[0].bool()
        return inputs.roll(-1).where(has_draft, NO_DRAFT)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for a step's tokens. Row i of the result belongs to row i of the plan."""
        plan = launched.plan
        tokens: list[list[int]] = [[] for _ in plan.slots]
        if launched.tokens is None:
            return StepResult(tokens)
        rows = [] if launched.sampled is None else launched.sampled.rows.tolist()
        if plan.num_drafts:
            keep_accepted(tokens, rows, *launched.tokens.read())
        else:
            for row, token in zip(rows, launched.tokens.read(), strict=True):
                tokens[row].append(token)
        logprobs: dict[int, list[TokenLogprob]] = {}
        for index, entry in ({} if launched.logprobs is None else launched.logprobs.finish()).items():
            own = logprobs.setdefault(rows[index], [])
            if len(own) < len(tokens[rows[index]]):
                own.append(entry)
        of_prompts = {part.row: part.finish() for part in launched.prompt_logprobs}
        return StepResult(tokens, logprobs, of_prompts, 0.0 if launched.drafting is None else launched.drafting.read())

    def force_token(self, slot: int, position: int, token_id: int) -> None:
        """Puts another token where the next step reads it."""
        token = torch.tensor([token_id], device=self._slots.rows.device)
        self._slots.overwrite(np.array([slot]), np.array([position]), token)


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


class Stopwatch:
    """The time between its making and `stop`: a GPU's own time, for what it has been given to do."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = self._end = self._now()

    def stop(self) -> None:
        self._end = self._now()

    def read(self) -> float:
        """Seconds. On a GPU: when what was measured is done."""
        if isinstance(self._start, torch.cuda.Event) and isinstance(self._end, torch.cuda.Event):
            return self._start.elapsed_time(self._end) * 1e-3
        return self._end - self._start

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class HostTokens:
    """A step's tokens on their way to the host."""

    def __init__(self, token_ids: Tensor) -> None:
        """token_ids of integers; a copy is queued behind what computes them."""
        self._token_ids = token_ids
        self._arrived: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._token_ids = token_ids.to("cpu", non_blocking=True)  # into page-locked memory
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._token_ids.tolist()
