"""What a finished run hands to Weights & Biases. Nothing is tracked while something is measured, and whatever goes
wrong here is one line on stderr: the measurement is stored by then, and stays. Runs are written to files first and
those are sent then, so that a missing login, a network that fails in the middle or a server that does not answer cost
nothing but a later `wandb sync`, and nobody is prompted."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.lab import sweep
from experiments.lab.config.schema import TrackerKind, TrackerSettings
from experiments.lab.show import wording
from experiments.lab.store.result import Result, page_name

SYNC_S = 120.0  # that sending the runs may take
NOT_SERIES = ("variant", "point", "preempted", "finished")  # columns of a step that are no numbers
Values = dict[str, Any]
Medians = Mapping[tuple[str, str, str], Values]  # by variant, point and metric


def track(result: Result, figures: Sequence[Path], settings: TrackerSettings, root: Path) -> None:
    """Hands a stored run with its PNGs to the tracker, whose folder may start at `root`. Never raises an Exception."""
    if settings.kind is TrackerKind.none:
        return
    try:
        folder = root / settings.folder
        written = _write(result, figures, settings, folder)
        print(f"tracker  {len(written)} W&B runs in {folder / 'wandb'}{_sent(written, settings)}")
    except (Exception, SystemExit) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"tracker: {reason}. Results and report are stored all the same", file=sys.stderr)


def _write(result: Result, figures: Sequence[Path], settings: TrackerSettings, folder: Path) -> list[str]:
    """One run a variant, so that charts lay curves over each other, and one with tables and figures. Their folders."""
    try:
        import wandb  # only who asks for it waits for it
    except ImportError as error:
        raise RuntimeError(f"the package wandb cannot be imported ({error}): pip install wandb") from error
    folder.mkdir(parents=True, exist_ok=True)  # else wandb falls back to the system's temporary folder
    info, page, swept, written = result.info, page_name(result.info), sweep.name(), list[str]()
    run_name = "" if info.run == "default" else f", {info.run}"
    about = {key: getattr(info, key) for key in ("experiment", "hardware", "run", "config")}
    about |= {key: getattr(info.provenance, key) for key in ("commit", "device", "versions")}

    def started(name: str, **more: str) -> Any:
        run = wandb.init(
            project=settings.project,
            dir=str(folder),
            name=name + run_name,
            group=f"{page}, sweep {swept}" if swept else page,
            job_type=info.experiment,
            config={**about, **more},
            tags=[tag[:64] for tag in (info.experiment, info.hardware, swept) if tag],  # wandb's limit
            settings=wandb.Settings(mode="offline", silent=True, console="off", save_code=False, x_disable_stats=True),
        )
        written.append(str(run.settings.sync_dir))
        return run

    medians = _medians(result)
    for variant, label in info.variants.items():
        with started(label, variant=variant) as run:
            own = {f"{metric} {at}".strip(): row["median"] for (v, at, metric), row in medians.items() if v == variant}
            run.summary.update(own)
            curves = _over_points(result, variant, medians)
            for point in dict.fromkeys(step.point for step in result.steps if step.variant == variant):
                steps = [asdict(step).items() for step in result.steps_of(variant, point)]
                rows = [{column: value for column, value in step if column not in NOT_SERIES} for step in steps]
                curves.append((f"steps {point}".strip(), "start_s", rows))
            for name, x, rows in curves:
                run.define_metric(f"{name}/*", step_metric=f"{name}/{x}")
                for row in rows:
                    run.log({f"{name}/{column}": value for column, value in row.items()})
    claims: list[Values] = [wording.of_claim(judged, info)._asdict() for judged in result.judgements]
    with started("report") as run:
        tables = {"medians": list(medians.values()), "claims": claims, "values": [*map(asdict, result.rows)]}
        for name, rows in tables.items():
            data = [list(row.values()) for row in rows]
            run.log({name: wandb.Table(columns=[*(rows[0] if rows else ())], data=data, allow_mixed_types=True)})
        for path in figures:
            shown = path.stem.removeprefix(f"{page}-{info.hardware}-").removeprefix(f"{info.run}-")
            run.log({f"figures/{shown}": wandb.Image(str(path))})
    return written


def _sent(written: Sequence[str], settings: TrackerSettings) -> str:
    """Whether they were sent; wandb itself would try again for ever."""
    later = f"; send them with: wandb sync {' '.join(written)}"
    if not settings.sync:
        return later
    command = [sys.executable, "-m", "wandb", "sync", *written]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SYNC_S)
        if done.returncode == 0:
            return ", sent to W&B"
        lines = f"wandb sync failed\n{done.stdout}\n{done.stderr}".strip().splitlines()
        errors = [line for line in map(str.strip, lines) if line.startswith("Error:")]
        reason = (errors or lines)[-1].removeprefix("Error:").strip().rstrip(".")
    except subprocess.TimeoutExpired:
        reason = f"no answer within {SYNC_S:g} s"
    except OSError as error:
        reason = str(error)
    return f" could not be sent ({reason}){later}"


def _medians(result: Result) -> Medians:
    info, found = result.info, {}
    for metric, (variant, point) in itertools.product(info.metrics, info.cells):
        if e := result.estimate(variant, point, metric):
            ratio = result.ratio((variant, point), (str(info.baseline), point), metric)
            gated = any(gate.covers(variant, point) for gate in info.every_gate)
            found[variant, point, metric] = {
                "metric": metric,
                "point": point,
                "variant": info.variants[variant],
                **{name: getattr(e, name) for name in ("median", "low", "high", "n")},
                "unit": info.metrics[metric].unit,
                "ratio to baseline": ratio and ratio.median,
                "gate": ("failed" if info.fails(variant, point) else "passed") if gated else None,
            }
    return found


def _over_points(result: Result, variant: str, medians: Medians) -> list[tuple[str, str, list[Values]]]:
    """(name, x, rows) of the metrics over the numeric setting with most values; other settings split the curves."""
    points = result.info.points
    numbers = {pair for at in points.values() for pair in at.items() if wording.is_number(pair[1])}
    values = Counter(key for key, _ in numbers)
    curves: dict[tuple[str, str], list[Values]] = {}
    for point, at in points.items():
        x = max(at, key=values.__getitem__, default="")
        if values[x] < 2:
            continue
        row = {x: at[x]}
        for metric in result.info.metrics:
            found = medians.get((variant, point, metric), {})
            ends = {f"{metric} {end}": found[end] for end in ("low", "high") if found.get(end) is not None}
            row |= {metric: found["median"], **ends} if found else {}
        if len(row) > 1:
            curves.setdefault((f"points {wording.others(at, x)}".strip(), x), []).append(row)
    return [(name, x, sorted(rows, key=lambda row: row[x])) for (name, x), rows in curves.items()]
