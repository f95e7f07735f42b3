"""Sweeps: a failing job is reported at the end and stops nobody, whichever launcher runs the jobs."""

import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from experiments.lab import sweep
from experiments.lab.store import result as store
from experiments.lab.store.runs import exclusive
from experiments.lab.sweep import DONE, FAILED, LOST, Outcome
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]

needs_joblib = pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None, reason="the extra `sweep` is not installed"
)
needs_submitit = pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None, reason="`cluster` is not installed"
)


@pytest.fixture
def in_job(monkeypatch, tmp_path):
    """As in job 3 of a sweep."""

    def make(**launcher):
        folder = tmp_path / "2026-01-02" / "03-04-05"
        (folder / "3").mkdir(parents=True, exist_ok=True)
        config = {
            "mode": RunMode.MULTIRUN,
            "sweep": {"dir": str(folder)},
            "job": {"num": 3},
            "runtime": {"output_dir": str(folder / "3")},
            "overrides": {"task": ["experiment=quickstart", "measure.seed=1"]},
            "launcher": launcher,
        }
        monkeypatch.setattr(HydraConfig, "initialized", staticmethod(lambda: True))
        monkeypatch.setattr(HydraConfig, "get", staticmethod(lambda: OmegaConf.create(config)))
        return folder

    return make


def run_job(error=None):
    with sweep.job():
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (None, DONE, ""),
        (ConfigError("engine.x cannot be 3\nand more"), FAILED, "engine.x cannot be 3"),
        (ValueError("surprise"), FAILED, "ValueError: surprise"),
        (SystemExit(2), FAILED, "exit code 2"),
        (SystemExit(0), DONE, ""),
    ],
)
def test_a_job_leaves_its_outcome_and_never_stops_the_others(in_job, capsys, error, status, reason):
    folder = in_job()
    run_job(error)
    (found,) = sweep.outcomes(folder)
    assert (found.number, found.status, found.reason) == (3, status, reason)
    assert found.overrides == ("experiment=quickstart", "measure.seed=1")
    assert ("Traceback" in capsys.readouterr().err) == (type(error) is ValueError)


def test_a_full_disk_does_not_turn_a_finished_job_into_a_failed_one(in_job, capsys):
    folder = in_job()
    (folder / "3" / sweep.FILE).mkdir()  # where nothing can be written
    run_job()
    assert "job 3: its outcome cannot be noted" in capsys.readouterr().err


def test_ctrl_c_ends_the_sweep_and_is_noted(in_job):
    folder = in_job()
    with pytest.raises(KeyboardInterrupt):
        run_job(KeyboardInterrupt())
    assert sweep.outcomes(folder)[0].reason == "interrupted"


def test_outside_a_sweep_an_error_passes_through():
    assert sweep.name() is None
    assert sweep.notes() == []
    with pytest.raises(ConfigError):
        run_job(ConfigError("no"))


def test_the_table_tells_jobs_apart_and_names_the_lost(tmp_path):
    for number in (0, 1, 10):
        (tmp_path / str(number)).mkdir()
    (tmp_path / ".submitit").mkdir()
    done = {"number": 0, "overrides": ["experiment=a", "x=1"], "status": DONE, "reason": "", "seconds": 12.0}
    (tmp_path / "0" / sweep.FILE).write_text(json.dumps(done))
    (tmp_path / "10" / sweep.FILE).write_text('{"number": 10')
    found = sweep.outcomes(tmp_path)
    assert [o.status for o in found] == [DONE, LOST, LOST]
    assert sweep.table(found[1:]).startswith("sweep: 0 of 2 jobs done")
    found[1] = Outcome(1, ("experiment=a", "x=2"), FAILED, "x=2: why", 3.0)  # a refusal names its setting
    lines = sweep.table(found).splitlines()
    assert lines[0] == "sweep: 1 of 3 jobs done"
    assert lines[1].split() == ["#0", "done", "12", "s", "x=1"]
    assert lines[2].endswith(" s  x=2: why")
    assert "its process ended without a word" in lines[3]


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}, ""),
        (
            {"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "n_jobs": 3},
            "3 at a time",
        ),
        ({"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "n_jobs": 1}, ""),
        ({"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"}, ""),
        ({"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}, "all at once"),
    ],
)
def test_a_report_says_when_jobs_disturbed_each_other(in_job, launcher, words):
    in_job(**launcher)
    assert sweep.name() == "2026-01-02 03-04-05"
    notes = sweep.notes()
    assert len(notes) == bool(words)
    assert all(words in note for note in notes)


# --- real sweeps ---------------------------------------------------------------------------------------------------

SMALL = [
    "experiment=scheduler_overhead",
    "measure.repeats=1",
    "measure.processes=1",
    "experiment.running=[2,4,8]",
    "experiment.steps=10",
    "experiment.prompt_tokens=[64]",
    "experiment.matches=2",
    "experiment.waiting=[10]",
    "experiment.waiting_running=4",
    "experiment.claims=[]",
]


@pytest.fixture
def arguments(tmp_path):
    """One job that works, and one whose settings are refused."""
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    return ["-m", *SMALL, "measure.seed=0,-1", *places, f"hydra.sweep.dir={tmp_path / 'sweep'}"]


@pytest.fixture
def run_sweep(run_py, capsys, arguments):
    """Returns the exit code, stdout and stderr."""
    return lambda *overrides: (run_py(*arguments, *overrides), *capsys.readouterr())


@pytest.fixture
def run_sweep_apart(arguments):
    """In a process of its own: a launcher that pickles jobs changes the classes of the configs that come back."""

    def run(*overrides):
        command = [sys.executable, "run.py", *arguments, *overrides]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


def check_sweep(folder, code, shown, errors):
    assert code == 1, shown + errors
    assert "sweep: 1 of 2 jobs done" in shown
    assert "measure.seed=-1: measure.seed must be at least 0, got -1" in shown
    assert "Traceback" not in errors
    (result,) = store.read_all(folder / "results")
    assert result.rows
    assert (folder / "reports" / "scheduler_overhead.md").is_file()
    return result


def test_a_sweep_goes_on_after_a_failure(tmp_path, run_sweep):
    code, shown, errors = run_sweep()
    (typed,) = check_sweep(tmp_path, code, shown, errors).info.notes
    assert typed.startswith("Not as the experiment has it: running=2,4,8, ")
    assert "disturb" not in errors


@pytest.mark.slow
@needs_joblib
def test_a_sweep_through_joblib(tmp_path, run_sweep_apart):
    code, shown, errors = run_sweep_apart("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    _, note = check_sweep(tmp_path, code, shown, errors).info.notes
    assert "2 at a time on this machine" in note
    assert errors.count("warning: jobs run 2 at a time on this machine and disturb each other's timings") == 1


@pytest.mark.slow
@needs_submitit
def test_a_sweep_through_submitit(tmp_path, run_sweep_apart):
    code, shown, errors = run_sweep_apart("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5")
    check_sweep(tmp_path, code, shown, errors)
    assert errors.count("disturb each other's timings") == 1


@needs_submitit
def test_a_cluster_can_be_configured(compose_config):
    config = compose_config("experiment=quickstart", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu")
    assert config.experiment.question


def test_a_sweep_over_nothing_is_no_success(tmp_path, run_py, capsys):
    assert run_py("-m", "experiment=glob(nothing*)", f"hydra.sweep.dir={tmp_path}") == 1
    assert "does a glob(...) match nothing?" in capsys.readouterr().out


# --- one at a time -------------------------------------------------------------------------------------------------


def _count(folder, times):
    for _ in range(times):
        with exclusive(folder):
            path = folder / "count"
            before = int(path.read_text()) if path.exists() else 0
            time.sleep(0.001)
            path.write_text(str(before + 1))


def test_processes_take_turns(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(tmp_path / "shared", 20)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert (tmp_path / "shared" / "count").read_text() == "40"
