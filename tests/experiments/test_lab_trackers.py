"""Trackers: what they are told, that Weights & Biases really writes it down, and that no failure of theirs costs a
measurement."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.lab import sweep
from experiments.lab.config.schema import TrackerKind, TrackerSettings
from experiments.lab.execute import execute
from experiments.lab.show import report
from experiments.lab.store import result as store
from experiments.lab.store import trackers
from mini_infer.core.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_figures")]

RUN = [
    "experiment=probe",
    "model=dry",
    "workload=text",
    "workload.count=3",
    "workload.min_output_tokens=5",
    "workload.max_output_tokens=5",
    "measure.repeats=2",
    "engine.cache.num_blocks=512",
]


@pytest.fixture(scope="module")
def run(compose_config, quick_figures, tmp_path_factory):
    """Runs an experiment on the dry model with a tracker, and returns what was stored and its folder."""

    def make(*overrides):
        folder = tmp_path_factory.mktemp("run")
        config = compose_config(
            *RUN,
            "+experiment.timeline={workload.concurrency:3}",
            f"paths.results={folder / 'results'}",
            f"paths.reports={folder / 'reports'}",
            f"tracker.folder={folder / 'outputs'}",
            *overrides,
        )
        config.experiment.variants.transformers = {"label": "baseline"}
        config.experiment.points = {"workload.concurrency": [1, 3]}
        config.experiment.samples = 0
        for claim in config.experiment.claims:
            claim.at = {"workload.concurrency": 3}
        execute(config, "quickstart", [], folder)
        return store.read(folder / "results/quickstart/own.in_process/cpu/default.json"), folder

    return make


@pytest.fixture(scope="module")
def stored(run):
    """A finished run that nobody was told of, and the figures of its report."""
    result, folder = run()
    assert not (folder / "outputs").exists()
    rows = tuple(dataclasses.replace(row, valid=True, reason="") for row in result.rows)  # however busy the machine is
    result = dataclasses.replace(result, rows=rows)
    return result, report.figure_paths(folder / "reports", result)


WANDB = TrackerSettings(TrackerKind.wandb)


class Run:
    """Of a W&B that remembers what it is told, and may fail where it is told to."""

    def __init__(self, made, fails, **told):
        self.__dict__.update(told)
        self.made, self.fails, self.logged, self.axes = made, fails, [], {}
        self.settings = SimpleNamespace(sync_dir=f"/runs/{len(made)}")
        self.summary = {}
        made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._fail("finish")

    def _fail(self, where):
        if where == self.fails:
            raise OSError(28, "No space left on device")

    def define_metric(self, name, step_metric):
        self._fail("define_metric")
        self.axes[name.removesuffix("/*")] = step_metric.rpartition("/")[2]

    def log(self, values):
        self._fail("log")
        self.logged.append(values)

    def curve(self, name):
        return [{key.removeprefix(f"{name}/"): v for key, v in row.items()} for row in self.logged
                if all(key.startswith(f"{name}/") for key in row)]  # fmt: skip

    def one(self, name):
        (found,) = [row[name] for row in self.logged if name in row]
        return found


@pytest.fixture
def wandb(monkeypatch):
    """In the place of the package; returns its runs, and a namespace whose `fails` names what fails."""
    told = SimpleNamespace(runs=[], fails="")

    def init(**settings):
        run = Run(told.runs, told.fails, **settings)
        run._fail("init")
        return run

    package = SimpleNamespace(
        init=init,
        Settings=lambda **given: SimpleNamespace(**given),
        Table=lambda columns, data, **_: SimpleNamespace(columns=columns, data=data),
        Image=lambda path: path,
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    return told


def test_what_a_tracker_is_told(stored, wandb, tmp_path, capsys):
    result, figures = stored
    trackers.track(result, figures, WANDB, tmp_path)
    assert capsys.readouterr().out.startswith(f"tracker  3 W&B runs in {tmp_path}/outputs/wandb; send them with: ")
    baseline, engine, tables = wandb.runs
    assert [r.name for r in wandb.runs] == ["baseline", "mini-infer", "report"]
    assert {(r.group, r.job_type) for r in wandb.runs} == {("quickstart", "quickstart")}
    assert engine.config["variant"] == "engine"
    assert engine.config["config"]["engine"]["model"]["load_format"] == "dry"
    assert engine.tags == ["quickstart", "cpu"]
    assert engine.summary["output_tokens_per_s concurrency=3"] > 0
    curve = engine.curve("points")
    assert engine.axes["points"] == "workload.concurrency"
    assert [row["workload.concurrency"] for row in curve] == [1, 3]
    assert {"ttft_ms", "ttft_ms low", "ttft_ms high"} <= set(curve[0])
    steps = engine.curve("steps concurrency=3")
    assert engine.axes["steps concurrency=3"] == "start_s"
    assert len(steps) == sum(row.variant == "engine" for row in result.steps) > 3
    assert sum(row["decode_tokens"] for row in steps) == 3 * 4  # the first token of each comes with its prompt
    medians = tables.one("medians")
    assert medians.columns[:4] == ["metric", "point", "variant", "median"]
    assert len(medians.data) == 2 * 2 * len(result.info.metrics)
    assert {row[-1] for row in medians.data} == {None, "passed"}
    assert len(tables.one("claims").data) == len(result.info.claims)
    assert len(tables.one("values").data) == len(result.rows)
    assert Path(tables.one("figures/speed")).is_file()
    assert not any("figures/speed" in row for run in (baseline, engine) for row in run.logged)


def test_curves_go_over_the_setting_with_the_most_values():
    points = {
        f"{a} {b} {c}": {"w.size": a, "w.batch": b, "engine.mode": c}
        for a in (1, 2, 3)
        for b in (8, 16)
        for c in ("x",)
    }
    medians = {("v", point, "m"): {"median": float(at["w.size"])} for point, at in points.items()}
    info = SimpleNamespace(metrics={"m": None}, points=points)
    found = trackers._over_points(SimpleNamespace(info=info), "v", medians)
    assert {name for name, _, _ in found} == {"points batch=8 mode=x", "points batch=16 mode=x"}
    assert all(x == "w.size" and [row["m"] for row in curve] == [1, 2, 3] for _, x, curve in found)


def test_jobs_of_a_sweep_are_grouped(stored, wandb, monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "name", lambda: "2026-01-02 03-04-05")
    trackers.track(*stored, WANDB, tmp_path)
    assert {run.group for run in wandb.runs} == {"quickstart, sweep 2026-01-02 03-04-05"}
    assert wandb.runs[0].tags == ["quickstart", "cpu", "2026-01-02 03-04-05"]


def test_wandb_offline_writes_runs_under_outputs(run, capsys):
    _, folder = run("tracker=wandb_offline")
    shown = capsys.readouterr()
    assert "tracker  3 W&B runs" in shown.out
    assert "wandb sync" in shown.out
    assert "tracker:" not in shown.err
    folders = sorted((folder / "outputs" / "wandb").glob("offline-run-*"))
    assert len(folders) == 3
    logs = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
    for written in (b"steps concurrency=3/num_running", b"points/ttft_ms", b"quickstart", b"mini-infer"):
        assert written in logs
    tables = {p.name.partition("_")[0]: json.loads(p.read_text()) for f in folders for p in f.rglob("*.table.json")}
    assert set(tables) == {"medians", "claims", "values"}
    assert tables["medians"]["columns"][0] == "metric"
    assert len(list((folder / "outputs").rglob("media/images/figures/*.png"))) >= 1


def test_no_tracker_is_the_default_and_imports_nothing(stored, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    trackers.track(*stored, TrackerSettings(), tmp_path)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("where", ["init", "define_metric", "log", "finish"])
def test_a_tracker_that_fails_is_one_line(stored, wandb, tmp_path, capsys, where):
    wandb.fails = where
    trackers.track(*stored, WANDB, tmp_path)
    shown = capsys.readouterr().err
    assert shown == "tracker: [Errno 28] No space left on device. Results and report are stored all the same\n"


def test_a_missing_package_costs_no_measurement(stored, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it fails now
    trackers.track(*stored, WANDB, tmp_path)
    assert "pip install wandb. Results and report are stored" in capsys.readouterr().err


def sync_with(monkeypatch, outcome):
    """What `close` says when `wandb sync` ends so."""

    def run(command, **kwargs):
        assert command[1:4] == ["-m", "wandb", "sync"]
        assert kwargs["stdin"] == subprocess.DEVNULL  # nobody is asked for a login
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    return trackers._sent(["a run"], TrackerSettings(TrackerKind.wandb, sync=True))


def test_runs_are_sent_after_they_were_written(monkeypatch):
    done = subprocess.CompletedProcess([], 0, "", "")
    assert sync_with(monkeypatch, done).endswith("sent to W&B")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (
            subprocess.CompletedProcess([], 1, "wandb: Syncing", "Error: No API key configured. Use `wandb login`.\n"),
            "could not be sent (No API key configured. Use `wandb login`)",
        ),
        (subprocess.TimeoutExpired("wandb", 120), "could not be sent (no answer within 120 s)"),
        (OSError("no such program"), "could not be sent (no such program)"),
        (subprocess.CompletedProcess([], 3, "", ""), "could not be sent (wandb sync failed)"),
    ],
)
def test_a_missing_login_or_network_leaves_them_in_files(monkeypatch, outcome, reason):
    said = sync_with(monkeypatch, outcome)
    assert reason in said
    assert "send them with: wandb sync" in said


def test_settings_are_checked_before_anything_is_measured(run):
    with pytest.raises(ConfigError, match="must be a name, not an empty one"):
        run("tracker.project=''")
