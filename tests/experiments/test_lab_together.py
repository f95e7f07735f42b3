"""Ranks of an experiment: one that is lost ends the measurement, and is named; and the baseline's second arm."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from experiments import all_reduce
from experiments.lab.measure import together
from experiments.lab.measure.kinds import PeerError, VLLMSettings
from experiments.lab.measure.witness import Timed
from experiments.lab.peers.process import PeerProcess, ask_all
from experiments.lab.show.progress import Steps
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig

HERE = str(Path(__file__).resolve().parent)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("die", "rank 1 could not measure: its process ended with code -9"), ("hang", "more than 2 s")],
)
def test_a_lost_rank_ends_the_measurement(fault: str, message: str) -> None:
    """Whichever is waited for first."""
    started, asked = time.monotonic(), {"items": [Item((5,), 2)], "concurrency": 1}
    faults = ["hang", fault] if fault == "die" else ["none", fault]
    ranks = [
        PeerProcess(
            f"rank {rank}", "fake_peer", EngineConfig(),
            VLLMSettings(pythonpath=HERE, timeout_s=2.0 if fault == "hang" else 60.0, args={"fault": own}),
        )
        for rank, own in enumerate(faults)
    ]  # fmt: skip
    with pytest.raises(PeerError, match=message):
        ask_all(ranks, "measure", "serve", [asked, asked])
    assert not any(rank.alive for rank in ranks)
    assert time.monotonic() - started < 30


def test_the_baseline_is_measured_twice(monkeypatch: pytest.MonkeyPatch, compose_config: Callable[..., Any]) -> None:
    """There and back, the second arm 10 % slower."""
    times = iter([10.0, 5.0, 11.0, 11.0, 5.0, 10.0])

    def timed(ranks: list[Any], *asked: Any) -> list[tuple[dict[str, float], list[Timed]]]:
        return [({"time_us": next(times), together.ERROR: 0.0}, []) for _ in ranks[:1]]

    monkeypatch.setattr(together, "PeerProcess", lambda *of, **more: Mock(about={}))
    monkeypatch.setattr(together, "ask_all", timed)
    small = ("engine.model.device=cpu", "experiment.dtype=float32", "experiment.hidden=32", "experiment.rows=[2]")
    config = compose_config("experiment=all_reduce", *small, "experiment.claims=[]", "measure.aa=always")
    experiment = all_reduce.AllReduceExperiment.from_config(config)
    with Steps("test") as steps:
        found = experiment.measure(steps)
    assert experiment.aa == "library again"
    assert {(row.variant, row.value) for row in found.rows} == {("library", 10), ("library again", 11), ("ours", 5)}
    assert [gate.variant for gate in found.error_gates] == ["library", "ours"]
