"""Every experiment in conf/ runs from its config to its report, on the dry model and with few requests."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from experiments.lab import catalog
from experiments.lab.execute import execute

pytestmark = pytest.mark.slow  # together they take half a minute

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(catalog.experiments(ROOT / "conf"))

FEW = {
    "uniform": ["workload.count=4", "workload.warmup=2"],
    "text": ["workload.count=4"],
    "shared_prefix": ["workload.count=4"],
    "mixed": [
        *("workload.streams=2", "workload.stream_output_tokens=6", "workload.prompts=2"),
        "workload.prompt_every_s=0.01",
    ],
}
OWN = {
    "scheduler_overhead": [
        *("experiment.steps=20", "experiment.matches=3", "measure.repeats=1", "experiment.waiting=[10,100]"),
        *("experiment.running=[8,16,32]", "experiment.prompt_tokens=[512]", "experiment.waiting_running=16"),
    ],
    "ceilings": ["experiment.mib=[1]", "experiment.matmul={cpu: [64]}", "measure.repeats=1"],
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs(compose_config, tmp_path: Path, name: str) -> None:
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    overrides = [f"experiment={name}", *places]
    if name in OWN:
        overrides += OWN[name]
    else:
        overrides += [
            "model=dry",
            "engine.model.dry.max_model_len=2048",
            "measure.repeats=1",
            *FEW[_kind(compose_config(f"experiment={name}"))],
        ]
    config = compose_config(*overrides)
    with open_dict(config):
        config.experiment.claims = []  # they are about points and sizes that this run does not have
        if name not in OWN:
            _leave_out_peers(config.experiment)
    report = execute(config, name, overrides, ROOT)

    (table,) = _tables(tmp_path, name)
    rows = list(csv.DictReader(table.open()))
    assert {row["variant"] for row in rows}
    if name not in OWN:
        wrong = {row["reason"] for row in rows if row["valid"] == "false"}
        assert all("sample is too small" in reason or "samples" in reason for reason in wrong), wrong
    assert str(config.experiment.question)[:30] in report.read_text()


def _kind(config) -> str:
    return OmegaConf.get_type(config.workload).__name__.lower().replace("sharedprefix", "shared_prefix")


def _leave_out_peers(experiment) -> None:
    """transformers cannot run a model without weights."""
    peers = [name for name, changes in experiment.variants.items() if (changes or {}).get("kind", "engine") != "engine"]
    for name in peers:
        del experiment.variants[name]
    if experiment.baseline in peers:
        experiment.baseline = next(iter(experiment.variants))


def _tables(tmp_path: Path, name: str) -> list[Path]:
    found = (tmp_path / "results" / name / "cpu").glob("*.csv")
    return [path for path in found if not path.name.endswith((".steps.csv", ".requests.csv"))]
