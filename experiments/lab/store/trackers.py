"""Trackers: what a finished run hands to an experiment tracker. Nothing is tracked while something is measured, and
whatever goes wrong here is one line on stderr: the measurement is stored by then, and stays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from experiments.lab import sweep
from experiments.lab.judge import claims, stats
from experiments.lab.schema import TrackerKind, TrackerSettings
from experiments.lab.show import wording
from experiments.lab.store.result import Result, RunInfo, page_name
from experiments.lab.store.rows import Row, Table

Values = Mapping[str, "float | int | str"]
NOT_SERIES = ("variant", "point", "preempted", "finished")  # columns of a step that are no numbers


class Tracker(Protocol):
    """One run at a time: start, then anything in any order, then finish."""

    def start(self, name: str, group: str, job: str, config: Mapping[str, Any], tags: Sequence[str]) -> None:
        """Runs of one `group` belong together; `job` is the experiment."""
        ...

    def series(self, name: str, x: str, rows: Iterable[Values]) -> None:
        """Curves of all columns of `rows` over the column `x`."""
        ...

    def summary(self, values: Values) -> None: ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def figure(self, name: str, path: Path) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> str:
        """After the last run. Says where to find them."""
        ...


@dataclass(frozen=True)
class Grouping:
    """How the runs of one result are named and found again."""

    group: str
    tags: tuple[str, ...]

    @classmethod
    def of(cls, info: RunInfo, sweep: str | None) -> Grouping:
        group = page_name(info) if sweep is None else f"{page_name(info)}, sweep {sweep}"
        return cls(group, (info.experiment, info.hardware, *([sweep] if sweep else [])))


def track(result: Result, figures: Sequence[Path], settings: TrackerSettings, root: Path) -> None:
    """Hands a finished, stored and reported run to the tracker of `settings`. Never raises an Exception.

    Args:
        figures: PNG files of the report.
        root: where a relative settings.folder starts.
    """
    if settings.kind is TrackerKind.none:
        return
    try:
        tracker = _open(settings, root)
        log(tracker, result, figures, Grouping.of(result.info, sweep.name()))
        print(f"tracker  {tracker.close()}")
    except (Exception, SystemExit) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"tracker: {reason}. Results and report are stored all the same", file=sys.stderr)


def _open(settings: TrackerSettings, root: Path) -> Tracker:
    from experiments.lab.store.wandb_tracker import WandbTracker

    return WandbTracker(settings, root)


def log(tracker: Tracker, result: Result, figures: Sequence[Path], grouping: Grouping) -> None:
    """One run for each variant, so that charts lay their curves over each other, and one with tables and figures."""
    info = result.info
    about = {
        "experiment": info.experiment,
        "hardware": info.hardware,
        "run": info.run,
        "commit": info.provenance.commit,
        "device": info.provenance.device,
        "versions": info.provenance.versions,
        "config": info.config,
    }
    run = "" if info.run == "default" else f", {info.run}"
    for variant, label in info.variants.items():
        tracker.start(label + run, grouping.group, info.experiment, {**about, "variant": variant}, grouping.tags)
        try:
            tracker.summary(_medians(result, variant))
            for name, x, rows in _point_series(result, variant):
                tracker.series(name, x, rows)
            for point in dict.fromkeys(row.point for row in result.steps if row.variant == variant):
                steps = [row for row in result.steps if (row.variant, row.point) == (variant, point)]
                columns = [c for c in asdict(steps[0]) if c not in NOT_SERIES]
                name = f"steps {point}".strip()
                tracker.series(name, "start_s", ({c: getattr(row, c) for c in columns} for row in steps))
        finally:
            tracker.finish()
    tracker.start("report" + run, grouping.group, info.experiment, about, grouping.tags)
    try:
        tracker.table("medians", *_median_table(result))
        tracker.table("claims", *_claim_table(result))
        tracker.table("values", list(asdict(result.rows[0])) if result.rows else [], _values(result.rows))
        prefix = f"{page_name(info)}-{info.hardware}-" + ("" if info.run == "default" else f"{info.run}-")
        for path in figures:
            tracker.figure(path.stem.removeprefix(prefix), path)
    finally:
        tracker.finish()


def _medians(result: Result, variant: str) -> dict[str, float]:
    table = Table(result.rows)
    found = {}
    for metric in result.info.metrics:
        for point in result.info.points:
            values = table.values(variant, point, metric)
            if values:
                found[f"{metric} {point}".strip()] = stats.median(list(values.values()))
    return found


def _point_series(result: Result, variant: str) -> list[tuple[str, str, list[Values]]]:
    """(name, x, rows) of the metrics over the numeric setting with the most values; the other settings, where they
    vary too, split the curves."""
    points = result.info.points
    numbers: dict[str, set[Any]] = {}
    for settings in points.values():
        for key, value in settings.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers.setdefault(key, set()).add(value)
    table = Table(result.rows)
    curves: dict[tuple[str, str], list[Values]] = {}
    for point, settings in points.items():
        keys = [key for key in settings if len(numbers.get(key, ())) > 1]
        if not keys:
            continue
        x = max(keys, key=lambda key: len(numbers[key]))
        others = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key != x)
        row: dict[str, float] = {x: settings[x]}
        for metric in result.info.metrics:
            values = table.values(variant, point, metric)
            if values:
                estimate = stats.absolute(values, result.info.metrics[metric].share)
                row[metric] = estimate.median
                if estimate.low is not None and estimate.high is not None:
                    row |= {f"{metric} low": estimate.low, f"{metric} high": estimate.high}
        if len(row) > 1:
            curves.setdefault((f"points {others}".strip(), x), []).append(row)
    return [(name, x, sorted(rows, key=lambda row: row[x])) for (name, x), rows in curves.items()]


def _median_table(result: Result) -> tuple[list[str], list[list[Any]]]:
    info, table = result.info, Table(result.rows)
    rows = []
    for metric, about in info.metrics.items():
        for point in info.points:
            reference = table.values(str(info.baseline), point, metric)
            for variant, label in info.variants.items():
                values = table.values(variant, point, metric)
                if not values:
                    continue
                e = stats.absolute(values, about.share)
                ratio = stats.ratio(values, reference)
                gated = any(gate.covers(variant, point) for gate in info.every_gate)
                rows.append([metric, point, label, e.median, e.low, e.high, e.n, about.unit,
                             None if ratio is None else ratio.median,
                             None if not gated else "failed" if info.fails(variant, point) else "passed"])  # fmt: skip
    columns = ["metric", "point", "variant", "median", "low", "high", "n", "unit", "ratio to baseline", "gate"]
    return columns, rows


def _claim_table(result: Result) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for claim in result.info.claims:
        judged = claims.judge(claim, result.rows, result.info.every_gate, result.info.metrics[claim.metric].share)
        rows.append(
            [
                wording.claim(claim, result.info),
                judged.verdict.value,
                wording.measured(judged, result.info),
                judged.reason,
                claim.source,
            ]
        )
    return ["claim", "verdict", "measured", "why", "source"], rows


def _values(rows: Sequence[Row]) -> list[list[Any]]:
    return [[v.value if isinstance(v, Enum) else v for v in asdict(row).values()] for row in rows]
