"""What it takes to bring tokens to their experts, by stage: of one rank and one step, over all layers."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mini_infer.core.plan import ExpertTraffic
from mini_infer.kernels.interface import Kernels

STAGES = ("route", "dispatch", "experts", "combine")


class Meter:
    """Bytes are those that go to other ranks for this rank's tokens, and come back; the ideal ones are a row there and
    a row back for each rank where a token has experts.

    All of it is added up on the device, where a CUDA graph adds to it as well.
    """

    def __init__(self, device: torch.device, kernels: Kernels) -> None:
        self._device, self._kernel = device, kernels.dispatch if device.type == "cuda" else None
        self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._bytes = torch.zeros(2, dtype=torch.int64, device=device)
        self._spans = torch.zeros(len(STAGES), dtype=torch.int64, device=device)  # nanoseconds

    def clear(self) -> None:
        self._bytes.zero_()
        self._spans.zero_()

    def start(self) -> None:
        """A stage begins."""
        self._stamp(-1)

    def ends(self, stage: str) -> None:
        """The next one begins."""
        self._stamp(STAGES.index(stage))

    def add_bytes(self, sent: int | Tensor, ideal: int | Tensor) -> None:
        self._bytes[0] += sent
        self._bytes[1] += ideal

    def take(self) -> Tensor:
        """For `traffic_of`: what was measured since it was cleared. From a GPU it is on its way when this returns."""
        return torch.cat((self._bytes, self._spans)).to("cpu", non_blocking=True)

    def _stamp(self, stage: int) -> None:
        if self._kernel is not None:
            self._kernel.stamp(self._clock, self._spans, stage)
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter_ns()
        if stage >= 0:
            self._spans[stage] += now - int(self._clock)
        self._clock.fill_(now)


def traffic_of(taken: Tensor) -> ExpertTraffic:
    """When the device is done with the step."""
    sent, ideal, *spans = taken.tolist()
    return ExpertTraffic(sent, ideal, *(ns / 1e9 for ns in spans))
