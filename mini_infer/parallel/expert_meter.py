"""What it takes to bring tokens to their experts, by stage: of one rank and one step, over all layers."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from mini_infer.core.plan import ExpertTraffic

STAGES = ("route", "dispatch", "experts", "combine")
Moment = Any  # seconds, or on a GPU an event


class Measured(NamedTuple):
    """A step's, of which a GPU may not have reached the end yet."""

    spans: list[tuple[str, Moment, Moment]]
    sent_bytes: int
    ideal_bytes: int

    def read(self) -> ExpertTraffic:
        """When the device is done with the step."""
        seconds = dict.fromkeys(STAGES, 0.0)
        for stage, begin, end in self.spans:
            seconds[stage] += begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.cuda.Event) else end - begin
        return ExpertTraffic(self.sent_bytes, self.ideal_bytes, *seconds.values())


class Meter:
    """Stages follow each other from `start` on. Bytes are those that go to other ranks for this rank's tokens, and come
    back; the ideal ones are a row there and a row back for each rank where a token has experts."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._last: Moment = 0.0
        self.sent_bytes = self.ideal_bytes = 0

    def start(self) -> None:
        self._last = self._now()

    def ends(self, stage: str) -> None:
        begin, self._last = self._last, self._now()
        self._spans.append((stage, begin, self._last))

    def take(self) -> Measured:
        """What was measured since it was taken before."""
        measured = Measured(self._spans, self.sent_bytes, self.ideal_bytes)
        self._spans, self.sent_bytes, self.ideal_bytes = [], 0, 0
        return measured

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
