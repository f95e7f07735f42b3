"""What run.py does beside running experiments: compare two results, write a trace, rebuild the reports."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from made_up import different, engine_steps, requests, result

from experiments.lab.commands import COMMANDS
from experiments.lab.judge import stats
from experiments.lab.show import perfetto
from experiments.lab.show.compare import OTHER_MACHINE, compare
from experiments.lab.show.grids import SCREEN
from experiments.lab.store import result as store
from experiments.lab.store import runs
from experiments.lab.store.result import StoreError

ROOT = Path(__file__).resolve().parents[2]


def stored(folder, *results):
    return [store.write(folder, each) for each in results]


@pytest.fixture
def command(run_py, capsys):
    """Types it; its exit code, stdout and stderr."""
    return lambda *arguments: (run_py(*map(str, arguments)), *capsys.readouterr())


# compare


def test_two_runs_stand_side_by_side(tmp_path):
    ours = result(variants={"base": "off", "new": "on"})
    theirs = result(hardware="h200", variants={"base": "off", "new": "on"}, factor=1.2, seed=5)
    origin = replace(theirs.info.provenance, commit="fedcba9876543210", clean=False, versions={"torch": "2.14"})
    config = {"engine": {"seed": 0, "cache": {"block_size": 32}}, "paths": {"results": "elsewhere"}}
    a, b = stored(tmp_path, ours, replace(theirs, info=replace(theirs.info, provenance=origin, config=config)))
    text = compare(a, b)
    assert max(map(len, text.splitlines())) <= SCREEN + len(str(tmp_path))
    assert "commit 0123456789ab, clean tree" in text
    assert "commit fedcba987654, with uncommitted changes" in text
    lines = [line for line in text.splitlines() if "x [" in line]
    assert len(lines) == 12
    assert "1.2" in lines[0]
    assert lines[0].endswith("B faster")  # more tokens a second
    assert lines[-1].endswith("B slower")  # more milliseconds
    assert "12 rows: 8 B slower, 4 B faster." in text
    differences = text[text.index("What differs") :]
    assert "engine.cache.block_size: 16 -> 32" in differences
    assert "versions.torch: 2.13 -> 2.14" in differences
    assert "versions.python: 3.11 -> -" in differences
    assert "paths" not in differences


def test_two_processors_of_one_key_are_named_before_anything_is_called_faster(tmp_path):
    ours, theirs = result(), result(run="b", factor=1.2)
    there = replace(theirs.info.provenance, device={**theirs.info.provenance.device, "cpu": "Another CPU"})
    assert ours.info.hardware == theirs.info.hardware
    text = compare(*stored(tmp_path, ours, replace(theirs, info=replace(theirs.info, provenance=there))))
    before, _, after = text.partition(OTHER_MACHINE)
    assert all(name in before for name in ("A CPU, 2 cores", "Another CPU, 2 cores"))
    assert "B faster" in after
    assert OTHER_MACHINE not in compare(*stored(tmp_path, ours, theirs))


def test_the_same_numbers_show_no_difference(tmp_path):
    a, b = stored(tmp_path, result(seed=1, noise=0.05), result(run="again", seed=2, noise=0.05))
    text = compare(a, b)
    assert "no difference shown" in text
    assert "What differs beside the numbers (A -> B):\n  nothing" in text
    a, b = stored(tmp_path, result(noise=0), result(run="again", noise=0))
    assert "12 rows: 12 the same." in compare(a, b)


def test_rows_that_do_not_count_have_no_verdict(tmp_path):
    ours, theirs = result(), result(run="b", gates=[different("new", "concurrency=8")])
    rows = [replace(r, valid=False, reason="x") if r.point == "concurrency=1" else r for r in ours.rows]
    zero = [replace(r, value=0.0) if r.metric == "itl_p99_ms" and r.variant == "base" else r for r in theirs.rows]
    a, b = stored(tmp_path, replace(ours, rows=tuple(rows)), replace(theirs, rows=tuple(zero)))
    text = compare(a, b)
    assert text.count("INVALID in A") == 6 + 1
    assert text.count("gate FAILED in B") == 3 + 1  # and once in the count
    assert text.count("no ratio to 0") == 1 + 1
    once = result(run="c", repeats=1)
    (c,) = stored(tmp_path, once)
    assert "one repeat" in compare(a, c)


def test_what_only_one_of_them_has_is_named(tmp_path):
    a, b = stored(tmp_path, result(sizes=(1, 8)), result(run="b", sizes=(8, 64)))
    text = compare(a, b)
    assert "Only in A, points: concurrency=1" in text
    assert "Only in B, points: concurrency=64" in text


def test_a_point_without_a_name_leaves_nothing_dangling(tmp_path):
    wide = {
        "base": "whole prompts",
        "new": "a label that is so long that a table with it is too wide for a screen " * 2,
    }
    ours = result(sizes=(1,), variants=wide)
    nameless = [replace(row, point="") for row in ours.rows]
    ours = replace(ours, info=replace(ours.info, points={"": {}}, claims=(), gates=()), rows=tuple(nameless))
    a, b = stored(tmp_path, ours, replace(ours, info=replace(ours.info, run="b")))
    lines = [line.rstrip() for line in compare(a, b).splitlines()]
    assert "Output tokens per second, tokens/s (higher is better)" in lines
    assert not [line for line in lines if line.endswith(" at")]


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    a, b, c = stored(tmp_path, result(), result("other"), result(run="c", variants={"x": "x"}, baseline=None))
    with pytest.raises(StoreError, match="A is a run of demo and B of other: compare two runs of one experiment"):
        compare(a, b)
    with pytest.raises(StoreError, match="the same result"):
        compare(a, a)
    with pytest.raises(StoreError, match="nothing to compare"):
        compare(a, c)
    document = json.loads(b.read_text())
    b.write_text(json.dumps({**document, "format": 1}))
    with pytest.raises(StoreError, match=r"format 1; this version reads format \d"):
        compare(a, b)


def test_an_unpaired_ratio_takes_the_noise_of_both():
    found = stats.unpaired_ratio([2.0, 2.2, 1.8, 2.1, 1.9], [1.0, 1.1, 0.9, 1.05, 0.95])
    assert found.median == pytest.approx(2.0)
    assert found.low < 1.9
    assert found.high > 2.1
    assert stats.unpaired_ratio([2.0], [1.0, 1.1]).low is None
    exact = stats.unpaired_ratio([2.0, 2.0], [1.0, 1.0])
    assert (exact.low, exact.median, exact.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="above 0"):
        stats.unpaired_ratio([0.0, 1.0], [1.0, 1.0])


def test_an_unpaired_interval_misses_the_truth_about_once_in_twenty():
    import numpy as np

    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        a, b = np.exp(rng.normal(0, 0.05, 5)), np.exp(rng.normal(0, 0.05, 5))
        found = stats.unpaired_ratio(a.tolist(), b.tolist())
        missed += not found.low <= 1 <= found.high
    assert 6 <= missed <= 34  # 20 expected; four standard deviations


# Finding runs


def test_runs_are_found_by_name_and_by_file(tmp_path):
    (path, odd) = stored(tmp_path, result(steps=engine_steps(count=3)), result(run="measure.repeats=1"))
    assert runs.find(tmp_path, "demo") == path
    assert runs.find(tmp_path, "demo/own") == path
    assert runs.find(tmp_path, "demo/own/cpu") == path
    assert runs.find(tmp_path, "demo/own.in_process/cpu/measure.repeats=1") == odd
    for ending in (".json", ".csv", ".steps.csv"):
        assert runs.find(tmp_path, str(path).replace(".json", ending)) == path
    assert runs.find(tmp_path, str(odd).replace(".json", ".csv")) == odd


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demmo", r"holds no experiment 'demmo'; it holds: demo"),
        ("demo", r"holds more than one hardware, cpu, h200: say which"),
        ("demo/7b", r"holds no scale.via '7b'; it holds: own.in_process"),
        ("demo/own/tpu", r"holds no hardware 'tpu'; it holds: cpu, h200"),
        ("demo/own.in_process/cpu/x", r"has no run x; it has: default, measure.repeats=1"),
        ("nowhere/default.json", r"nowhere/default.json does not exist"),
        ("demo//x", "neither a result file nor"),
        ("../demo", "neither a result file nor"),
    ],
)
def test_a_run_that_is_not_there_is_explained(tmp_path, name, message):
    stored(tmp_path, result(), result(run="measure.repeats=1"), result(hardware="h200"))
    with pytest.raises(StoreError, match=message):
        runs.find(tmp_path, name)


# trace


def traced(tmp_path, **changes):
    steps = [*engine_steps("base", 300), *engine_steps("new", 20)]
    given = result(**{"steps": steps, "requests": [*requests("base"), *requests("new")], **changes})
    path = tmp_path / "deep/demo.trace.json"
    count = perfetto.write(given, path)
    document = json.loads(path.read_text())
    assert len(document["traceEvents"]) == count
    return given, document


def test_a_trace_is_what_perfetto_reads(tmp_path):
    given, document = traced(tmp_path)
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["experiment"] == "demo"
    events = document["traceEvents"]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert min(times) >= 0
    for event in events:
        assert event["ph"] in "MXCibe"
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], (int, float))
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        assert ("dur" in event) == (event["ph"] == "X")
        assert ("id" in event) == (event["ph"] in "be")
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [f"{label} concurrency=8" for label in given.info.variants.values()]


def test_a_trace_has_every_step_request_and_preemption(tmp_path):
    given, document = traced(tmp_path)
    events = document["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(given.steps)
    assert sum(event["args"]["prefill_tokens"] for event in slices) == sum(s.prefill_tokens for s in given.steps)
    assert sum(1 for event in events if event["ph"] == "i") == sum(len(s.preempted) for s in given.steps) > 0
    assert {event["name"] for event in events if event["ph"] == "C"} == {"KV blocks", "requests"}
    for pid in (1, 2):  # slices of one track do not overlap
        own = [event for event in slices if event["pid"] == pid]
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_the_phases_of_a_request_nest(tmp_path):
    given, document = traced(tmp_path)
    open_phases = {}
    seen = []
    for event in document["traceEvents"]:
        if event["ph"] == "b":
            open_phases.setdefault(event["id"], []).append(event["name"])
            seen.append(event["name"])
        elif event["ph"] == "e":
            assert open_phases[event["id"]].pop() == event["name"]
    assert not any(open_phases.values())
    assert seen.count("queued") == seen.count("prefill") == seen.count("decode") == len(given.requests)


def test_a_request_that_never_ran_is_shown_as_far_as_it_came(tmp_path):
    waiting = replace(requests(count=1)[0], first_scheduled_s=None, first_token_s=None, end_s=0.5)
    _, document = traced(tmp_path, requests=[waiting])
    names = [event["name"] for event in document["traceEvents"] if event["ph"] in "be"]
    assert names == ["base-0", "base-0"]


def test_a_trace_of_a_run_without_steps_says_how_to_get_them(tmp_path):
    with pytest.raises(StoreError, match=r"stored no steps: name the point to keep in experiment\.timeline"):
        perfetto.write(result(), tmp_path / "x.json")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        perfetto.write(result(steps=engine_steps(count=2)), blocked / "x.json")


# The command line


def test_the_commands_run_from_the_command_line(command, tmp_path):
    results, reports = tmp_path / "results", tmp_path / "reports"
    stored(results, result(plots=(), steps=engine_steps(count=5)), result(run="b", plots=(), seed=1))
    code, out, _ = command("report", "--results", results, "--reports", reports)
    assert code == 0
    assert out.split() == [str(reports / "demo.md"), str(reports / "README.md")]
    code, out, _ = command("compare", "demo", "demo/own/cpu/b", "--results", results)
    assert code == 0
    assert "no difference shown" in out
    trace = tmp_path / "t.json"
    code, out, _ = command("trace", "demo", "--out", trace, "--results", results)
    assert code == 0
    assert str(trace) in out
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "--results", "/nowhere"], "error: /nowhere holds no results yet: run an experiment first"),
        (["compare", "demo"], "error: name two runs, or one and --rev REVISION"),
        (["compare"], "or --rev REVISION alone for all runs that differ"),
        (["compare", "--rev", "nonsense"], "error: git knows no revision 'nonsense'"),
        (["compare", "demo", "x", "--results", "/nowhere"], "error: /nowhere holds no experiment 'demo'"),
        (["trace", "demo", "--results", "/nowhere"], "error: /nowhere holds no experiment 'demo'"),
        (["report", "everything"], "unrecognized arguments: everything"),
    ],
)
def test_a_mistake_in_a_command_ends_with_code_2_and_no_traceback(command, arguments, message):
    code, _, shown = command(*arguments)
    assert code == 2
    assert message in shown
    assert "Traceback" not in shown


def test_every_command_explains_itself(command):
    for name, known in COMMANDS.items():
        code, out, _ = command(name, "--help")
        assert code == 0
        assert known.help in out.replace("\n", " ")
