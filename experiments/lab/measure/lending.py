"""Who serves a pass: a fresh engine or peer, or the one that its variant keeps from the first pass to the last."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from experiments.lab.measure.kinds import Kind
from experiments.lab.measure.schedule import from_outside
from experiments.lab.measure.simulated import SimulatedSubject, Simulator
from experiments.lab.measure.subjects import EngineSubject, open_subject
from experiments.lab.measure.traces import Served
from experiments.lab.peers.base import Subject
from experiments.lab.peers.pool import Lease, Peers
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig

clock = time.perf_counter  # of who watches from outside
WARM_AGAIN, WARM_TOKENS = 2, 16  # requests, and tokens of each, before a pass of an engine that has been warm


@dataclass
class Lent:
    subject: Subject
    # What it was asked for since it was opened, or has forgotten what it knew.
    served: list[Item] = field(default_factory=list)
    warm: set[str] = field(default_factory=set)  # the points at which it has been warmed up in full

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        served = from_outside(self.subject.serve, items, concurrency, clock)
        self.served += items
        return served

    def warm_up(self, point: str, items: Sequence[Item], concurrency: int) -> None:
        """At the measured concurrency; with some short requests where that was done before, since what is compiled and
        allocated once is there, and only the machine has rested."""
        if point in self.warm:
            few = items[:WARM_AGAIN]
            items = [replace(item, output_tokens=min(item.output_tokens, WARM_TOKENS)) for item in few]
        self.serve(items, concurrency)
        self.warm.add(point)

    def forget(self) -> None:
        """What it has learned from passes before."""
        if self.served:
            self.subject.forget()
            self.served.clear()


class Lending:
    """
    Args:
        keep: what was opened for a variant stays open, whatever else runs meanwhile, until `close`. Its settings may
            then not change.
        peers: those that have processes of their own.
        simulator: of the others.
        tell: as of subjects.drive, of engines in this process.

    Attributes:
        about: of each variant, its peer's version and settings (of one whose settings differ between points, several),
            or what its first engine turned out to be.
    """

    def __init__(self, keep: bool, peers: Peers, simulator: Simulator, tell: Callable[[int, int], None]) -> None:
        self._keep = keep
        self._tell = tell
        self._peers = peers
        self._simulator = simulator
        self._kept: dict[str, Lent] = {}
        self.about: dict[str, list[dict[str, Any]]] = {}

    @contextmanager
    def lend(self, variant: str, kind: Kind, config: EngineConfig) -> Iterator[Lent]:
        lent = self._kept.get(variant)
        if lent is None or (isinstance(lent.subject, Lease) and not lent.subject.process.alive):
            lent = Lent(self._open(kind, config))
            if isinstance(lent.subject, EngineSubject):
                lent.subject.tell = self._tell
        elif isinstance(lent.subject, EngineSubject):
            # Whatever was opened since its last turn has emptied the allocator.
            lent.subject.reserve_memory()
        about = self.about.setdefault(variant, [])
        told = lent.subject.about
        if told and told not in about and not (about and kind.can.steps):  # which takes another time to start
            about.append(dict(told))
        if self._keep:
            self._kept[variant] = lent
        try:
            yield lent
        finally:
            if not self._keep:
                lent.subject.close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].subject.close()

    def _open(self, kind: Kind, config: EngineConfig) -> Subject:
        if kind is Kind.simulated:
            return SimulatedSubject(self._simulator.setup(config))
        if torch.cuda.is_initialized():  # an engine sizes its KV memory by what is free
            gc.collect()
            torch.cuda.empty_cache()
        return self._peers.open(kind, config) or open_subject(kind, config)
