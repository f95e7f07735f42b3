"""Ranks of an experiment: one that is lost ends the measurement, and is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch.distributed import Store

from experiments.lab.measure import together
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
