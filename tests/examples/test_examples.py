"""Each example runs, and says what it is about."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "first_tokens": ("def fibonacci(n):", "first: "),
    "scheduler_policy": ("30 in, 50 out", "fewest output tokens first"),
    "workload": ("prefix cache off", "prefix cache on"),
    "read_results": ("Why others do not", "times off"),
}


def test_none_is_left_out() -> None:
    elsewhere = {"openai_client", "server_and_clients"}  # tests/serving runs them
    assert {path.stem for path in FOLDER.glob("*.py")} == SAYS.keys() | elsewhere


def test_results_of_any_age_can_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["read_results", "latency/7b", "batch 1"])
    runpy.run_path(str(FOLDER / "read_results.py"), run_name="__main__")
    assert "times vllm, 95 % interval" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["read_results", "latency/7b", "batch=1"])
    with pytest.raises(SystemExit, match="there is no point 'batch=1'; points are batch 1, "):
        runpy.run_path(str(FOLDER / "read_results.py"), run_name="__main__")


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for text in SAYS[name]:
        assert text in shown
