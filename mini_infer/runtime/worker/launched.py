"""What the runner hands back at once: a step under way, and what comes back from the device when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.sampling.prompt_logprobs import RowLogprobs
from mini_infer.runtime.sampling.sampler import Logprobs
from mini_infer.runtime.worker.request_states import IntArray, Samples


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step under way."""

    plan: StepPlan
    sampled: Samples | None = None
    logits: Tensor | None = None  # [S, vocab_size] until the next launch; None where no row samples, or drafts do
    tokens: HostTokens | None = None  # [S], with drafts [2, S]: what the target picks, and what stands there
    logprobs: Logprobs | None = None  # can be read when the tokens can, as can those of prompts
    prompt_logprobs: Sequence[RowLogprobs] = ()
    drafting: Stopwatch | None = None  # None where no model drafted
    real: IntArray | None = None  # [S]: those among `tokens`, where it has padding


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

    def read(self) -> Tensor:
        """On the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._token_ids
