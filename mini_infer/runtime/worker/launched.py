"""What the runner hands back at once: a step in flight, and what comes back from the device when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.sampling.logprobs import Logprobs, RowLogprobs
from mini_infer.runtime.worker.step_input import IntArray, Samples
from mini_infer.speculative.draft_model import Stopwatch


class Event(Protocol):
    """What is used of a torch.cuda.Event."""

    def synchronize(self) -> None: ...


class _Past:
    """On a CPU a step is done when its launch returns."""

    def synchronize(self) -> None:
        pass


def record_event(device: torch.device) -> Event:
    """An event behind everything that the device has been given so far."""
    if device.type != "cuda":
        return _Past()
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step in flight. Its tokens and log-probabilities are on their way to the host, and are there when `done` has
    happened."""

    plan: StepPlan
    done: Event
    sampled: Samples | None = None  # None where no row samples
    logits: Tensor | None = None  # [S, vocab_size] until the next launch; None where no row samples, or drafts do
    tokens: Tensor | None = None  # [S], with drafts [2, S]: what the target picks, and what stands there
    real: IntArray | None = None  # [S]: those among `tokens`, where it has padding
    logprobs: Logprobs | None = None
    prompt_logprobs: Sequence[RowLogprobs] = ()
    drafting: Stopwatch | None = None  # None where no model drafted
