"""Engines with roles under measurement: one that ends is told of, and so is a transfer that never was one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experiments import disaggregation
from experiments.disaggregation import APART, AUTO, STREAM, TOGETHER
from mini_infer.core.config import EngineConfig
from mini_infer.serving.link.link import EngineDead


def test_an_engine_that_ends_before_it_serves_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would start another one, and whoever connects waits for one for ten minutes."""
    stopped = []

    def make(path: str) -> Any:
        ended = path.endswith("1")
        ending = "was killed by SIGKILL" if ended else None
        return SimpleNamespace(ending=lambda: ending, stop=lambda: stopped.append(path))

    monkeypatch.setattr(disaggregation, "ways_to_make", lambda config, max_queued: [make, make])
    apart = EngineConfig.from_dict({"parallel": {"prefill": 1, "decode": 1}})
    message = r"an engine of parallel\.prefill=1 and parallel\.decode=1 was killed by SIGKILL before it served"
    with pytest.raises(EngineDead, match=message), disaggregation._Engines(keep=True) as engines:
        engines.start([apart])
    assert len(stopped) == 2


def test_prompts_that_never_moved_are_no_result_of_engines_apart() -> None:
    here, moved = (SimpleNamespace(spans=spans) for spans in ({"queue": 0.1}, {"queue": 0.1, "transfer": 0.2}))
    for variant in (APART, STREAM):
        assert disaggregation._unmoved(variant, [here, here]) == "no prompt was computed by the engine for prompts"
        assert disaggregation._unmoved(variant, [here, moved]) == ""
    for variant in (TOGETHER, AUTO):  # which may compute all where they are decoded
        assert disaggregation._unmoved(variant, [here]) == ""
