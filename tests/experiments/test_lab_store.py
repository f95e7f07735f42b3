"""Result files: what is written comes back, rewriting changes nothing, damage is found."""

import errno
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.gate import ErrorGate, compare
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.traces import GapRow, RequestRow, StepRow
from experiments.lab.show.pages import report_page
from experiments.lab.store import result as store
from experiments.lab.store.result import Provenance, Result, RunInfo, Sample, StoreError
from experiments.lab.store.rows import Row


def result(run="default", experiment="demo"):
    rows = []
    for point, factor in (("size=1", 1.0), ("size=2", 1.9)):
        for repeat in range(3):
            rows.append(Row("base", point, repeat, "speed", 10.123456789 * factor + repeat, "tokens/s"))
            rows.append(Row("new", point, repeat, "speed", 17 * factor + repeat, "tokens/s"))
    rows.append(Row("new", "size=2", 3, "speed", 1.0, "tokens/s", False, 'lengths differ, "badly"'))
    panels = (PanelSpec("speed"), PanelSpec("speed", PanelKind.lines, x="size", log_x=True))
    info = RunInfo(
        experiment=experiment,
        hardware="cpu",
        run=run,
        title="A demo",
        question="Is new faster?",
        method="By hand.",
        baseline="base",
        variants={"base": "the old way", "new": "the new way"},
        points={"size=1": {"size": 1}, "size=2": {"size": 2}},
        metrics={"speed": Metric("output tokens per second", "tokens/s", Better.higher)},
        claims=(Claim("speed", "new", "size=2", Bound.ratio_at_least, 1.2, "base", "size=2", "a guess"),),
        gates=(compare("new", "size=1", [[1, 2]], [[1, 2]]), compare("new", "size=2", [[1]], [[2]])),
        samples=(Sample(("base", "new"), "def f(", "x):\n    return `x` # ```"),),
        plots=(PlotSpec("speed", "Speed", panels),),
        code=("run.py",),
        limits=("It is made up.",),
        provenance=Provenance(
            "python run.py experiment=demo",
            "2026-01-01T00:00:00+00:00",
            12.345678912,
            None,
            None,
            {"torch": "2"},
            {"cpu": "A CPU", "cores": 2, "torch_threads": 2, "ram_gib": None},
        ),
        config={"engine": {"seed": 0}, "names": ["a", None]},
    )
    return Result(info, tuple(rows))


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_written_comes_back_and_rewriting_changes_no_byte(tmp_path):
    path = store.write(tmp_path, result())
    assert path == tmp_path / "demo/own.in_process/cpu/default.json"
    first = contents(tmp_path)
    read = store.read(path)
    assert read.rows[0].value == 10.1235  # rounded once, when written
    assert read.rows[-1] == result().rows[-1]
    assert read.info.gates == result().info.gates
    assert read.info.claims == result().info.claims
    assert read.info.plots == result().info.plots
    assert read.info.config == result().info.config
    store.write(tmp_path, read)
    assert contents(tmp_path) == first
    assert set(first) == {
        "demo/own.in_process/cpu/default.csv",
        "demo/own.in_process/cpu/default.json",
    }  # no temporary file stays


def test_the_csv_is_tidy(tmp_path):
    table = store.write(tmp_path, result()).with_suffix(".csv").read_text().splitlines()
    assert table[0] == "variant,point,repeat,process,metric,value,unit,valid,reason"
    assert table[1] == "base,size=1,0,0,speed,10.1235,tokens/s,true,"
    assert table[-1] == 'new,size=2,3,0,speed,1,tokens/s,false,"lengths differ, ""badly"""'


def test_windows_line_ends_of_a_checkout_are_no_damage(tmp_path):
    path = store.write(tmp_path, result())
    table = path.with_suffix(".csv")
    table.write_bytes(table.read_bytes().replace(b"\n", b"\r\n"))
    assert store.read(path).rows == store.read(store.write(tmp_path / "b", result())).rows


@pytest.mark.parametrize("suffix", [".csv", ".json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_file_cut_short_is_named(tmp_path, suffix, share):
    path = store.write(tmp_path, result())
    cut = path.with_suffix(suffix)
    data = cut.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(StoreError, match=f"default{suffix}.*run the experiment again"):
        store.read(path)


def test_an_edited_number_is_found(tmp_path):
    path = store.write(tmp_path, result())
    table = path.with_suffix(".csv")
    table.write_text(table.read_text().replace("10.1235", "99.1235"))
    with pytest.raises(StoreError, match="is not the one"):
        store.read(path)


def test_another_version_is_refused(tmp_path):
    path = store.write(tmp_path, result())
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(StoreError, match=r"format 99; this version reads format 2. Run the experiment again"):
        store.read(path)
    del document["tables"]
    path.write_text(json.dumps({**document, "format": 1, "csv": {"rows": 13, "sha256": ""}}))  # as it once was
    with pytest.raises(StoreError, match=r"format 1; this version reads format 2"):
        store.read(path)
    path.write_text(json.dumps({**document, "format": 2}))
    with pytest.raises(StoreError, match=r"is not a result file .*tables"):
        store.read(path)
    document = json.loads(store.write(tmp_path, result()).read_text())
    path.write_text(json.dumps({**document, "surprise": 1}))
    with pytest.raises(
        StoreError, match=r"written in an older format, or a newer one \(unknown fields \['surprise'\]\)"
    ):
        store.read(path)
    document["provenance"]["within"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"unknown fields .*within"):
        store.read(path)


def test_what_is_a_share_now_is_one_in_older_results(tmp_path):
    """Their intervals were made as of any number."""
    older = {
        "mbu": Metric("memory bandwidth utilization", "", Better.higher),
        "x": Metric("a ratio", "", Better.higher),
    }
    values = [(0.2, 2.0), (0.5, 3.0), (0.9, 5.0)]
    rows = [Row("base", "", 0, name, value, "", process=process)
            for process, both in enumerate(values) for name, value in zip(older, both, strict=True)]  # fmt: skip
    info = replace(result().info, metrics=older, points={"": {}}, claims=(), gates=())
    found = store.read(store.write(tmp_path, Result(info, tuple(rows))))
    assert found.estimate("base", "", "mbu").high == 1
    assert found.estimate("base", "", "x").high > 5


def test_a_missing_table_is_named(tmp_path):
    path = store.write(tmp_path, result())
    path.with_suffix(".csv").unlink()
    with pytest.raises(StoreError, match=r"default\.csv cannot be read"):
        store.read(path)


def with_steps():
    numbers = {f.name: i for i, f in enumerate(fields(StepRow)) if f.type == "int"}
    names = {"variant": "base", "point": "size=1", "preempted": ("a-1", "a-2"), "finished": ()}
    step = StepRow(**{**numbers, **names}, start_s=0.123456789, duration_s=1e-5)
    request = RequestRow("base", "size=1", "a-1", "a", 0.5, None, None, None, 12, 0, 0, 3)
    requests = (request, replace(request, attempt=1, valid=False), replace(request, attempt=2, valid=True))
    gaps = (GapRow("base", "size=1", ("4.5x3", "12x40"), 2, 1),)
    return replace(result(), steps=(step, replace(step, step=2, preempted=())), requests=requests, gaps=gaps)


def test_steps_and_requests_come_back(tmp_path):
    path = store.write(tmp_path, with_steps())
    assert set(contents(tmp_path)) == {
        f"demo/own.in_process/cpu/default{e}" for e in (".csv", ".json", ".steps.csv", ".requests.csv", ".gaps.csv")
    }
    first = contents(tmp_path)
    read = store.read(path)
    assert read.steps == tuple(replace(step, start_s=0.123457) for step in with_steps().steps)
    assert read.requests == with_steps().requests
    assert (read.gaps, read.gaps[0].histogram) == (with_steps().gaps, ([4.5, 12.0], [3.0, 40.0]))
    store.write(tmp_path, read)
    assert contents(tmp_path) == first
    header = first["demo/own.in_process/cpu/default.requests.csv"].decode().splitlines()[0]
    assert header == (
        "variant,point,request,name,arrival_s,first_scheduled_s,first_token_s,end_s,prompt_tokens,output_tokens,"
        "cached_tokens,preemptions,process,repeat,queue_s,prefill_s,transfer_s,decode_s,transfer_exposed_s,decode_wait_s,"
        "first_decode_step_s,attempt,valid"
    )


@pytest.mark.parametrize("ending", [".steps.csv", ".requests.csv"])
def test_a_cut_or_missing_table_of_steps_is_named(tmp_path, ending):
    path = store.write(tmp_path, with_steps())
    table = path.with_name("default" + ending)
    table.write_bytes(table.read_bytes()[:-3])
    with pytest.raises(StoreError, match=f"default{ending} is not the one.*run the experiment again"):
        store.read(path)
    table.unlink()
    with pytest.raises(StoreError, match=f"default{ending} cannot be read.*run the experiment again"):
        store.read(path)


def test_a_run_without_steps_removes_those_of_the_run_before(tmp_path):
    store.write(tmp_path, with_steps())
    assert store.read(store.write(tmp_path, result())).steps == ()
    assert set(contents(tmp_path)) == {"demo/own.in_process/cpu/default.csv", "demo/own.in_process/cpu/default.json"}


def test_remarks_belong_to_the_rows_that_they_were_written_about(tmp_path):
    path = store.write(tmp_path, result())
    path.with_name("default.remarks.md").write_text("A cache was cold.\n")
    found = store.read(path)
    assert found.remarks == "A cache was cold."
    assert "<summary>Remarks</summary>\n\nA cache was cold." in report_page([found], [], lambda info: None)
    store.write(tmp_path, found)
    assert store.read(path).remarks == ""


def test_everything_that_is_known_of_a_run_comes_back(tmp_path):
    known = {
        "status": "incomplete: interrupted",
        "workload": {"kind": "trace", "cut": {"requests": 3}},
        "ceilings": {"read_gb_s": 10.0, "matmul_tflop_s": {"float32": 0.1}},
        "original": "-22 %",
        "target": "7.5x",
        "notes": ("a note",),
        "gates": (compare("new", "size=1", [[1]], [[1]]),),
        "error_gates": (ErrorGate("new", None, float("inf"), 0.1, "fp32"),),
    }
    written = replace(result(), info=replace(result().info, **known))
    assert store.read(store.write(tmp_path, written)).info == replace(
        written.info, provenance=store.read(store.write(tmp_path, result())).info.provenance
    )


def test_a_disk_that_fills_up_leaves_the_earlier_result_whole(tmp_path, monkeypatch):
    path = store.write(tmp_path, result())
    before = contents(tmp_path)
    real, calls = Path.write_bytes, []

    def write_bytes(self, data):
        calls.append(self)
        if len(calls) == 3:
            real(self, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(StoreError, match=r"results of demo cannot be written to .*cpu: .*No space left"):
        store.write(tmp_path, with_steps())
    assert contents(tmp_path) == before
    assert store.read(path).rows == store.read(path).rows


def test_an_incomplete_run_does_not_replace_a_complete_one(tmp_path):
    stopped = replace(result(), info=replace(result().info, status="incomplete: interrupted"))
    first = store.write_run(tmp_path, stopped)
    assert first.name == "default.json"  # there was none before
    assert store.write_run(tmp_path, result()) == first
    beside = store.write_run(tmp_path, stopped)
    assert beside.name == "default-incomplete.json"
    assert (store.read(first).info.status, store.read(beside).info.run) == ("complete", "default-incomplete")
    store.write_run(tmp_path, result())
    assert set(contents(tmp_path)) == {"demo/own.in_process/cpu/default.csv", "demo/own.in_process/cpu/default.json"}


def test_a_run_is_named_by_what_was_changed():
    assert store.run_name({}) == "default"
    assert store.run_name({"workload.count": "2", "measure.repeats": "1"}) == "repeats=1,count=2"
    assert store.run_name({"workload.seed": "2", "measure.seed": "1"}) == "measure.seed=1,workload.seed=2"
    assert store.run_name({"workload.path": "../a b/c"}) == "path=.._a_b_c"
    assert store.slug("../90 % shared") == "90_shared"
