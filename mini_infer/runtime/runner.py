"""The runner: StepPlan -> tensors -> tokens.

    apply the plan's changes to the slots -> copy swapped blocks -> build the input -> model -> sample -> append

The model (and its KV memory) and the sampler are parts that it is given; the dry model is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.runtime.sampler import SamplingState, sample
from mini_infer.runtime.slots import SlotState, StepInput


class StepModel(Protocol):
    """A model together with its KV memory."""

    def forward(self, step: StepInput) -> torch.Tensor:
        """Computes the step's tokens and returns the sampled rows' logits, float32 [S, vocab_size]."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, host block) pairs to the host."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (host block, device block) pairs back."""


class Runner:
    def __init__(self, model: StepModel, slots: SlotState, sampling: SamplingState) -> None:
        self._model = model
        self._slots = slots
        self._sampling = sampling

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a plan that has rows. Row i of the result belongs to row i of the plan."""
        self._slots.apply(plan)
        for a in plan.admissions:
            self._sampling.admit(a.slot, a.params, a.seed, a.prompt_len, a.stop_ids)
        if plan.swap_out:
            self._model.swap_out(plan.swap_out)
        if plan.swap_in:
            self._model.swap_in(plan.swap_in)

        step = self._slots.build(plan)
        tokens: list[list[int]] = [[] for _ in plan.slots]
        logits = self._model.forward(step)
        if not len(step.sampled_rows):
            return StepResult(tokens)

        rows = step.sampled_rows
        lengths = (step.starts + step.counts)[rows]
        batch = self._sampling.batch(step.slots[rows], lengths, self._slots.token_ids)
        sampled = sample(logits, batch)
        token_ids = sampled.token_ids.cpu().numpy()
        self._slots.append(step, token_ids)
        for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            tokens[row] = [token]
        return StepResult(tokens, {int(rows[index]): [entry] for index, entry in sampled.logprobs.items()})
