"""One run from config to report: build, measure, store, report, tell the tracker."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.lab import sweep
from experiments.lab.config import schema, typed
from experiments.lab.experiment import Experiment, Findings, IncompleteRun
from experiments.lab.measure import ceilings, hardware, processes
from experiments.lab.show import report
from experiments.lab.show.progress import Steps
from experiments.lab.store import provenance, resume, rows, trackers
from experiments.lab.store import result as store
from experiments.lab.store.runs import exclusive
from mini_infer.core.errors import ConfigError, MiniInferError

CEILINGS = "ceilings"
LONGEST_NAME = 160  # of a run; file systems take 255 bytes with the endings


def execute(config: DictConfig, name: str, overrides: Sequence[str], root: Path) -> Path:
    """Runs the experiment `name` and returns the path of its report. Relative paths of the config start at `root`.

    Raises IncompleteRun where an error has stopped it, or its place could not be written, with what is kept; and
    KeyboardInterrupt where the user has, after what was finished is stored and reported."""
    settled = typed.settle(config, name, overrides)
    config = settled.config
    experiment: Experiment = schema.experiment_class(config).from_config(config)
    paths = experiment.paths
    run = paths.run or store.run_name(settled.changed)
    if len(run) > LONGEST_NAME or "/" in run:
        raise ConfigError(f"the run would be called {run!r}: choose a shorter name with paths.run=NAME")
    settings, on_gpu = experiment.settings, hardware.resolve(experiment.device) == "cuda"
    for setting, chosen, why in (
        ("measure.gates=false", experiment.generates and not settings.gates,
         "generates tokens, and none of an engine that no gate has checked are recorded"),
        ("measure.aa=never", on_gpu and settings.aa is schema.Again.never,
         "is measured on a GPU, where what is recorded has its baseline a second time"),
    ):  # fmt: skip
        if paths.recorded and chosen:
            raise ConfigError(f"{setting}: {name} {why}: leave it out, or for a trial --record")
    tracker = schema.build(schema.TrackerSettings, config.tracker, "tracker")
    commit, clean = provenance.commit(root), provenance.is_clean(root)  # of the code that is about to run
    started, clock = datetime.now(timezone.utc), time.monotonic()
    results, reports = root / paths.results, root / paths.reports
    own = store.place(name, settled.axes.scale, settled.axes.via, experiment.hardware_key, run)
    if name == CEILINGS and paths.run is None:  # which others' floors are taken from: no machine replaces another's
        run = ceilings.run_of(results / f"{own}.json", hardware.name(hardware.resolve(experiment.device)))
        own = own.with_name(run)
    earlier = resume.find(results / own, _stated(settled), experiment, clean, root) if paths.resume else None

    def result_of(findings: Findings) -> store.Result:
        origin = store.Provenance(
            command=_command(overrides, paths),
            started=started.isoformat(timespec="seconds"),
            seconds=max(time.monotonic() - clock, sum(process.seconds for process in findings.processes)),
            commit=commit,
            clean=clean,
            versions=provenance.versions(),
            device=hardware.facts(hardware.resolve(experiment.device)) | {"torch_threads": experiment.threads},
        )
        return _result(experiment, findings, name, run, origin, settled)

    if earlier is not None and len(earlier.processes) == experiment.settings.processes:
        print(f"--resume: {own} has all processes: nothing is measured, and it stays as it is", file=sys.stderr)
        return reports / f"{store.page_name(result_of(earlier).info)}.md"

    def keep(so_far: Findings) -> None:
        """Until the next process is there, for `--resume`, also where nobody is left to store it."""
        try:
            with exclusive(results):
                store.write_run(results, result_of(so_far))
        except (store.StoreError, OSError) as problem:
            print(f"what was measured so far is not kept for --resume: {problem}", file=sys.stderr)

    try:
        with Steps(name) as steps:
            findings = processes.measure(config, steps, (*settled.notes, *sweep.notes()), earlier, keep)
    except KeyboardInterrupt:
        again = f"The same again: {_command(overrides, paths)}\nA quick look first: add measure.processes=1"
        long = f"measure.repeats=1; `python run.py show {name}` says how long a run takes"
        pace = f"{steps.pace and '; of the first one '}{steps.pace}"
        print(f"nothing was finished, so nothing is stored{pace}. {again} {long}", file=sys.stderr)
        raise
    experiment.finish(findings)
    result = result_of(findings)
    written = _store(results, result)
    try:
        with exclusive(results):
            path = report.rebuild(results, reports, only=store.page_name(result.info))[0]
    except (store.StoreError, OSError) as problem:
        stored_all = f"measured and stored in {written}, but the report cannot be made: {problem}"
        raise IncompleteRun(f"{stored_all}. `python run.py report` makes it again") from problem
    stored = store.read(written)
    print(report.summary(stored))
    print(f"results  {written.with_suffix('.csv')}\nreport   {path}")
    trackers.track(stored, report.figure_paths(reports, stored), tracker, root)
    if (error := findings.error) is None:
        return path
    message = f"{findings.status}, in {written}"  # after what it had is safe
    message += "; with --resume it goes on from there" if any(about.complete for about in findings.processes) else ""
    if isinstance(error, KeyboardInterrupt):
        print(". ".join(filter(None, [message, steps.pace])), file=sys.stderr)
        raise KeyboardInterrupt from error  # which ends a sweep, too
    if not isinstance(error, MiniInferError):
        traceback.print_exception(error)
    raise IncompleteRun(message) from error


def _result(
    experiment: Experiment, findings: Findings, name: str, run: str, origin: store.Provenance, settled: typed.Settled
) -> store.Result:
    spec, axes = experiment.spec, settled.axes
    found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(findings).items()}
    same = {f.name: found[f.name] for f in fields(store.RunInfo) if f.name in found.keys() - {"points", "ceilings"}}
    said = {key: getattr(spec, key) for key in ("question", "plots", "limits", "original", "target", "bounded_by")}
    info = store.RunInfo(
        experiment=name,
        hardware=experiment.hardware_key,
        run=run,
        title=", ".join(filter(None, [spec.title, " ".join(filter(None, [axes.model, axes.title]))])),
        method=" ".join(filter(None, [axes.procedure, spec.method, axes.method])),
        baseline=experiment.baseline,
        variants=dict(experiment.variants),
        points={point.name: dict(point.values) for point in findings.points or experiment.points},
        metrics=dict(experiment.metrics),
        claims=tuple(experiment.claims),
        code=tuple(dict.fromkeys((*spec.code, *axes.code))),
        provenance=origin,
        config=_stated(settled),
        ceilings=None if findings.ceilings is None else asdict(findings.ceilings),
        scale=axes.scale,
        via=axes.via,
        default_scale=settled.default_scale,
        changed=dict(settled.changed),
        aa=experiment.aa,
        **said,
        **same,
    )
    return store.Result(info, **{name: found[name] for name, _ in store.TABLES.values()})


def _stated(settled: typed.Settled) -> dict[str, Any]:
    return {key: value for key, value in schema.plain(settled.config).items() if key not in typed.INTERNAL}


def _command(overrides: Sequence[str], paths: schema.Paths) -> str:
    """What to type to get the same again."""
    left_out = ("paths.resume", *(schema.RECORDED if paths.recorded else ()))
    given = [o for o in overrides if o.partition("=")[0] not in left_out]
    return shlex.join(["python", "run.py", *given, *(["--record"] if paths.recorded else [])])


def _store(results: Path, result: store.Result) -> Path:
    """Its JSON's path. What cannot be written there goes to a temporary folder, or else to the terminal."""
    folder = results / store.run_path(result.info).parent
    try:
        with exclusive(results):
            return store.write_run(results, result)
    except (store.StoreError, OSError) as error:
        problem = str(error)
    try:
        kept = store.write(Path(tempfile.mkdtemp(prefix="mini-infer-results-")), result)
    except (store.StoreError, OSError) as error:
        print(rows.to_csv(rows.Row, result.rows))
        raise IncompleteRun(f"{problem}; nor to another folder ({error}). The rows stand above, on stdout") from error
    mend = f"move its files to {folder} once it can be written, and run `python run.py report`"
    raise IncompleteRun(f"{problem}. What was measured is kept in {kept.parent}: {mend}")
