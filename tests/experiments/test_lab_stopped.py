"""A run that is stopped, or that cannot be written, loses nothing that was measured."""

import errno
import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.lab import execute
from experiments.lab.experiment import IncompleteRun, run_rounds
from experiments.lab.measure import cells, hardware, processes
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.show import report
from experiments.lab.show.progress import Steps
from experiments.lab.store import provenance, runs
from experiments.lab.store import result as store
from experiments.lab.store.result import StoreError
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_figures")

PASSES = 2 * 2  # variants and points


@pytest.fixture
def config(compose_config, tmp_path):
    """The probe with two engine variants on the dry model."""
    made = compose_config(
        "experiment=probe",
        "model=dry",
        "experiment.samples=0",
        "experiment.claims=[]",
        "experiment.plots=[]",
        "measure.repeats=4",
        "engine.cache.num_blocks=64",
        "workload=fixed",
        "workload.count=3",
        "workload.prompt_tokens=12",
        "workload.output_tokens=5",
        f"paths.results={tmp_path / 'results'}",
        f"paths.reports={tmp_path / 'reports'}",
    )
    made.experiment.variants.transformers = {"label": "baseline"}
    made.experiment.points = {"workload.concurrency": [1, 3]}
    return made


def stop_at(monkeypatch, number, error):
    """Plants `error` in the measurement of that number, from 1 on."""
    real, calls = cells.serve, []

    def serve(*arguments):
        calls.append(1)
        if len(calls) == number:
            raise error
        return real(*arguments)

    monkeypatch.setattr(cells, "serve", serve)


def changed(config, values):
    for key, value in values.items():
        OmegaConf.update(config, key, value)


def run(config, root):
    return execute.execute(config, "quickstart", [], root)


def stored(root):
    return store.read(root / "results/quickstart/own.in_process/cpu/default.json")


@pytest.mark.parametrize(
    ("error", "raised", "why"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
        (ValueError("planted"), IncompleteRun, "ValueError: planted"),
        (OSError(errno.ENOSPC, "No space left on device"), IncompleteRun, r"OSError: \[Errno 28\] No space"),
    ],
)
def test_finished_rounds_are_kept_and_the_run_is_marked(config, tmp_path, monkeypatch, capsys, error, raised, why):
    stop_at(monkeypatch, PASSES + 4, error)  # the second repeat's second point, the second variant
    with pytest.raises(raised) as caught:
        run(config, tmp_path)
    result = stored(tmp_path)
    status = rf"^incomplete: {why}.* in repeat 2 of 4 at concurrency=3; 3 of 8 rounds are kept"
    with pytest.raises(StoreError, match=status):
        raise StoreError(result.info.status)
    assert {(row.point, row.repeat) for row in result.rows} == {
        ("concurrency=1", 0),
        ("concurrency=3", 0),
        ("concurrency=1", 1),
    }
    assert [g.total_tokens for g in result.info.gates] == [2 * 15, 15]
    shown = capsys.readouterr().err if raised is KeyboardInterrupt else str(caught.value)
    assert "3 of 8 rounds are kept, in " in shown
    assert "default.json" in shown
    assert "INCOMPLETE" in (tmp_path / "reports/quickstart.md").read_text()


def test_of_the_first_round_the_finished_passes_are_kept(config, tmp_path, monkeypatch, capsys):
    stop_at(monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    result = stored(tmp_path)
    assert result.info.status == (
        "incomplete: interrupted in repeat 1 of 4 at concurrency=1; of the first round is kept: baseline"
    )
    assert {(row.variant, row.point, row.repeat) for row in result.rows} == {("transformers", "concurrency=1", 0)}
    assert "default.json" in capsys.readouterr().err
    assert "INCOMPLETE" in (tmp_path / "reports/quickstart.md").read_text()


def test_of_the_very_first_pass_the_requests_are_kept_that_have_ended(config, tmp_path, monkeypatch, capsys):
    real_answered, real_warm_up, warm = Outcomes.answered, cells.warm_up, []

    def answered(self):
        if warm and len(self.traces) == 2:
            raise KeyboardInterrupt
        return real_answered(self)

    monkeypatch.setattr(Outcomes, "answered", answered)
    monkeypatch.setattr(cells, "warm_up", lambda *given: (real_warm_up(*given), warm.append(True)))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    result = stored(tmp_path)
    assert result.info.status == (
        "incomplete: interrupted in repeat 1 of 4 at concurrency=1; of the first round is kept: baseline, 2 of 3 "
        "requests, which count in no figure"
    )
    assert {row.reason for row in result.rows} == {"1 of 3 requests failed: the run was interrupted before its end"}
    assert not any(row.valid for row in result.rows)
    assert [request.end_s is not None for request in result.requests] == [True, True, False]
    assert "default.json" in capsys.readouterr().err
    assert "INCOMPLETE" in (tmp_path / "reports/quickstart.md").read_text()


def test_with_no_pass_finished_it_is_said_how_to_go_on(config, tmp_path, monkeypatch, capsys):
    def serve(*arguments):
        Steps.tell(shown[0], 2, 8)
        raise KeyboardInterrupt

    shown = []
    real = Steps.next

    def next_step(self, what):
        shown.append(self)
        real(self, what)
        self._begun -= 30

    monkeypatch.setattr(Steps, "next", next_step)
    monkeypatch.setattr(cells, "serve", serve)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    assert not (tmp_path / "results").exists()
    said = capsys.readouterr().err
    assert "2 of 8 requests were answered after 30 s: at that pace the run's 16 passes take about 32 min" in said
    assert "add measure.processes=1 measure.repeats=1" in said


def test_an_interrupted_run_stands_beside_a_complete_one(config, tmp_path, monkeypatch):
    run(config, tmp_path)
    complete = stored(tmp_path)
    stop_at(monkeypatch, PASSES + 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    assert stored(tmp_path).rows == complete.rows
    beside = store.read(tmp_path / "results/quickstart/own.in_process/cpu/default-incomplete.json")
    assert len(beside.rows) == len(complete.rows) // 4


def test_a_stored_run_gets_the_processes_that_it_lacks(config, tmp_path, monkeypatch):
    """Without starting any: each is measured here."""
    monkeypatch.setattr(processes, "_in_child", processes._here)
    git = {"commit": "a" * 40, "is_clean": True}
    for name in git:
        monkeypatch.setattr(provenance, name, lambda root, name=name: git[name])
    since = [0]
    monkeypatch.setattr(runs, "commits_since", lambda info, root: since[0])

    def again(count, resume=True):
        changed(config, {"measure.processes": count, "paths.resume": resume})
        run(config, tmp_path)
        return stored(tmp_path)

    one = again(1, resume=False)
    git["commit"] = "b" * 40
    three = again(3)
    assert [row for row in three.rows if row.process == 0] == list(one.rows)
    assert {row.process for row in three.rows} == {row.process for row in three.requests} == {0, 1, 2}
    assert three.info.status == "complete"
    assert three.info.gates[0].total_tokens == 3 * one.info.gates[0].total_tokens
    assert [p.complete for p in three.info.processes] == [True] * 3
    assert [p.commit for p in three.info.processes] == ["a" * 40, None, None]
    assert three.info.provenance.commit == git["commit"]

    page = (tmp_path / "reports/quickstart.md").read_text()
    assert f"Process 1: measured at commit {'a' * 12}, since which no code that is named has changed." in page
    path = tmp_path / "results/quickstart/own.in_process/cpu/default"
    path.with_suffix(".remarks.md").write_text("By hand.")
    git["commit"] = "c" * 40
    assert again(3) == replace(three, remarks="By hand."), "nothing is left to measure, and nothing is written"
    broken = path.with_name("default-incomplete.json")
    broken.write_text("{")
    assert again(3) == replace(three, remarks="By hand."), "what is cut short beside it is left alone"
    broken.unlink()

    def refused(why):
        with pytest.raises(ConfigError, match=f"{why}.*Leave --resume out"):
            again(3)

    git["is_clean"] = False
    refused("neither then nor now code was uncommitted")
    git["is_clean"], since[0] = True, 1
    refused("before the code that it names changed")
    since[0] = 0
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "versions", dict)
        refused("was measured with mini-infer")
        patch.setattr(provenance, "versions", lambda: {**three.info.provenance.versions, "compiled by": "mypyc"})
        refused("was measured with compiled by None, and here is mypyc")
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "facts", lambda device: {**three.info.provenance.device, "cpu": "another"})
        refused("was measured with cpu .*, and here is another")
    changed(config, {"measure.repeats": 2})
    refused(r"another measure\.repeats \(4, not 2\)")
    assert stored(tmp_path).rows == three.rows


def test_results_older_than_the_field_go_on_too(config, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_in_child", processes._here)
    monkeypatch.setattr(provenance, "is_clean", lambda root: True)
    monkeypatch.setattr(runs, "commits_since", lambda info, root: 0)
    changed(config, {"measure.processes": 1})
    run(config, tmp_path)
    one = stored(tmp_path)
    older = tuple(replace(process, complete=None) for process in one.info.processes)
    store.write(tmp_path / "results", replace(one, info=replace(one.info, processes=older)))
    changed(config, {"measure.processes": 2, "paths.resume": True})
    run(config, tmp_path)
    two = stored(tmp_path)
    assert two.info.status == "complete"
    assert [row for row in two.rows if row.process == 0] == list(one.rows)
    predicted = {**two.info.variants, "engine predicted": "predicted"}
    store.write(tmp_path / "results", replace(two, info=replace(two.info, variants=predicted)))
    changed(config, {"measure.processes": 3})
    with pytest.raises(ConfigError, match="has engine predicted, which this run would not measure"):
        run(config, tmp_path)


def test_a_run_that_was_cut_off_goes_on_with_the_process_that_is_missing(config, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_in_child", processes._here)
    monkeypatch.setattr(provenance, "is_clean", lambda root: True)
    monkeypatch.setattr(runs, "commits_since", lambda info, root: 0)
    changed(config, {"measure.processes": 2})
    stop_at(monkeypatch, 4 * PASSES + 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    cut = stored(tmp_path)
    assert cut.info.status.endswith("1 of 2 processes are complete")
    assert [p.complete for p in cut.info.processes] == [True, False]
    changed(config, {"paths.resume": True})
    run(config, tmp_path)
    whole = stored(tmp_path)
    assert whole.info.status == "complete"
    assert whole.info.gates[0].total_tokens == PASSES // 2 * 2 * 4 * 15 // 2, "none of a process that was dropped"
    assert [row for row in whole.rows if row.process == 0] == [row for row in cut.rows if row.process == 0]
    assert {(row.process, row.repeat) for row in whole.rows} == {(p, r) for p in (0, 1) for r in range(4)}


def full_disk(monkeypatch, *folders):
    """Nothing can be written below these."""
    real = Path.write_bytes

    def write_bytes(self, data):
        if any(folder in self.parents for folder in folders):
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_results_that_cannot_be_written_go_to_the_systems_temporary_folder(config, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    full_disk(monkeypatch, tmp_path / "results")
    with pytest.raises(IncompleteRun, match=r"No space left.*kept in .*elsewhere.*move its files to .*run.py report"):
        run(config, tmp_path)
    (kept,) = elsewhere.glob("*/quickstart/own.in_process/cpu/default.json")
    assert len(store.read(kept).rows) == 4 * PASSES * 5
    monkeypatch.undo()
    shutil.copytree(kept.parent, tmp_path / "results/quickstart/own.in_process/cpu", dirs_exist_ok=True)
    assert report.rebuild(tmp_path / "results", tmp_path / "reports")  # as the message says


def test_results_that_can_be_written_nowhere_are_printed(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    full_disk(monkeypatch, tmp_path)
    with pytest.raises(IncompleteRun, match="The rows stand above, on stdout"):
        run(config, tmp_path)
    assert "engine,concurrency=3,2,0,total_s," in capsys.readouterr().out


def test_a_results_folder_that_cannot_be_made_is_no_loss_either(config, tmp_path, monkeypatch):
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(IncompleteRun, match="kept in"):
        run(config, tmp_path)


def test_a_report_that_cannot_be_made_leaves_the_result(config, tmp_path, monkeypatch):
    full_disk(monkeypatch, tmp_path / "reports")
    with pytest.raises(
        IncompleteRun, match=r"stored in .*default.json, but the report cannot be made: .*No space left"
    ):
        run(config, tmp_path)
    assert stored(tmp_path).info.status == "complete"


def test_a_mistake_in_the_settings_is_no_incomplete_run():
    def work():
        raise ConfigError("planted")

    with pytest.raises(ConfigError, match="planted"):
        run_rounds([("the first round", work)])


def test_ctrl_c_ends_the_program_with_its_own_code_and_no_traceback(run_py, monkeypatch, capsys, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "execute", interrupted)
    assert run_py("experiment=quickstart", f"hydra.run.dir={tmp_path}") == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_time_limit_keeps_what_was_measured(run_py, monkeypatch, tmp_path):
    """`timeout` and batch systems send SIGTERM."""
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    slow = ["model=dry", "engine.model.dry.step_ms=10", "engine.model.dry.max_model_len=2048", "measure.repeats=50"]
    few = ["engine.model.device=cpu", "workload.prompt_tokens=8", "workload.output_tokens=9"]
    shown, limits = Steps.next, iter([signal.SIGTERM])

    def terminated(self, what):
        shown(self, what)
        if "repeat 2 of 50" in what:
            for limit in limits:
                os.kill(os.getpid(), limit)  # while the measuring process goes on

    monkeypatch.setattr(Steps, "next", terminated)
    assert run_py("experiment=overlap", f"hydra.run.dir={tmp_path / 'out'}", *places, *slow, *few) == 130
    (kept,) = (tmp_path / "results" / "overlap").glob("*/cpu/*.json")
    assert store.read(kept).info.status.startswith("incomplete: process 1 of 3: interrupted in ")
