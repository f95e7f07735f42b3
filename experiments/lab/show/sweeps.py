"""Sweeps: runs that differ in one key stand together, as the points of one result, with a curve over that key. And what
another experiment has measured of the same variants stands on a page: speed beside accuracy, say. It is taken from that
experiment's result when pages are made; where there is none yet, the metric is not on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.lab.judge.metrics import Metric
from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store.result import COMPLETE, Result, RunInfo, run_name, slug
from experiments.lab.store.rows import Row

PANELS = 3  # metrics that are drawn over the key


def joined(results: Sequence[Result]) -> list[Result]:
    """Results of one page: those of a sweep as one, in the place of the first, and all others as they are."""
    found: list[Result] = []
    left = list(results)
    while left:
        first = left[0]
        alike = {key: _alike(key, first, results) for key in first.info.changed}
        sweeps = {
            key: _one_a_value(key, [r for r in left if key in r.info.changed and any(r is run for run in runs)])
            for key, runs in alike.items()
        }
        key = max(sweeps, key=lambda name: len(sweeps[name]), default="")
        together = sweeps.get(key, [])
        if len(together) < 2:
            together = [first]
            found.append(first)
        else:
            unchanged = [r for r in alike[key] if key not in r.info.changed and _value(key, r.info) is not None]
            found.append(_join(key, [*unchanged, *together]))
        left = [r for r in left if not any(r is run for run in together)]
    return found


def _one_a_value(key: str, runs: Sequence[Result]) -> list[Result]:
    """The first of those that differ in nothing that has a key."""
    found: dict[Any, Result] = {}
    for run in runs:
        found.setdefault(_value(key, run.info), run)
    return [*found.values()]


def _alike(key: str, result: Result, results: Sequence[Result]) -> list[Result]:
    """The runs on the same machine that differ from `result` in this key at most."""
    rest = _without(key, result.info)
    return [r for r in results if r.info.hardware == result.info.hardware and _without(key, r.info) == rest]


def _without(key: str, info: RunInfo) -> dict[str, str]:
    return {name: value for name, value in info.changed.items() if name != key}


def _value(key: str, info: RunInfo) -> Any:
    """As a number, where it is one."""
    if key in info.changed:
        text = info.changed[key]
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text
    node: Any = info.config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _join(key: str, runs: Sequence[Result]) -> Result:
    """Each run's points, with the key's value in their names and settings. Steps and such stay on the disk."""
    pairs = [(_value(key, run.info), run) for run in runs]
    if all(isinstance(value, (int, float)) for value, _ in pairs):
        pairs.sort(key=lambda pair: float(pair[0]))
    first, rest = pairs[0][1].info, _without(key, pairs[-1][1].info)
    short = key.rpartition(".")[2].rpartition("/")[2]

    def named(value: Any, point: str) -> str:
        return f"{short}={value} {point}".strip()

    def gates(of: Callable[[RunInfo], Sequence[Any]]) -> tuple[Any, ...]:
        """Those of all runs, each of the points of its own."""
        found = [(v, run, gate) for v, run in pairs for gate in of(run.info)]
        return tuple(
            replace(gate, point=named(v, point))
            for v, run, gate in found
            for point in ([gate.point] if gate.point else run.info.points)
        )

    def label(variant: str, own: str) -> str:
        """Without what differs between the runs, which stands in the names of points."""
        every = {run.info.variants.get(variant, own) for _, run in pairs}
        return own if len(every) == 1 else own.rpartition(" (")[0] or own

    metrics = [name for name in first.metrics if all(name in run.info.metrics for _, run in pairs)]
    drawn = list(dict.fromkeys([*(claim.metric for claim in first.claims if claim.metric in metrics), *metrics]))
    panels = tuple(PanelSpec(metric, PanelKind.lines, x=key, x_label=short) for metric in drawn[:PANELS])
    info = replace(
        first,
        run=",".join([f"sweep-{slug(short)}", *([run_name(rest)] if rest else [])]),
        variants={variant: label(variant, own) for variant, own in first.variants.items()},
        points={named(v, point): {**at, key: v} for v, run in pairs for point, at in run.info.points.items()},
        metrics={name: first.metrics[name] for name in metrics},
        claims=(),
        gates=gates(lambda info: info.gates),
        error_gates=gates(lambda info: info.error_gates),
        status=next((run.info.status for _, run in pairs if run.info.status != COMPLETE), COMPLETE),
        samples=(),
        plots=(PlotSpec(f"over-{slug(short)}", f"Over {short}", panels),),
        profiles=(),
        notes=tuple(dict.fromkeys(note for _, run in pairs for note in run.info.notes)),
    )
    rows = [replace(r, point=named(v, r.point)) for v, run in pairs for r in run.rows if r.metric in metrics]
    return Result(info, tuple(rows), runs=tuple(run.info for _, run in pairs))


@dataclass(frozen=True)
class Beside:
    name: str  # of the metric on this page
    label: str  # likewise
    experiment: str
    metric: str
    # What a point of the other experiment says, of its settings or of a named point.
    at: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)  # of this page -> of the other experiment


def with_beside(results: Sequence[Result]) -> list[Result]:
    """Each result with what its experiment wants beside it, at its first point."""
    found = []
    for result in results:
        for asked in result.info.config.get("experiment", {}).get("beside") or ():
            wanted = Beside(**asked)
            others = (r for r in results if r.info.experiment == wanted.experiment and r.info.status == COMPLETE)
            other = next((r for r in others if wanted.metric in r.info.metrics), None)
            result = _lacking(result, wanted.name) if other is None else _taken(result, other, wanted)
        found.append(result)
    return found


def _lacking(result: Result, metric: str) -> Result:
    """Panels of what is not there are not drawn."""
    kept = (
        replace(plot, panels=tuple(panel for panel in plot.panels if metric not in (panel.metric, panel.x)))
        for plot in result.info.plots
    )
    return replace(result, info=replace(result.info, plots=tuple(plot for plot in kept if plot.panels)))


def _taken(result: Result, other: Result, wanted: Beside) -> Result:
    first, theirs = next(iter(result.info.points)), other.info.metrics[wanted.metric]
    at = [name for name, point in other.info.points.items() if wanted.at.items() <= point.items()]
    rows = [
        Row(own, first, repeat, wanted.name, value, theirs.unit, process=process)
        for own, their in wanted.variants.items()
        for point in at[:1]
        for (process, repeat), value in other.table.values(their, point, wanted.metric).items()
    ]
    metric = Metric(f"{wanted.label}, on {other.info.hardware}", theirs.unit, theirs.better)
    info = replace(result.info, metrics={**result.info.metrics, wanted.name: metric})
    return replace(result, info=info, rows=(*result.rows, *rows)) if rows else result
