"""Ranks of an experiment without an engine: processes that do the same at the same time, where possible on GPUs."""

from __future__ import annotations

import math
import multiprocessing as mp
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.distributed import Store

from experiments.lab.check import Positive, Several
from experiments.lab.experiment import Findings
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.measure.rounds import Probe
from experiments.lab.points import Point
from experiments.lab.show.progress import Steps
from experiments.lab.spec import ExperimentSpec
from mini_infer.core.config import DType
from mini_infer.core.errors import ConfigError
from mini_infer.parallel.all_reduce import join_store, open_store
from mini_infer.parallel.context import ParallelContext

START = "spawn"  # of a process
LOOK_S = 0.2  # between two looks at the processes
LIMIT_S = 300.0  # of a variant at a point
ERROR = "error"  # of the worst row on the worst rank, among the metrics


class Rank(Protocol):
    contexts: list[ParallelContext]  # all that its ranks say to each other

    @property
    def measure(self) -> Callable[..., Mapping[str, float | None]]:
        """Of a variant and a point's settings, by name: metrics and ERROR, the same on all ranks, which are asked the
        same."""

    def notes(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class RanksSpec(ExperimentSpec):
    ranks: Several = 2  # processes
    dtype: DType = DType.bfloat16  # of the numbers
    allowed_error: Positive = 0.02  # the most that a row may be off by, relative to its norm

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is DType.auto:
            raise ConfigError("experiment.dtype must be one of float32, bfloat16, float16")


class OverRanks(Probe):
    """A probe whose ranks measure together."""

    spec: RanksSpec
    make: Callable[[int, Store], Rank]  # of its number and a store through which ranks find each other; can be pickled
    reference: str  # what results are compared with

    def measure(self, steps: Steps) -> Findings:
        self._gates: dict[tuple[str, str], ErrorGate] = {}
        with _together(self.spec.ranks, self.make) as self._ranks:
            findings = super().measure(steps)
            notes = list(self._ranks.first.notes())
        return replace(findings, error_gates=list(self._gates.values()), notes=notes)

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        found = self._ranks.measure(self.of_arm(variant), dict(point.values))
        error = found.pop(ERROR)
        assert error is not None
        if variant != self.aa:
            of = variant, point.name
            self._gates[of] = ErrorGate(*of, error, self.spec.allowed_error, self.reference)
        return found


def largest(error: float, context: ParallelContext) -> float:
    """Of all ranks'."""
    told = round(error * 1e9) if math.isfinite(error) else 2**62
    return max(number for (number,) in context.exchange([told])) / 1e9


class _Ranks:
    """Rank 0, and processes that do what it does: a thread ends what it waits for where one ends or takes too long."""

    def __init__(self, first: Rank, others: Mapping[BaseProcess, Connection]) -> None:
        self.first, self._others = first, others
        self.ended = threading.Event()  # nothing is measured any more
        self._since: float | None = None  # of a measurement
        self._why = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def measure(self, variant: str, setting: Mapping[str, Any]) -> dict[str, float | None]:
        """Raises RuntimeError where a rank is lost."""
        self._since = time.monotonic()
        try:
            for connection in self._others.values():
                connection.send((variant, setting))
            found = dict(self.first.measure(variant, **setting))
        except Exception as error:
            for process in self._others:  # a rank's end is seen a moment after what it breaks
                process.join(LOOK_S)
            if why := self._why or self._lost():
                raise RuntimeError(why) from error
            raise
        finally:
            self._since = None
        if self._why:  # what was measured is nothing
            raise RuntimeError(self._why)
        return found

    def _watch(self) -> None:
        while not self._why and not self.ended.wait(LOOK_S):
            if (since := self._since) is not None:
                late = time.monotonic() - since > LIMIT_S
                self._why = self._lost() or (f"ranks did not measure within {LIMIT_S:g} s: one hangs" if late else "")
        if self._why:
            for context in self.first.contexts:
                context.abort()
            for process in self._others:  # a CPU waits as long as they live
                process.kill()

    def _lost(self) -> str:
        ended = ((rank, process.exitcode) for rank, process in enumerate(self._others, 1) if not process.is_alive())
        return next((f"rank {rank} has ended with code {code}" for rank, code in ended), "")


@contextmanager
def _together(size: int, make: Callable[[int, Store], Rank]) -> Iterator[_Ranks]:
    """The other ranks end with it."""
    context: Any = mp.get_context(START)
    store, others = open_store(), dict[BaseProcess, Connection]()
    try:
        for rank in range(1, size):
            own, end = context.Pipe()
            process = context.Process(target=_follow, args=(make, rank, store.port, end), daemon=True)
            process.start()
            others[process] = own
        with torch.inference_mode():
            ranks = _Ranks(make(0, store), others)
            try:
                yield ranks
            finally:
                ranks.ended.set()
    finally:
        for process in others:
            process.kill()
            process.join()


@torch.inference_mode()
def _follow(make: Callable[[int, Store], Rank], rank: int, port: int, told: Connection) -> None:
    own = make(rank, join_store(port))
    while True:
        variant, setting = told.recv()
        own.measure(variant, **setting)
