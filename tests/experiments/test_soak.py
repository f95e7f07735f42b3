"""The soak test itself: it passes on a server as it should be, and sees what it is there to see."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from experiments.soak import RECORD_MIB, Seen, main
from mini_infer.cli import chat
from mini_infer.runtime.llm_engine import RECORDS_KEPT


@pytest.mark.slow
def test_some_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "serving"))
    from forking import forks

    monkeypatch.setattr(chat, "start_server", lambda flags, **more: forks().server(flags, os.environ))
    out = tmp_path / "soak" / "memory.csv"
    assert main(["--minutes", "0.04", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for outcome in ("left", "refused", "streamed", "whole"):
        assert f"{outcome} " in said
    rows = list(csv.DictReader(out.open()))
    assert len(rows) > 10
    assert all(float(row["api_mib"]) > 10 and float(row["engine_mib"]) > 10 for row in rows)


def seen(api_mib: float, engine_mib: float, steps: float = 0.0) -> Seen:
    """Memory that grows by this much from sample to sample."""
    start = 100.0
    return Seen(
        rows=[
            {"seconds": i, "steps": steps * i, "api_mib": start + api_mib * i, "engine_mib": start + engine_mib * i}
            for i in range(40)
        ]
    )


def test_growth_is_a_failure() -> None:
    assert not seen(0.1, 0.1).failures()
    assert "the api process grew" in seen(2.0, 0.0).failures()[0]
    assert "the engine process grew" in seen(0.0, 2.0).failures()[0]


def test_step_records_are_no_growth_until_there_are_all() -> None:
    each = RECORDS_KEPT / 40
    assert not seen(0.0, RECORD_MIB * each, steps=each).failures()
    assert seen(0.0, 2.0 + RECORD_MIB * each, steps=each).failures()
    assert seen(0.0, 2.0, steps=100 * each).failures()


def test_a_wrong_answer_is_a_failure() -> None:
    found = seen(0.0, 0.0)
    found.outcomes["wrong: 500"] += 2
    assert found.failures() == ["2 answers: wrong: 500"]


def test_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--minutes", "0"])
    assert "--minutes must be above 0" in capsys.readouterr().err
