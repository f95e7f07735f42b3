"""Ranks of an experiment without an engine: processes that do the same at the same time, on a GPU each where there are
GPUs."""

from __future__ import annotations

import math
import multiprocessing as mp
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch.distributed import Store

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
ERROR = "error"  # of the worst row on the worst rank, among the metrics


class Rank(Protocol):
    def measure(self, variant: str, **setting: Any) -> Mapping[str, float | None]:
        """Metrics of a variant at a point, and ERROR: the same on all ranks, which are asked the same."""

    def notes(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class RanksSpec(ExperimentSpec):
    """
    Attributes:
        ranks: processes.
        dtype: of the numbers.
        allowed_error: the most that a row may be off by, relative to its norm.
    """

    ranks: int = 2
    dtype: DType = DType.bfloat16
    allowed_error: float = 0.02

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.dtype is DType.auto:
            raise ConfigError(
                "experiment.ranks must be at least 2, and experiment.dtype not auto; got "
                f"{self.ranks}, {self.dtype.value}"
            )


class OverRanks(Probe):
    """
    Attributes:
        make: a rank, of its number and a store through which ranks find each other. Can be pickled.
        reference: what results are compared with.
    """

    spec: RanksSpec
    make: Callable[[int, Store], Rank]
    reference: str

    def measure(self, steps: Steps) -> Findings:
        self._gates: dict[tuple[str, str], ErrorGate] = {}
        with _together(self.spec.ranks, self.make) as (self._first, self._others):
            findings = super().measure(steps)
            notes = list(self._first.notes())
        return replace(findings, error_gates=list(self._gates.values()), notes=notes)

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        for connection in self._others:
            connection.send((variant, dict(point.values)))
        found = dict(self._first.measure(variant, **point.values))
        error = found.pop(ERROR)
        assert error is not None
        self._gates[variant, point.name] = ErrorGate(
            variant, point.name, error, self.spec.allowed_error, self.reference
        )
        return found


def largest(error: float, context: ParallelContext) -> float:
    """Of all ranks'."""
    told = round(error * 1e9) if math.isfinite(error) else 2**62
    return max(number for (number,) in context.exchange([told])) / 1e9


@contextmanager
def _together(size: int, make: Callable[[int, Store], Rank]) -> Iterator[tuple[Rank, list[Connection]]]:
    """Rank 0, and what the others are told through; they end with it."""
    context: Any = mp.get_context(START)
    store = open_store()
    pipes = [context.Pipe() for _ in range(1, size)]
    others = [
        context.Process(target=_follow, args=(make, rank, store.port, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes, 1)
    ]
    for process in others:
        process.start()
    try:
        with torch.inference_mode():
            yield make(0, store), [pipe[0] for pipe in pipes]
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
