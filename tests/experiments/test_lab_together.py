"""Ranks of an experiment: one that is lost ends the measurement, and is named; and the baseline's second arm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import Store

from experiments import all_reduce
from experiments.lab.measure import together
from experiments.lab.show.progress import Steps
from mini_infer.parallel.all_reduce import Collectives
from mini_infer.parallel.context import ParallelContext

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Rank:
    def __init__(self, rank: int, store: Store) -> None:
        one = ParallelContext(rank, 2)
        self.contexts = [replace(one, collectives=Collectives(store, rank, 2, torch.device("cpu")))]

    def notes(self) -> Sequence[str]:
        return ()

    def measure(self, variant: str) -> Mapping[str, float | None]:
        (context,) = self.contexts
        if variant != "sum" and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if variant == "dies" else signal.SIGSTOP)
        return {"sum": float(context.all_reduce(torch.ones(1)))}


@pytest.mark.parametrize(("fault", "message"), [("dies", "rank 1 has ended with code -9"), ("stops", "one hangs")])
def test_a_lost_rank_ends_the_measurement(monkeypatch: pytest.MonkeyPatch, fault: str, message: str) -> None:
    monkeypatch.setattr(together, "START", "fork")
    monkeypatch.setattr(together, "LIMIT_S", 1.0)
    started = time.monotonic()
    with together._together(2, Rank) as ranks:
        assert ranks.measure("sum", {}) == {"sum": 2.0}
        with pytest.raises(RuntimeError, match=message):
            ranks.measure(fault, {})
    assert time.monotonic() - started < 60


def test_the_baseline_is_measured_twice(monkeypatch: pytest.MonkeyPatch, compose_config: Callable[..., Any]) -> None:
    """There and back, the second arm 10 % slower."""
    monkeypatch.setattr(together, "START", "fork")
    times = iter([10.0, 5.0, 11.0, 11.0, 5.0, 10.0])
    monkeypatch.setattr(all_reduce, "time_us", lambda *a: next(times))
    small = ("engine.model.device=cpu", "experiment.dtype=float32", "experiment.hidden=32", "experiment.rows=[2]")
    config = compose_config("experiment=all_reduce", *small, "experiment.claims=[]", "measure.aa=always")
    experiment = all_reduce.AllReduceExperiment.from_config(config)
    with Steps("test") as steps:
        found = experiment.measure(steps)
    assert experiment.aa == "library again"
    assert {(row.variant, row.value) for row in found.rows} == {("library", 10), ("library again", 11), ("ours", 5)}
    assert [gate.variant for gate in found.error_gates] == ["library", "ours"]
