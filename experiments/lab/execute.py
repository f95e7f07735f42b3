"""One run from config to report: build, measure, store, report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from omegaconf import DictConfig

from experiments.lab import hardware, provenance, report, schema, store
from experiments.lab.experiment import Experiment
from experiments.lab.progress import Steps
from experiments.lab.store import Provenance, Result, RunInfo

NOT_IN_RUN_NAME = ("experiment=", "paths.")


def execute(config: DictConfig, name: str, overrides: Sequence[str], root: Path) -> Path:
    """Runs the experiment `name` and returns the path of its report.

    Args:
        overrides: what was typed beside the program's name.
        root: where relative paths of the config start.
    """
    experiment: Experiment = schema.experiment_class(config).from_config(config)
    paths = schema.build(schema.Paths, config.paths, "paths")
    threads = schema.build(schema.Measure, config.measure, "measure").threads
    if threads is not None:
        torch.set_num_threads(threads)
    commit, clean = provenance.commit(root), provenance.is_clean(root)  # of the code that is about to run
    started, clock = datetime.now(timezone.utc), time.monotonic()
    with Steps(name) as steps:
        findings = experiment.measure(steps)
    device = hardware.resolve(experiment.device)
    spec = experiment.spec
    info = RunInfo(
        experiment=name,
        hardware=hardware.key(device),
        run=store.run_name([o for o in overrides if not o.startswith(NOT_IN_RUN_NAME)]),
        title=spec.title,
        question=spec.question,
        method=spec.method,
        baseline=experiment.baseline,
        variants=dict(experiment.variants),
        points={point.name: dict(point.values) for point in experiment.points},
        metrics=dict(experiment.metrics),
        claims=tuple(experiment.claims),
        gates=tuple(findings.gates),
        samples=tuple(findings.samples),
        plots=spec.plots,
        code=spec.code,
        limits=spec.limits,
        provenance=Provenance(
            command=shlex.join(["python", "run.py", *overrides]),
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            commit=commit,
            clean=clean,
            versions=provenance.versions(),
            device=hardware.facts(device),
        ),
        config=schema.plain(config),
    )
    results, reports = root / paths.results, root / paths.reports
    written = store.write(results, Result(info, tuple(findings.rows)))
    try:
        path = report.rebuild(results, reports, only=name)[0]
    except store.StoreError as error:
        raise store.StoreError(f"measured and stored in {written}, but the report cannot be made: {error}") from error
    print(report.summary(store.read(written)))
    print(f"results  {written.with_suffix('.csv')}\nreport   {path}")
    return path
