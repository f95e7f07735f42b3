"""What another experiment has measured of the same variants, on a page: speed beside accuracy, say.

It is taken from that experiment's result when pages are made, so it is as new as that; where there is none yet, the
metric is not on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.lab.judge.metrics import Metric
from experiments.lab.store.result import COMPLETE, Result
from experiments.lab.store.rows import Row


@dataclass(frozen=True)
class Beside:
    # name, label: of the metric on this page.
    name: str
    label: str
    experiment: str
    metric: str
    # What a point of the other experiment says, of its settings or of a named point.
    at: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)  # of this page -> of the other experiment


def joined(results: Sequence[Result]) -> list[Result]:
    """Each result with what its experiment wants beside it, at its first point."""
    return [_with(result, results) for result in results]


def _with(result: Result, results: Sequence[Result]) -> Result:
    for asked in result.info.config.get("experiment", {}).get("beside") or ():
        wanted = Beside(**asked)
        others = (r for r in results if r.info.experiment == wanted.experiment and r.info.status == COMPLETE)
        other = next((r for r in others if wanted.metric in r.info.metrics), None)
        result = _without(result, wanted.name) if other is None else _taken(result, other, wanted)
    return result


def _without(result: Result, metric: str) -> Result:
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
