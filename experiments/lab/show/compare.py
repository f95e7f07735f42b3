"""Two runs of one experiment side by side: two commits, two machines, two settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.lab.judge import stats
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.show import wording
from experiments.lab.show.grids import INVALID, MISSING, SCREEN, Grid, metric_title
from experiments.lab.store import result as store
from experiments.lab.store.result import COMPLETE, Result, StoreError
from experiments.lab.store.rows import Table, Turn

SPEED = ("s", "ms", "us", "ns")  # units, and any rate a second: faster or slower; of others: better or worse
NONE_SHOWN = "no difference shown"
OTHER_MACHINE = "Measured on DIFFERENT MACHINES: faster and slower below are the machines' as much as the code's."
FOOTNOTE = """\
B/A is the ratio of the medians with a 95 % interval (Welch). The runs were not interleaved, so a drift of the machine
between them counts in full. Of rows without any difference, about one in twenty shows one by chance."""


def compare(a: Path, b: Path, revision: str = "") -> str:
    """The comparison as text. Raises StoreError where it makes no sense.

    Args:
        revision: of git, at which `a` was what is compared.
    """
    first, second = store.read(a), store.read(b)
    if a.resolve() == b.resolve():
        raise StoreError(f"A and B are the same result, {a}")
    if first.info.experiment != second.info.experiment:
        names = f"A is a run of {first.info.experiment} and B of {second.info.experiment}"
        raise StoreError(f"{names}: compare two runs of one experiment")
    verdicts: Counter[str] = Counter()
    grids = [grid for name in first.info.metrics for grid in _grids(first, second, name, verdicts)]
    if not grids:
        raise StoreError("A and B have no variant, point and metric in common: there is nothing to compare")
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    parts = [
        f"{first.info.experiment}: {first.info.title}",
        "\n".join([_origin("A", f"{b} at {revision}" if revision else a, first), _origin("B", b, second)]),
        *([OTHER_MACHINE] if wording.device(first.info) != wording.device(second.info) else []),
        *(grid.text() for grid in grids),
        f"{sum(verdicts.values())} rows: {counted}.\n{FOOTNOTE}",
        *_left_out(first, second),
        "\n".join(["What differs beside the numbers (A -> B):", *_differences(first, second)]),
    ]
    return "\n\n".join(parts)


def _origin(name: str, path: Path | str, result: Result) -> str:
    origin = result.info.provenance
    status = "" if result.info.status == COMPLETE else f"; {result.info.status.upper()}"
    lines = [f"{name}  {path}", f"   {origin.started}, {wording.commit(origin)}{status}"]
    return "\n".join([*lines, f"   {wording.device(result.info)}"])


def _grids(a: Result, b: Result, metric: str, verdicts: Counter[str]) -> list[Grid]:
    """One table; where that is too wide for a screen, one a point."""
    info = a.info
    if metric not in b.info.metrics or info.metrics[metric].unit != b.info.metrics[metric].unit:
        return []
    rows: dict[str, list[tuple[str, ...]]] = {}
    for point in (point for point in info.points if point in b.info.points):
        for variant in (variant for variant in info.variants if variant in b.info.variants):
            cells = _cells(a, b, variant, point, metric)
            if cells is not None:
                rows.setdefault(point, []).append((info.variants[variant], *cells))
                verdicts[cells[-1]] += 1
    title, header = metric_title(info.metrics[metric]), ("", "A", "B", "B/A", "")
    joined = tuple((f"{line[0]} {point}".strip(), *line[1:]) for point, lines in rows.items() for line in lines)
    grid = Grid(title, header, joined)
    if not joined or grid.width <= SCREEN:
        return [grid] if joined else []
    return [Grid(f"{title} at {point}", header, tuple(lines)) for point, lines in rows.items()]


def _cells(a: Result, b: Result, variant: str, point: str, metric: str) -> tuple[str, str, str, str] | None:
    """Median of A, of B, their ratio, and the verdict; None where neither has a row."""
    values = [Table(r.rows).values(variant, point, metric) for r in (a, b)]
    shown = [_value(r, own, variant, point, metric) for r, own in zip((a, b), values, strict=True)]
    if MISSING in shown:
        return None
    problem = next((f"{text} in {name}" for text, name in zip(shown, "AB", strict=True) if text == INVALID), "")
    failed = [name for name, r in (("A", a), ("B", b)) if r.info.fails(variant, point)]
    if problem or failed:
        return shown[0], shown[1], MISSING, problem or f"gate FAILED in {failed[0]}"
    theirs, ours = (list(own.values()) for own in values)
    if set(ours) == set(theirs) and len(set(ours)) == 1:
        return shown[0], shown[1], "1" if ours[0] else MISSING, "the same"
    if min(*ours, *theirs) <= 0:
        return shown[0], shown[1], MISSING, "no ratio to 0"
    found = stats.apart(values[1], values[0])
    return shown[0], shown[1], wording.interval(found, "x"), _verdict(found, a.info.metrics[metric])


def _value(result: Result, values: Mapping[Turn, float], variant: str, point: str, metric: str) -> str:
    if values:
        return wording.interval(stats.absolute(values, result.info.metrics[metric].share))
    tried = any((row.variant, row.point, row.metric) == (variant, point, metric) for row in result.rows)
    return INVALID if tried else MISSING


def _verdict(found: stats.Estimate, metric: Metric) -> str:
    if found.low is None or found.high is None:
        return "one repeat"
    if found.low <= 1 <= found.high:
        return NONE_SHOWN
    improved = (found.low > 1) == (metric.better is Better.higher)
    if metric.unit in SPEED or metric.unit.endswith("/s"):
        return "B faster" if improved else "B slower"
    return "B better" if improved else "B worse"


def _left_out(a: Result, b: Result) -> list[str]:
    """What only one of the two has."""
    lines = []
    for what in ("variants", "points", "metrics"):
        for name, ours, theirs in (("A", a, b), ("B", b, a)):
            only = [key or "(one point)" for key in getattr(ours.info, what) if key not in getattr(theirs.info, what)]
            if only:
                lines.append(f"Only in {name}, {what}: {', '.join(only)}")
    return ["\n".join(lines)] if lines else []


def _differences(a: Result, b: Result) -> list[str]:
    """Config, device and versions, key by key."""
    every = []
    for result in (a, b):
        origin = result.info.provenance
        config = {key: value for key, value in result.info.config.items() if key != "paths"}
        every.append(_flat({**config, "device": origin.device, "versions": origin.versions}))
    first, second = every
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key, MISSING) != second.get(key, MISSING)]
    lines = [f"  {key}: {_shown(first.get(key, MISSING))} -> {_shown(second.get(key, MISSING))}" for key in keys]
    return lines or ["  nothing"]


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{key}.{name}" if key else str(name))
    return found


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
