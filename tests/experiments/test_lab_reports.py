"""Reports say what the rows show and no more, fit a screen, and follow from results/ alone, byte for byte."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import METRICS, different, engine_steps, equal, requests, result

from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.show import pages, plots, report
from experiments.lab.show.answer import answer
from experiments.lab.show.grids import SCREEN, Sheet
from experiments.lab.spec import PanelSpec, PlotSpec
from experiments.lab.store import result as store
from experiments.lab.store.result import Sample, StoreError

pytestmark = pytest.mark.slow  # together they take half a minute

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"plots": ()}  # figures take time, and most tests are about words


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def built(tmp_path, *results):
    for each in results:
        store.write(tmp_path / "results", each)
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    return tmp_path / "reports"


def text_of(tmp_path, *results):
    return (built(tmp_path, *results) / f"{results[0].info.experiment}.md").read_text()


def without(given, *, variant, point=None, reason):
    """Some rows of a result made invalid."""
    hit = lambda row: row.variant == variant and point in (None, row.point)  # noqa: E731
    rows = [replace(row, valid=False, reason=reason) if hit(row) else row for row in given.rows]
    return replace(given, rows=tuple(rows))


# The answer


def test_the_answer_is_the_first_claims_figure_with_its_interval():
    text = answer(result(noise=0.001))
    assert text.startswith("At concurrency=8, chunked prefill, 512 tokens a step had 1.50x [1.50, 1.5")
    assert "tokens/s): better." in text
    assert "Over the 2 points that count, the ratio ran from 1.50x (concurrency=" in text
    assert "Claims: 2 supported." in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"repeats": 1}, "one valid repeat, so nothing is shown"),
        ({"noise": 0.6, "seed": 1}, "no difference is shown"),
        ({"gates": [different("new", "concurrency=8")]}, "There is no answer."),
        ({"gates": [different("new", "concurrency=8")]}, "Gate: 1 of 1 comparisons FAILED."),
        ({"claims": ()}, "At concurrency=8, output tokens per second (tokens/s): whole prompts 4,"),
    ],
)
def test_the_answer_claims_no_more_than_the_rows(changes, says):
    assert says in answer(result(**changes))


def test_a_worse_result_is_called_worse():
    given = result()
    metrics = {**METRICS, "output_tokens_per_s": Metric("time", "s", Better.lower)}
    assert "): worse." in answer(replace(given, info=replace(given.info, metrics=metrics)))


def test_the_points_whose_tokens_differ_are_not_in_the_range():
    gates = [different("new", "concurrency=1"), *(equal("new", f"concurrency={n}") for n in (2, 8))]
    assert "Over the 2 points that count" in answer(result(sizes=(1, 2, 8), gates=gates))


def test_an_answer_without_valid_rows_says_so():
    text = answer(without(result(), variant="new", reason="lengths differ"))
    assert "There is no answer. Output tokens per second of chunked prefill" in text
    assert "no valid measurement" in text
    assert "INVALID: 30 of 60 values." in text


def test_a_claim_on_an_absolute_figure_or_on_another_point():
    absolute = Claim("ttft_p50_ms", "base", "concurrency=1", Bound.at_most, 90)
    growth = Claim("ttft_p50_ms", "base", "concurrency=8", Bound.ratio_at_most, 4, "base", "concurrency=1")
    text = answer(result(claims=(absolute,)))
    assert text.startswith("At concurrency=1, time to first token, median request of whole prompts: 8")
    assert " ms. " in text
    text = answer(result(claims=(growth,)))
    assert text.startswith("At concurrency=8, time to first token, median request of whole prompts was 3.")
    assert "that at concurrency=1" in text


# Tables


def test_two_variants_stand_side_by_side():
    (grid, *_) = Sheet(result(variants={"base": "off", "new": "on"}, sizes=(1, 2, 4))).grids(["output_tokens_per_s"])
    assert grid.header == ("point", "off", "on", "ratio", "same tokens")
    assert len(grid.rows) == 3
    assert grid.rows[0][-1] == "all 900"


def test_more_variants_stand_below_each_other():
    variants = {"base": "off", "a": "one", "b": "two"}
    (grid,) = Sheet(result(variants=variants)).grids(["ttft_p50_ms"])
    assert grid.header == ("point", "variant", "median [95 %]", "ratio to off", "same tokens")
    assert [row[:2] for row in grid.rows[:2]] == [("concurrency=1", "off"), ("concurrency=1", "one")]
    assert grid.rows[0][3:] == ("1", "baseline")


def test_a_single_variant_has_one_table_for_all_metrics():
    (grid,) = Sheet(result(variants={"base": "mini-infer"}, baseline=None, gates=[], claims=())).grids(list(METRICS))
    assert grid.header == ("metric", "unit", "point", "median [95 %]", "better")
    assert len(grid.rows) == 2 * len(METRICS)
    assert grid.rows[0][:3] == ("output tokens per second", "tokens/s", "concurrency=1")


def test_the_only_point_stands_in_the_title():
    (grid,) = Sheet(result(sizes=(8,))).grids(["ttft_p50_ms"])
    assert grid.title == "Time to first token, median request, ms (lower is better), at concurrency=8"
    assert grid.header[0] == "variant"


@pytest.mark.parametrize("points", [(1,), (1, 8, 64)])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_tables_fit_a_screen(number, points):
    names = ["transformers.generate, continuous", "static batching, contiguous KV", "all of it, and swap space"]
    variants = {f"v{i}": names[i % 3] + f" {i}" for i in range(number)}
    limits = {"floor_ms": Metric("floor", "ms", Better.lower), "mbu": Metric("MBU", "", Better.higher)}
    given = result(variants=variants, baseline="v0" if number > 1 else None, sizes=points, gates=[], claims=())
    rows = [replace(row, metric=name, unit="") for row in given.rows for name in limits if row.metric == "itl_p99_ms"]
    given = replace(given, rows=(*given.rows, *rows), info=replace(given.info, metrics={**METRICS, **limits}))
    grids = Sheet(given).grids(list(given.info.metrics))
    assert grids
    for grid in grids:
        assert max(map(len, grid.markdown().splitlines())) <= SCREEN
        assert max(map(len, grid.text().splitlines())) <= SCREEN
    assert max(map(len, report.summary(given).splitlines())) <= SCREEN


def test_how_near_the_hardwares_limits_stands_beside_the_speed():
    limits = {"mbu": Metric("memory bandwidth utilization", "", Better.higher)}
    given = result(variants={"base": "off", "new": "on"}, sizes=(8,))
    rows = [replace(row, metric="mbu", value=0.5, unit="") for row in given.rows if row.metric == "itl_p99_ms"]
    given = replace(given, rows=(*given.rows, *rows), info=replace(given.info, metrics={**METRICS, **limits}))
    first, *others = Sheet(given).grids(list(given.info.metrics))
    assert first.header == ("variant", "median [95 %]", "ratio to off", "same tokens", "MBU")
    assert first.rows[0][-1] == "0.500"
    assert len(others) == 2  # it has no table of its own


def test_missing_and_invalid_values_are_told_apart():
    given = without(result(), variant="new", point="concurrency=8", reason="lengths differ")
    given = replace(given, rows=tuple(r for r in given.rows if r.variant == "base" or r.metric != "itl_p99_ms"))
    sheet = Sheet(given)
    assert sheet.value("new", "concurrency=8", "ttft_p50_ms") == "INVALID"
    assert sheet.value("new", "concurrency=1", "itl_p99_ms") == "-"
    assert sheet.ratio("new", "concurrency=8", "ttft_p50_ms") == "-"
    given = replace(given, rows=tuple(r for r in given.rows if r.repeat != 1 or r.point != "concurrency=1"))
    assert Sheet(given).value("base", "concurrency=1", "ttft_p50_ms").endswith("(n=4)")


def test_a_failed_gate_stands_beside_the_speed():
    sheet = Sheet(result(gates=[different("new", "concurrency=8")]))
    assert sheet.same_tokens("new", "concurrency=8") == "FAILED: 33.3 % of 3"
    assert sheet.same_tokens("new", "concurrency=1") == "not compared"


def test_a_bar_in_a_name_breaks_no_table():
    text = Sheet(result(variants={"base": "a|b", "new": "on"})).grids(["ttft_p50_ms"])[0].markdown()
    rule, first = text.splitlines()[3], text.splitlines()[4]
    assert rule.count("|") == first.replace("\\|", "").count("|")
    assert "a\\|b" in text


# The page


def test_a_report_says_what_was_found(tmp_path):
    text = text_of(
        tmp_path,
        result(
            gates=[equal("new", "concurrency=1"), different("new", "concurrency=8")],
            samples=(Sample(("base", "new"), "def f(", "x):\n    return `x` # ```"),),
            notes=("The cache was warm.",),
            workload={"kind": "trace", "cut": {"requests": 100}, "file": None},
            ceilings={"read_gb_s": 14.2},
        ),
    )
    assert text.startswith(pages.MARK)
    for part in (
        "# A demo: chunks",
        "Does `chunked` prefill help?",
        "**Answer** (cpu). There is no answer.",
        "> **tokens differ from the baseline's**, on cpu",
        "The original project's figure: +20 %. To reach or beat: 1.2x.",
        "at concurrency=1 | **supported** | 900 of 900 tokens | the gate |",
        "at concurrency=8 | **refuted** | 1 of 3 tokens (first difference: request 0, token 1: 2 became 5) | the gate",
        "its tokens differ from the baseline's, so its speed does not count",
        "| original: 1.2x |",
        "](figures/demo-cpu-speed.png)",
        "whole prompts and chunked prefill, 512 tokens a step, alike:",
        "````python",  # a fence longer than the one in the sample
        "- The cache was warm.",
        "Workload: kind trace, cut.requests 100.",
        "commit 0123456789ab, clean tree; python 3.11, torch 2.13.",
        "A CPU, 2 cores, 2 torch threads, 24 GiB RAM; 5 repeats.",
        "python run.py experiment=demo",
        "[csv](../results/demo/cpu/default.csv)",
        "[run.py](../run.py)",
        "It is made up.",
    ):
        assert part in text
    assert "Step by step" not in text
    assert "Measured ceilings" not in text, "no floor is shown that they would explain"
    assert (tmp_path / "reports/figures/demo-cpu-speed.png").stat().st_size > 10_000


def test_gates_that_pass_at_all_points_are_one_line(tmp_path):
    text = text_of(tmp_path, result(**PLAIN))
    assert "same greedy tokens as whole prompts, at all 2 points | **supported** | 1,800 of 1,800 tokens |" in text


def test_invalid_rows_are_listed_by_reason(tmp_path):
    text = text_of(tmp_path, without(result(repeats=2, **PLAIN), variant="new", reason="the client fell behind"))
    assert "### INVALID: 12 values were kept but not counted" in text
    assert text.count("- the client fell behind:") == 1
    assert "  - chunked prefill, 512 tokens a step concurrency=1, repeats 1, 2: all metrics" in text


def test_an_incomplete_run_is_marked_at_the_top(tmp_path):
    status = "incomplete: interrupted in repeat 3 of 5"
    reports = built(tmp_path, result(status=status, **PLAIN))
    text = (reports / "demo.md").read_text()
    assert text.index("> **INCOMPLETE (interrupted in repeat 3 of 5)**, on cpu") < text.index("**Question.**")
    assert "**INCOMPLETE (interrupted in repeat 3 of 5)**" in (reports / "README.md").read_text()
    assert "INCOMPLETE" in report.summary(result(status=status))


def test_a_run_that_was_stopped_before_its_first_row_has_a_report(tmp_path):
    text = text_of(tmp_path, result(rows=[], gates=[], status="incomplete: interrupted"))
    assert "> **INCOMPLETE (interrupted)**, on cpu" in text
    assert "There is no answer. Output tokens per second of chunked prefill" in text


def test_several_machines_and_runs_stand_in_one_report(tmp_path):
    runs = [
        result(**PLAIN),
        result(run="workload.count=9", **PLAIN),
        result(hardware="h200", limits=("GPU.",), **PLAIN),
    ]
    text = text_of(tmp_path, *runs)
    headings = [line for line in text.splitlines() if line.startswith("## Results")]
    assert headings == ["## Results: cpu", "## Results: cpu, with `workload.count=9`", "## Results: h200"]
    for heading in ("cpu", "cpu, with `workload.count=9`", "h200"):
        assert f"- *{heading}*: At concurrency=8" in text
    assert text.count("## Limits") == 1
    assert "- It is made up.\n- GPU.\n" in text


def test_steps_are_drawn_and_who_was_preempted_is_named(tmp_path):
    steps = engine_steps("base", 400) + engine_steps("new", 20)
    text = text_of(tmp_path, result(steps=steps, requests=requests(), **PLAIN))
    assert "### Step by step" in text
    assert "](figures/demo-cpu-steps-concurrency=8.png)" in text
    assert "- Preempted by whole prompts: base-" in text
    assert "`python run.py trace demo --hardware cpu`" in text
    assert "[steps](../results/demo/cpu/default.steps.csv)" in text
    given = result(steps=steps, plots=(PlotSpec("speed", "Speed", (PanelSpec("ttft_p50_ms"),)),))
    paths = report.figure_paths(tmp_path / "reports", given)
    assert [path.name for path in paths] == ["demo-cpu-speed.png", "demo-cpu-steps-concurrency=8.png"]


# The index


def test_the_index_has_a_line_for_every_experiment_and_machine(tmp_path):
    refuted = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, 1.0, source="needed")
    given = result(**PLAIN)
    mixed = result(hardware="h200", claims=(given.info.claims[0], refuted), **PLAIN)
    reports = built(tmp_path, given, mixed, result(run="a=1", **PLAIN), result("other", claims=(), **PLAIN))
    lines = (reports / "README.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert len(rows) == 4
    assert rows[0].startswith("| [demo](demo.md) | cpu | Does `chunked` prefill help? | +20 % | 1.2x | 1.")
    assert rows[0].endswith("| **supported** (all 2 claims) |")
    assert "]: output tokens per second (chunked prefill, 512 tokens a step, concurrency=8) |" in rows[0]
    assert rows[1].endswith("| **supported** (of 2 claims 1 supported, 1 refuted) |")  # the headline hides nothing
    assert rows[2].endswith("| no claim |")
    assert rows[3].startswith("| [demo](demo.md) | cpu | `a=1` |")
    assert lines.index("## Other runs") < lines.index(rows[3])


def test_the_index_warns_of_failed_gates(tmp_path):
    gates = [different("new", "concurrency=8")]
    index = (built(tmp_path, result(gates=gates, **PLAIN)) / "README.md").read_text()
    assert "no figure that counts: output tokens per second" in index
    assert "**tokens differ from the baseline's**" in index


# Rebuilding


def test_rebuilding_changes_no_byte(tmp_path):
    steps = engine_steps("base", 30)
    reports = built(tmp_path, result(steps=steps), result(run="size=3", **PLAIN), result("other", **PLAIN))
    first = contents(reports)
    assert set(first) == {
        "README.md",
        "demo.md",
        "other.md",
        "figures/demo-cpu-speed.png",
        "figures/demo-cpu-steps-concurrency=8.png",
    }
    report.rebuild(tmp_path / "results", reports)
    assert contents(reports) == first
    again = tmp_path / "again"
    written = report.rebuild(tmp_path / "results", again)
    assert [path.name for path in written] == ["demo.md", "other.md", "README.md"]
    assert contents(again) == first


@pytest.mark.slow
def test_two_processes_make_the_same_bytes(tmp_path):
    steps = engine_steps("base", 30) + engine_steps("new", 600)
    first = contents(built(tmp_path, result(steps=steps, requests=requests())))
    jobs = []
    for seed in ("1", "2"):
        command = [sys.executable, str(ROOT / "run.py"), "report"]
        command += ["--results", str(tmp_path / "results"), "--reports", str(tmp_path / seed)]
        jobs.append(subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.DEVNULL))
    assert [job.wait(120) for job in jobs] == [0, 0]
    assert contents(tmp_path / "1") == first
    assert contents(tmp_path / "2") == first


def test_reports_whose_results_are_gone_go_too_and_nothing_else_does(tmp_path):
    reports = built(tmp_path, result(), result("gone"), result("gone", steps=engine_steps("base", 20)))
    (reports / "notes.md").write_text("by hand")
    (reports / "figures/no-picture.png").write_text("by hand")
    (reports / "figures/photo.png").write_bytes((reports / "figures/demo-cpu-speed.png").read_bytes())
    foreign = reports / "figures/gone-by-hand.png"
    plots.Image.new("RGB", (2, 2)).save(foreign)
    stored = tmp_path / "results/gone/cpu"
    for path in stored.iterdir():
        path.unlink()
    stored.rmdir()
    report.rebuild(tmp_path / "results", reports)
    left = set(contents(reports))
    assert {"notes.md", "demo.md", "README.md", "figures/gone-by-hand.png", "figures/no-picture.png"} <= left
    assert not {"gone.md", "figures/gone-cpu-speed.png", "figures/gone-cpu-steps-concurrency=8.png"} & left
    assert "figures/photo.png" not in left  # a copy of a figure of demo's that its report does not show


def test_a_figure_that_its_report_no_longer_shows_goes(tmp_path):
    reports = built(tmp_path, result())
    built(tmp_path, result(**PLAIN))
    assert set(contents(reports)) == {"README.md", "demo.md"}


def test_making_one_report_leaves_the_others_alone(tmp_path):
    reports = built(tmp_path, result(**PLAIN), result("other", **PLAIN))
    before = (reports / "other.md").read_bytes()
    store.write(tmp_path / "results", result("other", title="Changed", **PLAIN))
    written = report.rebuild(tmp_path / "results", reports, only="demo")
    assert [path.name for path in written] == ["demo.md", "README.md"]
    assert (reports / "other.md").read_bytes() == before


def test_a_damaged_result_is_named_and_costs_no_other_report(tmp_path):
    reports = built(tmp_path, result(**PLAIN), result("other", **PLAIN), result("other", hardware="h200", **PLAIN))
    before = (reports / "demo.md").read_bytes()
    for name in ("demo/cpu", "other/h200"):
        (tmp_path / f"results/{name}/default.csv").write_text("cut")
    with pytest.raises(StoreError, match=r"(?s)without these results:.*demo/cpu/default\.csv.*other/h200/default\.csv"):
        report.rebuild(tmp_path / "results", reports)
    assert (reports / "demo.md").read_bytes() == before  # what it said is all that is left of it
    assert "> **NOT IN THIS REPORT**: `results/other/h200/default.json`" in (reports / "other.md").read_text()
    assert "> **CANNOT BE READ**: `results/demo/cpu/default.json`" in (reports / "README.md").read_text()


def test_a_damaged_result_of_another_experiment_stops_no_run(tmp_path):
    reports = built(tmp_path, result(**PLAIN), result("other", **PLAIN))
    (tmp_path / "results/other/cpu/default.csv").write_text("cut")
    assert report.rebuild(tmp_path / "results", reports, only="demo")[0].name == "demo.md"


def test_a_report_without_results_says_what_to_do(tmp_path):
    with pytest.raises(StoreError, match="run an experiment first"):
        report.rebuild(tmp_path / "nothing", tmp_path)
