"""What the runner hands back at once: a step in flight, and what comes back from the device when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.sampling.prompt_logprobs import RowLogprobs
from mini_infer.runtime.sampling.sampler import Logprobs
from mini_infer.runtime.worker.request_states import IntArray, Samples


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
    """A step in flight. What it holds on the host can be read when `done` has happened."""

    plan: StepPlan
    done: Event
    sampled: Samples | None = None  # None where no row samples
    logits: Tensor | None = None  # [S, vocab_size] until the next launch; None where no row samples, or drafts do
    tokens: Tensor | None = None  # [S] on the host, with drafts [2, S]: what the target picks, and what stands there
    logprobs: Logprobs | None = None
    prompt_logprobs: Sequence[RowLogprobs] = ()
    drafting: Stopwatch | None = None  # None where no model drafted
    real: IntArray | None = None  # [S]: those among `tokens`, where it has padding


def to_host(token_ids: Tensor) -> Tensor:
    """The tokens on their way to the host: page-locked memory from a GPU, which needs no waiting."""
    return token_ids.to("cpu", non_blocking=True)
