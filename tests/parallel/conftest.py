"""Engines over ranks, whose processes are forked from the test's: a new interpreter takes seconds to start, and one
that is forked from tests/serving's helper would not have what a test has patched."""

from __future__ import annotations

import ctypes
import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from forking import fork, popen

from mini_infer import EngineConfig, LLMEngine
from mini_infer.runtime.executor import rank_process


@pytest.fixture(scope="session")
def imported() -> None:
    """What an engine imports, and ranks then need not. What other tests have freed goes back to the system: of a
    gigabyte a fork takes a tenth of a second."""
    LLMEngine(EngineConfig.from_dict({"model": "tiny-target", "cache": {"num_blocks": 64}}))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def ranks_are_forked(imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    start = functools.partial(popen, fork)
    monkeypatch.setattr(rank_process, "subprocess", SimpleNamespace(Popen=start, **names))


@pytest.fixture
def make_engine(ranks_are_forked: None, quick_step_costs: None) -> Iterator[Callable[..., LLMEngine]]:
    """An engine of the shipped model, with 64 blocks of KV; closed after the test."""
    made: list[LLMEngine] = []

    def make(tensor: int = 2, **sections: Any) -> LLMEngine:
        values: dict[str, Any] = {"model": {"path": "tiny-target"}, "seed": 0, **sections}
        values["cache"] = {"num_blocks": 64, **values.get("cache", {})}
        values["parallel"] = {"tensor": tensor, **values.get("parallel", {})}
        made.append(LLMEngine(EngineConfig.from_dict(values)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
