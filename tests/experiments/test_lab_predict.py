"""`python run.py predict RUN`: predictions of a stored run made anew, by other costs, or for the first time; and what
is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.disaggregation import APART, TOGETHER
from experiments.lab.config import catalog, schema
from experiments.lab.config.spec import PREDICTED, TAKE
from experiments.lab.execute import execute
from experiments.lab.experiment import Findings
from experiments.lab.measure import clocks, costs, hardware, processes
from experiments.lab.measure.costs import CostFile, Layout
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.predict import OF_PREDICTIONS, _replaced, again
from experiments.lab.store import result as store
from experiments.lab.store.rows import Row
from mini_infer.core.errors import ConfigError
from mini_infer.simulation.costs import Curve, FittedCosts

ROOT = Path(__file__).resolve().parents[2]
ASKED = [
    *("experiment=simulator", "experiment.points.load=[8 in flight]", "~experiment.variants.uncached"),
    *("workload.count=4", "workload.prefix_tokens=32", "workload.suffix_tokens=8", "workload.output_tokens=4"),
    *("workload.warmup=1", "measure.processes=1", "measure.repeats=2", "measure.gates=false", "measure.threads=1"),
    "paths.run=tiny",
]
ELSEWHERE = "Another CPU"


@pytest.fixture(scope="module")
def once(compose_config, tmp_path_factory) -> Path:
    """A folder with a run that this CPU has measured, and with the costs of its layout."""
    folder = tmp_path_factory.mktemp("once")
    given = catalog.shorthand([*ASKED, f"measure.costs={folder}/costs"], ROOT / "conf")
    config = compose_config(*given)
    engine = schema.engine_config(config.engine)
    layout = Layout.of(engine, *costs.served(engine, "cpu"), "cpu", 1)
    fitted = FittedCosts(Curve((1,), (0.1,)), Curve((1,), (0.1,)), 0, 0, 0, 0, 0)  # more than the least of any machine
    (folder / "costs").mkdir()
    costs.save(folder / "costs/a.yaml", CostFile(hardware.name("cpu"), layout, "2026-11-22", "a test", fitted))
    with pytest.MonkeyPatch.context() as patch, hardware.torch_threads(1):
        patch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(1.0))
        execute(config, "simulator", given, folder)
    return folder


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    """The JSON of that run, as if another machine than this one had measured it, and remarks beside it."""
    shutil.copytree(once / "trial/results", tmp_path / "results")
    (tmp_path / "costs").mkdir()
    (path,) = tmp_path.glob(f"results/{store.EVERY_RUN}")
    for source, copy in ((path, path), (once / "costs/a.yaml", tmp_path / "costs/a.yaml")):
        text = source.read_text().replace(hardware.name("cpu"), ELSEWHERE).replace(str(once), str(tmp_path))
        copy.write_text(text)
    path.with_name(path.stem + store.REMARKS).write_text("Its predictions are right.")
    return path


def with_costs(tmp_path: Path, **changes: Any) -> None:
    path = tmp_path / "costs/a.yaml"
    known = costs.read(path)
    costs.save(path, dataclasses.replace(known, costs=dataclasses.replace(known.costs, **changes)))


def changed(run: Path, **changes: Any) -> None:
    """The stored run, with these in its RunInfo."""
    result = store.read(run)
    store.write(run.parents[3], dataclasses.replace(result, info=dataclasses.replace(result.info, **changes)))


def without_predictions(run: Path) -> store.Result:
    """The stored run as if it had been measured without; returned as it was."""
    before = store.read(run)

    def kept(named: Any) -> Any:
        return {name: value for name, value in named.items() if not name.endswith(PREDICTED)}

    notes = tuple(note for note in before.info.notes if not OF_PREDICTIONS.match(note) and ", predicted" not in note)
    of_info = {"variants": kept(before.info.variants), "peers": kept(before.info.peers), "notes": notes}
    measured: dict[str, Any] = {
        name: tuple(row for row in getattr(before, name) if not row.variant.endswith(PREDICTED))
        for name in ("rows", "steps", "requests", "gaps")
    }
    store.write(
        run.parents[3], dataclasses.replace(before, info=dataclasses.replace(before.info, **of_info), **measured)
    )
    run.with_name(run.stem + store.REMARKS).write_text("What was measured is right.\n")
    return before


def tables(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(run.parent.glob("*.csv"))}


def test_the_same_costs_give_the_same_files_to_the_byte(run: Path) -> None:
    before, notes = tables(run), store.read(run).info.notes
    assert len(before) == 3
    told = again(run, [], ROOT)
    assert tables(run) == before
    assert f"removed  {run.with_name(run.stem + store.REMARKS)}, which was about" in told
    assert not [*run.parent.glob(f"*{store.REMARKS}")]
    once_more = store.read(run).info
    *same, anew = once_more.notes
    # Of errors that are alike to the digits that a table has either may be named first.
    of_same, of_notes = (sorted(re.sub(r"(; the worst|, too: ).*", "", note) for note in of) for of in (same, notes))
    assert of_same == of_notes
    assert anew.startswith("Predicted anew on 20")
    assert anew.endswith("; measured as before.")
    assert "removed" not in again(run, [], ROOT)
    assert store.read(run).info == once_more, "a second time replaces the note"


def test_other_costs_give_other_predictions_beside_what_was_measured(run: Path, tmp_path: Path, monkeypatch) -> None:
    """However this machine's clocks run meanwhile: nothing is timed."""
    speeds = itertools.cycle((1.0, 2.0, 3.0))
    monkeypatch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(next(speeds)))
    before, old = tables(run), store.read(run)
    with_costs(tmp_path, decode=Curve((1,), (5.0,)))  # that much slower than any machine
    first, second, *_ = again(run, [], ROOT).splitlines()
    assert first.startswith("before   Predictions are off by, in the median: tokens/s ")
    assert second.startswith("after    Predictions are off by, in the median: tokens/s 9")
    for name, text in tables(run).items():
        lines = zip(before[name].splitlines(), text.splitlines(), strict=True)
        differ = {" predicted," in line for line, other in lines if line != other}
        assert differ == {True}, name
    new = store.read(run)
    took = {row.value for row in new.rows if row.metric == "itl_p50_ms" and row.variant == "whole predicted"}
    assert took == {5000.0}
    assert not any(row.is_fault for row in new.rows if row.variant.endswith("predicted"))
    for kind in ("What simulated steps take: ", "Of ", "Predictions that missed by "):
        told = [{note for note in info.notes if note.startswith(kind)} for info in (old.info, new.info)]
        assert len(told[1]) == 1
        assert told[0] != told[1] or kind.startswith("What")
    assert new.info.provenance == old.info.provenance


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ({"variants": {"vllm": "vLLM"}}, r"tiny: nothing that it measured can be predicted$"),
        ({"variants": {"gone predicted": "gone, predicted"}}, r"tiny: nothing is predicted of gone today: measure it"),
        (
            {"config": {"experiment": {"_target_": "experiments.kernels.Kernels"}}},
            r"tiny: nothing of simulator is pred",
        ),
        ({"workload": {"requests": 5}}, r"asks something else today than .*, workload\.requests=4 \(then 5\): measure"),
    ],
)
def test_what_cannot_be_predicted_anew_is_refused(run: Path, now: dict[str, Any], why: str) -> None:
    changed(run, **now)
    with pytest.raises(ConfigError, match=why):
        again(run, [], ROOT)


@pytest.mark.parametrize(
    ("key", "then", "why"),
    [
        ("experiment.points", {"load": {"8 in flight": {"workload.concurrency": 7}}}, "concurrency=8 (then 7)"),
        ("experiment.variants.whole.scheduler", {"max_num_seqs": 3}, "whole.scheduler.max_num_seqs=None (then 3)"),
        ("experiment.variants.whole", {"label": "whole"}, "whole.scheduler.max_num_batched_tokens=1024 (then None)"),
        ("workload.groups", 5, "workload.groups=4 (then 5)"),
        ("measure.seed", 5, "measure.seed=0 (then 5)"),
    ],
)
def test_what_asks_something_else_today_is_refused(run: Path, key: str, then: Any, why: str) -> None:
    config = store.read(run).info.config
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section = section[name]
    section[last] = then
    changed(run, config=config)
    before = tables(run)
    with pytest.raises(ConfigError, match=r"asks something else today than when it was measured, ") as refused:
        again(run, [], ROOT)
    assert why in str(refused.value)
    assert tables(run) == before


def test_an_engine_is_predicted_as_it_was_measured(run: Path) -> None:
    """Whatever the defaults are now; and where nobody knows any more what its steps take no bound stands in."""
    before = store.read(run)
    before.info.config["engine"]["scheduler"]["max_num_seqs"] = 1
    changed(run, config=before.info.config)
    again(run, [], ROOT)
    waits = [
        max(row.value for row in result.rows if row.metric == "ttft_ms" and row.variant == "chunked predicted")
        for result in (before, store.read(run))
    ]
    assert waits[1] > 1.5 * waits[0]
    before.info.config["engine"]["cache"]["block_size"] = 64
    changed(run, config=before.info.config, ceilings=dataclasses.asdict(Ceilings(9, 9, {"float32": 0.1}, threads=1)))
    with pytest.raises(
        ConfigError, match=r"of chunked would take the roofline, .* but for cache.block_size=16: measure"
    ):
        again(run, [], ROOT)


def test_a_trace_that_is_elsewhere_can_be_named_and_nothing_else(tmp_path: Path) -> None:
    place = Path("simulator_trace/7b.in_process/h200")
    shutil.copytree(ROOT / "results" / place, tmp_path / place)
    path = tmp_path / place / "planned.json"
    with pytest.raises(ConfigError, match=r"azure_conv_2023\.csv cannot be read: .* predict RUN workload\.path=FILE"):
        again(path, [], ROOT)
    with pytest.raises(ConfigError, match=r"^measure\.seed=1: all is as it was measured; workload\.path=FILE alone"):
        again(path, ["measure.seed=1"], ROOT)
    lines = [f"2023-11-16 18:15:{i / 10:04.1f}00000,{100 + i},{5 + i}" for i in range(300)]
    (tmp_path / "other.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    with pytest.raises(ConfigError, match=r"asks something else today .*, workload\.sha256="):
        again(path, [f"workload.path={tmp_path}/other.csv"], ROOT)
    shutil.move(path.parent, tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"planned\.json is not where its run is stored: move its files to simulator"):
        again(tmp_path / "moved/planned.json", [], ROOT)


def test_a_run_that_was_measured_without_gets_predictions(run: Path) -> None:
    """Those that it would have had, behind rows that stay as they are to the byte."""
    had = without_predictions(run)
    measured = tables(run)
    changed(run, status="incomplete: interrupted", variants={**store.read(run).info.variants, "vllm": "vLLM"})
    run.with_name(run.stem + store.REMARKS).write_text("What was measured is right.\n")
    before, after, *rest = again(run, [], ROOT).splitlines()
    assert before == "before   no prediction can be compared"
    assert after.startswith("after    Predictions are off by, in the median: tokens/s ")
    assert not any("removed" in line for line in rest)
    new = store.read(run)
    assert new.remarks == "What was measured is right."
    assert new.info.status == "incomplete: interrupted"
    assert [*new.info.variants.items()] == [*had.info.variants.items(), ("vllm", "vLLM")]
    assert new.info.claims == had.info.claims
    for name, text in tables(run).items():
        assert text.startswith(measured[name]), name
    of_rows, of_had = (sorted(map(repr, result.rows)) for result in (new, had))
    assert of_rows == of_had
    assert new.info.notes[-1].startswith("Predicted on 20")
    again(run, [], ROOT)
    assert store.read(run).info.notes[-1].startswith("Predicted anew on 20")
    assert [note for note in store.read(run).info.notes if note.startswith("Predicted on")] == []


def test_processes_of_which_nothing_is_stored_are_not_predicted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_predictions(run)

    def two(*asked: Any, measure: Any = processes.measure) -> Findings:
        found = measure(*asked)
        return dataclasses.replace(found, rows=[*found.rows, *(replaced(row, process=1) for row in found.rows)])

    replaced = dataclasses.replace
    monkeypatch.setattr(processes, "measure", two)
    again(run, [], ROOT)
    assert {row.process for row in store.read(run).rows} == {0}


def test_a_variant_that_is_not_simulated_stays_without_and_is_named(run: Path) -> None:
    without_predictions(run)
    info = store.read(run).info
    info.config["experiment"]["variants"]["drafts"] = {"speculation": {"method": "ngram"}}
    typed = shlex.quote("+experiment.variants.drafts={speculation: {method: ngram}}")
    origin = dataclasses.replace(info.provenance, command=f"{info.provenance.command} {typed}")
    changed(run, config=info.config, provenance=origin, variants={**info.variants, "drafts": "drafts"})
    again(run, [], ROOT)
    new = store.read(run).info
    assert "drafts" in new.variants
    assert f"drafts{PREDICTED}" not in new.variants
    assert f"whole{PREDICTED}" in new.variants
    (note,) = (note for note in new.notes if note.startswith("Nothing is predicted of "))
    assert note.startswith(
        "Nothing is predicted of drafts (method ngram): speculation.method=ngram: a simulated engine"
    )


def test_a_variant_of_which_no_costs_are_known_stays_without_and_is_named(run: Path) -> None:
    without_predictions(run)
    info = store.read(run).info
    info.config["experiment"]["variants"]["blocks"] = {"label": "small blocks", "cache": {"block_size": 8}}
    typed = shlex.quote("+experiment.variants.blocks={label: small blocks, cache: {block_size: 8}}")
    origin = dataclasses.replace(info.provenance, command=f"{info.provenance.command} {typed}")
    known = store.plain(Ceilings(10.0, 10.0, {"float32": 0.1}, threads=1))
    variants = {**info.variants, "blocks": "small blocks"}
    changed(run, config=info.config, provenance=origin, variants=variants, ceilings=known)
    again(run, [], ROOT)
    new = store.read(run)
    assert f"whole{PREDICTED}" in new.info.variants
    assert f"blocks{PREDICTED}" not in {*new.info.variants, *new.info.peers, *(row.variant for row in new.rows)}
    (note,) = [note for note in new.info.notes if "small blocks" in note]
    assert note.startswith("Nothing is predicted of small blocks: its steps would take the roofline, a bound")
    assert [note for note in new.info.notes if note.startswith(f"{TAKE}the roofline")] == []


def test_loads_of_disaggregation_are_predicted_too(compose_config: Any, tmp_path: Path) -> None:
    """A simulated run stands for a measured one, so that the predictions are its rows."""
    mix = "experiment.mixes=[{name: a, prompt_tokens: 32, output_tokens: 4, rates_per_s: [20, 40], seconds: 1.5}]"
    given = [
        "experiment=disaggregation",
        "model=dry",
        "engine.model.dry.step_ms=5",
        mix,
        "experiment.prompt_tokens=[40]",
    ]
    given += ["experiment.claims=[]", "experiment.plots=[]", "measure.processes=1", "paths.run=loads"]
    alone = catalog.shorthand([*given, "system=simulated"], ROOT / "conf")
    execute(compose_config(*alone), "disaggregation", alone, tmp_path)
    (path,) = tmp_path.glob(f"trial/results/{store.EVERY_RUN}")
    own = dataclasses.replace(store.read(path).info.provenance, command=f"python run.py {shlex.join(given)}")
    changed(path, provenance=own)
    simulated = store.read(path)
    assert "Of 12 predictions 12 lie within 10% of what was measured" in again(path, [], ROOT)
    new = store.read(path)
    assert [*new.info.variants] == [TOGETHER, TOGETHER + PREDICTED, APART, APART + PREDICTED]
    assert new.rows == (
        *simulated.rows,
        *(dataclasses.replace(r, variant=r.variant + PREDICTED) for r in simulated.rows),
    )


def test_rows_stand_where_those_of_the_same_pass_stood() -> None:
    def row(variant: str, process: int, value: float) -> Row:
        return Row(variant, "", 0, "ttft_ms", value, "ms", process=process)

    before = [row("a", 0, 1), row("p", 0, 2), row("p", 0, 3), row("a", 1, 4), row("p", 1, 5)]
    found = [row("p", 1, 6), row("p", 0, 7), row("p", 2, 8)]
    assert [each.value for each in _replaced(before, found, ["p"])] == [1, 7, 4, 6, 8]


def test_the_command_says_what_became_of_the_errors(run: Path, tmp_path: Path, run_py, capsys) -> None:
    assert run_py("predict", "simulator", "--results", str(tmp_path / "results")) == 2
    assert "has no run default; it has: " in capsys.readouterr().err
    assert run_py("predict", str(run)) == 0
    before, after, *_, page = capsys.readouterr().out.splitlines()[-5:]
    assert before.removeprefix("before") == after.removeprefix("after ")
    assert page.endswith("run `python run.py report`")
