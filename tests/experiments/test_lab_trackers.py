"""Trackers: what they are told, that Weights & Biases really writes it down, and that no failure of theirs costs a
measurement."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from experiments.lab.store.wandb_tracker import WandbTracker

from experiments.lab import sweep
from experiments.lab.execute import execute
from experiments.lab.schema import TrackerKind, TrackerSettings
from experiments.lab.show import report
from experiments.lab.store import result as store
from experiments.lab.store import trackers
from experiments.lab.store.trackers import Grouping
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.slow  # together they take half a minute

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
def run(compose_config, tmp_path_factory):
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


class Noting:
    """A tracker that remembers."""

    def __init__(self):
        self.runs = []

    def start(self, name, group, job, config, tags):
        self.runs.append(
            SimpleNamespace(name=name, group=group, job=job, config=config, tags=tags, series={}, tables={}, figures=[])
        )

    def series(self, name, x, rows):
        self.runs[-1].series[name] = (x, list(rows))

    def summary(self, values):
        self.runs[-1].summary = values

    def table(self, name, columns, rows):
        self.runs[-1].tables[name] = (columns, rows)

    def figure(self, name, path):
        self.runs[-1].figures.append((name, path.is_file()))

    def finish(self):
        self.runs[-1].finished = True

    def close(self):
        return "noted"


def test_what_a_tracker_is_told(stored):
    result, figures = stored
    tracker = Noting()
    trackers.log(tracker, result, figures, Grouping.of(result.info, None))
    baseline, engine, tables = tracker.runs
    assert [r.name for r in tracker.runs] == ["baseline", "mini-infer", "report"]
    assert {(r.group, r.job, r.finished) for r in tracker.runs} == {("quickstart", "quickstart", True)}
    assert engine.config["variant"] == "engine"
    assert engine.config["config"]["engine"]["model"]["load_format"] == "dry"
    assert engine.tags == ("quickstart", "cpu")
    assert engine.summary["output_tokens_per_s concurrency=3"] > 0
    x, curve = engine.series["points"]
    assert x == "workload.concurrency"
    assert [row[x] for row in curve] == [1, 3]
    assert {"ttft_ms", "ttft_ms low", "ttft_ms high"} <= set(curve[0])
    x, steps = engine.series["steps concurrency=3"]
    assert x == "start_s"
    assert len(steps) == sum(row.variant == "engine" for row in result.steps) > 3
    assert sum(row["decode_tokens"] for row in steps) == 3 * 4  # the first token of each comes with its prompt
    columns, medians = tables.tables["medians"]
    assert columns[:4] == ["metric", "point", "variant", "median"]
    assert len(medians) == 2 * 2 * len(result.info.metrics)
    assert {row[-1] for row in medians} == {None, "passed"}
    assert len(tables.tables["claims"][1]) == len(result.info.claims)
    assert len(tables.tables["values"][1]) == len(result.rows)
    assert ("speed", True) in tables.figures
    assert baseline.figures == engine.figures == []


def test_curves_go_over_the_setting_with_the_most_values():
    info = SimpleNamespace(
        metrics={"m": SimpleNamespace(share=False)},
        points={
            f"{a} {b} {c}": {"w.size": a, "w.batch": b, "engine.mode": c}
            for a in (1, 2, 3)
            for b in (8, 16)
            for c in ("x",)
        },
    )
    rows = [store.Row("v", point, 0, "m", float(at["w.size"]), "s") for point, at in info.points.items()]
    found = trackers._point_series(SimpleNamespace(info=info, rows=rows), "v")
    assert {name for name, _, _ in found} == {"points batch=8 mode=x", "points batch=16 mode=x"}
    assert all(x == "w.size" and [row["m"] for row in curve] == [1, 2, 3] for _, x, curve in found)


def test_jobs_of_a_sweep_are_grouped(stored, monkeypatch, tmp_path):
    tracker = Noting()
    monkeypatch.setattr(sweep, "name", lambda: "2026-01-02 03-04-05")
    monkeypatch.setattr(trackers, "_open", lambda settings, root: tracker)
    trackers.track(*stored, WANDB, tmp_path)
    (grouping,) = {Grouping(run.group, run.tags) for run in tracker.runs}
    assert grouping == Grouping("quickstart, sweep 2026-01-02 03-04-05", ("quickstart", "cpu", "2026-01-02 03-04-05"))


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


class Failing(Noting):
    def __init__(self, where):
        super().__init__()
        self._where = where

    def __getattribute__(self, name):
        if name in ("start", "series", "summary", "table", "figure", "finish", "close") and name == self._where:
            raise OSError(28, "No space left on device")
        return super().__getattribute__(name)


@pytest.mark.parametrize("where", ["start", "series", "summary", "table", "figure", "finish", "close"])
def test_a_tracker_that_fails_is_one_line(stored, monkeypatch, tmp_path, capsys, where):
    monkeypatch.setattr(trackers, "_open", lambda settings, root: Failing(where))
    trackers.track(*stored, WANDB, tmp_path)
    shown = capsys.readouterr().err
    assert shown == "tracker: [Errno 28] No space left on device. Results and report are stored all the same\n"


def test_a_missing_package_costs_no_measurement(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it fails now
    result, _ = run("tracker=wandb")
    assert result.rows
    assert "pip install wandb. Results and report are stored" in capsys.readouterr().err


def sync_with(monkeypatch, tmp_path, outcome):
    """What `close` says when `wandb sync` ends so."""

    def run(command, **kwargs):
        assert command[1:4] == ["-m", "wandb", "sync"]
        assert kwargs["stdin"] == subprocess.DEVNULL  # nobody is asked for a login
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    tracker = WandbTracker(TrackerSettings(TrackerKind.wandb, sync=True, folder=str(tmp_path)), tmp_path)
    return tracker.close()


def test_runs_are_sent_after_they_were_written(monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 0, "", "")
    assert sync_with(monkeypatch, tmp_path, done).endswith("sent to W&B")


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
def test_a_missing_login_or_network_leaves_them_in_files(monkeypatch, tmp_path, outcome, reason):
    said = sync_with(monkeypatch, tmp_path, outcome)
    assert reason in said
    assert "send them with: wandb sync" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tracker.project=''", "must not be empty"),
        ("tracker.sync_timeout_s=0", "tracker.sync_timeout_s must be above 0"),
    ],
)
def test_settings_are_checked_before_anything_is_measured(run, override, message):
    with pytest.raises(ConfigError, match=message):
        run(override)
