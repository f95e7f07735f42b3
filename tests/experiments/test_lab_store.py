"""Result files: what is written comes back, rewriting changes nothing, damage is found; reports follow from them."""

import json
import shutil

import pytest

from experiments.lab import report, store
from experiments.lab.claims import Bound, Claim
from experiments.lab.gate import compare, gate
from experiments.lab.metrics import Better, Metric
from experiments.lab.rows import Row
from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store import Provenance, Result, RunInfo, Sample, StoreError


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
        gates=(gate("new", "size=1", [compare([[1, 2]], [[1, 2]])]), gate("new", "size=2", [compare([[1]], [[2]])])),
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
    assert path == tmp_path / "demo/cpu/default.json"
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
    assert set(first) == {"demo/cpu/default.csv", "demo/cpu/default.json"}  # no temporary file stays


def test_the_csv_is_tidy(tmp_path):
    table = store.write(tmp_path, result()).with_suffix(".csv").read_text().splitlines()
    assert table[0] == "variant,point,repeat,metric,value,unit,valid,reason"
    assert table[1] == "base,size=1,0,speed,10.1235,tokens/s,true,"
    assert table[-1] == 'new,size=2,3,speed,1,tokens/s,false,"lengths differ, ""badly"""'


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
    with pytest.raises(StoreError, match=r"format 99; this version reads format 1"):
        store.read(path)
    path.write_text(json.dumps({**document, "surprise": 1}))
    with pytest.raises(StoreError, match="surprise"):
        store.read(path)


def test_a_missing_table_is_named(tmp_path):
    path = store.write(tmp_path, result())
    path.with_suffix(".csv").unlink()
    with pytest.raises(StoreError, match=r"default\.csv cannot be read"):
        store.read(path)


def test_run_names_are_file_names_and_differ():
    assert store.run_name([]) == "default"
    assert store.run_name(["b=2", "a=1"]) == "a=1,b=2"
    names = [store.run_name([o]) for o in ("m=/a/b", "m=/a_b", "m=a b", "../x", "x" * 300, "x" * 301)]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 130 and not name.startswith(".") for name in names)


def test_reports_are_rebuilt_from_results_byte_for_byte(tmp_path):
    results, reports = tmp_path / "results", tmp_path / "reports"
    store.write(results, result())
    store.write(results, result(run="size=3"))
    store.write(results, result(experiment="other"))
    written = report.rebuild(results, reports)
    assert [p.name for p in written] == ["demo.md", "other.md", "README.md"]
    first = contents(reports)
    assert set(first) >= {"figures/demo-cpu-speed.png", "figures/demo-cpu-size=3-speed.png"}
    shutil.rmtree(reports)
    report.rebuild(results, reports)
    assert contents(reports) == first


def test_a_report_says_what_was_found(tmp_path):
    results, reports = tmp_path / "results", tmp_path / "reports"
    store.write(results, result())
    text = report.rebuild(results, reports)[0].read_text()
    for part in (
        "# A demo",
        "Is new faster?",
        "**refuted** | 0 of 1 tokens (first difference: request 0, token 0: 1 became 2)",
        "its tokens differ from the baseline's",  # so the speed claim is open
        "1.62x [1.57, 1.68]",  # the paired ratio at size=1
        "INVALID",
        "the old way and the new way, alike:",
        "lengths differ",
        "](figures/demo-cpu-speed.png)",
        "python run.py experiment=demo",
        "[run.py](../run.py)",
        "It is made up.",
        "````python",  # a fence longer than the one in the sample
    ):
        assert part in text
    index = (reports / "README.md").read_text()
    assert "| [demo](demo.md) | cpu | output tokens per second of the new way at size=2: at least 1.20x" in index


def test_a_report_without_results_says_what_to_do(tmp_path):
    with pytest.raises(StoreError, match="run an experiment first"):
        report.rebuild(tmp_path / "nothing", tmp_path)
