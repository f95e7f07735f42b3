"""Experiments run from config to report, and notice when something is wrong with what they measure."""

import dataclasses
import json

import pytest
from reimported import reimported

from experiments import ablation, scheduler_overhead
from experiments.lab.execute import execute
from experiments.lab.judge import exact_gate
from experiments.lab.measure import cells
from experiments.lab.measure.clocks import Watch
from experiments.lab.measure.subjects import EngineSubject, Kind
from experiments.lab.peers.hf import HFGenerate
from experiments.lab.show import report
from experiments.lab.show.progress import Steps
from experiments.lab.store import result as store
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_figures")

SMALL = ["workload=fixed", "workload.count=3", "workload.prompt_tokens=12", "workload.output_tokens=5"]
DRY = ["model=dry", "experiment.samples=1", "measure.repeats=2", "engine.cache.num_blocks=64", *SMALL]
PROMPTS = [Item(tuple(range(3, 3 + n)), output) for n, output in ((20, 9), (5, 12), (11, 4))]


@pytest.fixture
def on_dry_model(compose_config):
    """the probe with two engine variants on the dry model: no weights, no time."""

    def make(*overrides):
        config = compose_config("experiment=probe", *DRY, *overrides)
        config.experiment.variants.transformers = {"label": "baseline"}
        config.experiment.points = {"workload.concurrency": [1, 3]}
        for claim in config.experiment.claims:
            claim.at = {"workload.concurrency": 3}
        return config

    return make


def test_an_ablation_measures_every_variant_at_every_point_in_every_repeat(on_dry_model):
    experiment = ablation.Ablation.from_config(on_dry_model())
    with Steps("test") as steps:
        findings = experiment.measure(steps)
    seen = {(row.variant, row.point, row.repeat, row.metric) for row in findings.rows}
    assert len(seen) == len(findings.rows) == 2 * 2 * 2 * 5
    assert all(row.valid for row in findings.rows)
    assert [(g.variant, g.point, g.passed) for g in findings.gates] == [
        ("engine", "concurrency=1", True),
        ("engine", "concurrency=3", True),
    ]
    assert findings.gates[0].total_tokens == 2 * 3 * 5
    assert len(findings.samples) == 1


def test_while_a_pass_runs_it_is_told_how_many_requests_have_ended(on_dry_model, monkeypatch):
    told = []
    monkeypatch.setattr(Steps, "within", lambda self, ended, total: told.append((ended, total)))
    with Steps("test") as steps:
        ablation.Ablation.from_config(on_dry_model()).measure(steps)
    assert told.count((0, 3)) >= 8  # at the first step of each pass
    assert told[-1] == (3, 3)


def test_variants_take_turns(on_dry_model, monkeypatch):
    order = []

    def noting(config, tell):
        order.append(config.seed)
        return EngineSubject(config, tell)

    monkeypatch.setattr(cells, "EngineSubject", noting)
    config = on_dry_model("experiment.claims=[]", "measure.repeats=4")
    config.experiment.points = {}
    config.experiment.variants = {"transformers": {"seed": 1}, "engine": {"seed": 2}}
    with Steps("test") as steps:
        ablation.Ablation.from_config(config).measure(steps)
    assert order == [1, 2, 2, 1, 1, 2, 2, 1]


class Broken:
    """The engine with one fault planted in what it serves."""

    def __init__(self, config, fault):
        self._real, self._fault = EngineSubject(config), fault
        self.about = self._real.about

    def serve(self, items, concurrency):
        served = self._real.serve(items, concurrency)
        last = served.requests[-1]
        changed = {
            "wrong token": {"token_ids": (*last.token_ids[:-1], (last.token_ids[-1] + 1) % 261)},
            "short": {"token_ids": last.token_ids[:-1], "token_times": last.token_times[:-1]},
            "cached": {"cached_tokens": 8},
        }[self._fault]
        requests = (*served.requests[:-1], dataclasses.replace(last, **changed))
        return dataclasses.replace(served, requests=requests)

    def forget(self):
        self._real.forget()

    def close(self):
        self._real.close()


@pytest.mark.parametrize(
    ("fault", "passes", "reason"),
    [
        ("wrong token", False, ""),
        ("short", False, "1 of 3 requests did not get the output length"),
        ("cached", True, "8 prompt tokens of unrelated prompts came from a prefix cache"),
    ],
)
def test_planted_faults_are_caught(on_dry_model, virtual_time, monkeypatch, tmp_path, fault, passes, reason):
    quick = "engine.model.dry.step_ms=1"  # of a clock that nothing else disturbs
    config = on_dry_model(quick, "+experiment.variants.engine.seed=7", f"paths.results={tmp_path / 'r'}")
    config.paths.reports = str(tmp_path / "reports")
    monkeypatch.setattr(
        cells,
        "EngineSubject",
        lambda engine, tell: Broken(engine, fault) if engine.seed == 7 else EngineSubject(engine, tell),
    )
    path = execute(config, "quickstart", [], tmp_path)
    result = store.read(tmp_path / "r/quickstart/own.in_process/cpu/default.json")
    assert {g.passed for g in result.info.gates} == {passes}
    faulty = [row for row in result.rows if row.variant == "engine"]
    assert all((not row.valid and reason in row.reason) if reason else row.valid for row in faulty)
    assert all(row.valid for row in result.rows if row.variant != "engine")
    assert {j.verdict.value for j in result.judgements} == {"inconclusive"}
    assert ("INVALID:" in path.read_text()) == bool(reason)


def test_a_run_leaves_results_and_a_report_that_can_be_rebuilt(on_dry_model, tmp_path):
    config = on_dry_model(f"paths.results={tmp_path / 'results'}", f"paths.reports={tmp_path / 'reports'}")
    overrides = ["experiment=quickstart", "model=dry", f"paths.results={tmp_path / 'results'}"]
    path = execute(config, "quickstart", overrides, tmp_path)
    written = tmp_path / "results/quickstart/dry.in_process/cpu/default.json"
    document = json.loads(written.read_text())
    assert document["config"]["engine"]["model"]["load_format"] == "dry"
    assert document["provenance"]["command"].startswith("python run.py experiment=quickstart model=dry")
    assert document["provenance"]["device"]["cores"] >= 1
    assert "torch" in document["provenance"]["versions"]
    before = {p: p.read_bytes() for p in (tmp_path / "reports").rglob("*") if p.is_file()}
    assert path in before
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    assert {p: p.read_bytes() for p in before} == before


@pytest.fixture
def small_overhead(compose_config):
    config = compose_config(
        "experiment=scheduler_overhead",
        "measure.repeats=2",
        "experiment.running=[2,4,8]",
        "experiment.steps=40",
        "experiment.prompt_tokens=[4096]",
        "experiment.matches=3",
        "experiment.waiting=[10,500]",
        "experiment.waiting_running=4",
    )
    config.experiment.claims[0].at = {"running": 8}
    config.experiment.claims[3].at = {"waiting": 500}
    return scheduler_overhead.SchedulerOverhead.from_config(config)


def test_scheduler_overhead_measures_all_its_points(small_overhead):
    experiment = small_overhead
    with Steps("test") as steps:
        findings = experiment.measure(steps)
    assert {row.point for row in findings.rows} == {p.name for p in experiment.points}
    assert {row.metric for row in findings.rows} == set(experiment.metrics) - {"step_p99_us"}  # 40 steps show none
    assert all(row.value > 0 for row in findings.rows if row.metric.endswith(("step_us", "told_us")))


def test_scheduler_overhead_keeps_finished_repeats(small_overhead, monkeypatch):
    points = []

    class Impatient(Steps):
        def next(self, what):
            points.append(what)
            if len(points) == len(small_overhead.points) + 1:  # one in the second repeat; the fit is no measurement
                raise KeyboardInterrupt

    with Impatient("test") as steps:
        findings = small_overhead.measure(steps)
    assert {row.repeat for row in findings.rows} == {0}
    assert findings.status == "incomplete: interrupted in repeat 2 of 2; 1 of 2 rounds are kept"


def test_a_probe_takes_turns_there_and_back_and_the_gpu_is_looked_at_where_something_ran(small_overhead, monkeypatch):
    turns, (first, second, *_) = [], small_overhead.points

    class Told(Steps):
        def next(self, what):
            turns.append(what)

    def values(variant, point):
        return {} if variant == "b" and small_overhead.repeat else {"step_us": 1.0, "step_p99_us": None}

    small_overhead.variants = {"a": "one", "b": "other"}
    small_overhead.timed = [("a", first), ("b", first), ("a", second)]
    monkeypatch.setattr(small_overhead, "values", values)
    monkeypatch.setattr(small_overhead, "problem", lambda: "planted" if small_overhead.repeat else "")
    monkeypatch.setattr(small_overhead, "derived", lambda found: [("a", second, {"r_squared": float(len(found))})])
    monkeypatch.setattr(Watch, "look", lambda self: turns.append("look"))
    with Told("test") as steps:
        found = small_overhead.measure(steps)
    of = [f"one {first.name}", f"other {first.name}", f"one {second.name}"]
    there, back = ([f"{label}, repeat {n} of 2" for label in of] for n in (1, 2))
    assert turns == [there[0], "look", there[1], "look", there[2], "look", back[2], "look", back[1], back[0], "look"]
    assert [(row.variant, row.point, row.repeat, row.metric, row.value, row.reason) for row in found.rows] == [
        *((variant, point.name, 0, "step_us", 1.0, "") for variant, point in small_overhead.timed),
        ("a", second.name, 0, "r_squared", 3.0, ""),
        *(("a", point.name, 1, "step_us", 1.0, "planted") for point in (second, first)),
        ("a", second.name, 1, "r_squared", 2.0, ""),
    ]
    assert [row.valid for row in found.rows] == [not row.reason for row in found.rows]


def test_transformers_generates_the_engines_tokens_whatever_the_checkpoint_says(checkpoint):
    model = ModelConfig(path=str(checkpoint))
    ours = EngineSubject(EngineConfig(model=model)).serve(PROMPTS, concurrency=3)
    theirs = HFGenerate(model).serve(PROMPTS, concurrency=2)
    assert [r.token_ids for r in theirs.requests] == [r.token_ids for r in ours.requests]
    assert [len(r.token_times) for r in theirs.requests] == [9, 12, 4]
    first, second, third = theirs.requests
    assert first.token_times == second.token_times[:9]  # one batch, one clock
    assert third.arrival >= second.token_times[-1]  # the next batch waits for the longest


def test_the_peer_needs_a_checkpoint():
    with pytest.raises(ConfigError, match=r"load_format=auto; got dry"):
        HFGenerate(ModelConfig(load_format=LoadFormat.dry))


@pytest.mark.slow
def test_a_peer_and_the_engine_run_end_to_end_on_a_checkpoint(compose_config, checkpoint, monkeypatch, tmp_path):
    few = exact_gate.probes()[exact_gate.CROWD :][2:5]  # test_lab_exact_gate.py asks all
    monkeypatch.setattr(exact_gate, "probes", lambda whole: few)
    config = compose_config(
        "experiment=probe",
        f"engine.model.path={checkpoint}",
        "experiment.samples=0",
        "measure.repeats=1",
        "workload=fixed",
        "workload.count=9",
        "workload.prompt_tokens=20",
        "workload.output_tokens=6",
        f"paths.results={tmp_path / 'results'}",
        f"paths.reports={tmp_path / 'reports'}",
    )
    text = execute(config, "quickstart", [], tmp_path).read_text()
    assert "all 54" in text
    assert "one repeat has no interval" in text
    assert (tmp_path / "reports/figures/quickstart-cpu-speed.png").is_file()
    assert (
        Kind.hf.value
        in store.read(tmp_path / "results/quickstart/own.in_process/cpu/default.json")
        .info.config["experiment"]["variants"]["transformers"]
        .values()
    )


def test_the_lab_needs_nothing_that_serves() -> None:
    serving = ["fastapi", "uvicorn", "prometheus_client", "llguidance"]
    assert reimported("import experiments.ablation", without=serving) == 0
