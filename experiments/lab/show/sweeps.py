"""Sweeps: runs that differ in one key stand together, as the points of one result, with a curve over that key. And what
another experiment has measured of the same variants stands on a page: speed beside accuracy, say. It is taken from that
experiment's result when pages are made; where there is none yet, the metric is one that was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.lab.config import points
from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.metrics import Metric
from experiments.lab.show import wording
from experiments.lab.store.result import COMPLETE, Result, RunInfo, run_name, slug
from experiments.lab.store.rows import Row

PANELS = 3  # metrics that are drawn over the key


def joined(results: Sequence[Result]) -> list[Result]:
    """Results of one page: those of a sweep as one, in the place of the first, and all others as they are."""
    found: list[Result] = []
    left = list(results)
    while left:
        first, together, by = left[0], left[:1], ""
        for key in first.info.changed:
            one_a_value: dict[Any, Result] = {}
            for run in left:
                if key in run.info.changed and _rest(key, run) == _rest(key, first):
                    one_a_value.setdefault(_value(key, run.info), run)
            if len(one_a_value) > len(together):
                together, by = [*one_a_value.values()], key
        unchanged = [r for r in results if by and by not in r.info.changed and _rest(by, r) == _rest(by, first)]
        runs = [*(r for r in unchanged if _value(by, r.info) is not None), *together]
        found.append(_join(by, runs) if by else first)
        left = [r for r in left if not any(r is run for run in together)]
    return found


def _rest(key: str, result: Result) -> tuple[str, str, dict[str, str]]:
    """What runs that differ in this key at most have in common: their machine, too, since one key may have several."""
    info = result.info
    return info.hardware, info.machine, {name: value for name, value in info.changed.items() if name != key}


def _value(key: str, info: RunInfo) -> Any:
    """As a number, where it is one."""
    if key not in info.changed:
        return points.flat(info.config).get(key)
    for kind in (int, float):
        with suppress(ValueError):
            return kind(info.changed[key])
    return info.changed[key]


def _join(key: str, runs: Sequence[Result]) -> Result:
    """Each run's points, with the key's value in their names and settings. Steps and such stay on the disk."""
    pairs = [(_value(key, run.info), run) for run in runs]
    if all(isinstance(value, (int, float)) for value, _ in pairs):
        pairs.sort(key=lambda pair: float(pair[0]))
    first, (*_, rest) = pairs[0][1].info, _rest(key, pairs[-1][1])
    short = key.rpartition(".")[2].rpartition("/")[2]

    def named(value: Any, point: str) -> str:
        return f"{short}={value} {point}".strip()

    def gates(kind: str) -> tuple[Any, ...]:
        """Those of all runs, each of the points of its own."""
        return tuple(replace(gate, point=named(v, point)) for v, run in pairs for gate in getattr(run.info, kind)
                     for point in ([gate.point] if gate.point else run.info.points))  # fmt: skip

    def label(variant: str, own: str) -> str:
        """Without what differs between the runs, which stands in the names of points."""
        alike = all(run.info.variants.get(variant, own) == own for run in runs)
        return own if alike else own.rpartition(" (")[0] or own

    metrics = [name for name in first.metrics if all(name in run.info.metrics for run in runs)]
    drawn = list(dict.fromkeys([*(claim.metric for claim in first.claims if claim.metric in metrics), *metrics]))
    panels = tuple(PanelSpec(metric, PanelKind.lines, x=key, x_label=short) for metric in drawn[:PANELS])
    info = replace(
        first,
        run=",".join([f"sweep-{slug(short)}", *([run_name(rest)] if rest else [])]),
        variants={variant: label(variant, own) for variant, own in first.variants.items()},
        points={named(v, point): {**at, key: v} for v, run in pairs for point, at in run.info.points.items()},
        metrics={name: first.metrics[name] for name in metrics},
        claims=(),
        gates=gates("gates"),
        error_gates=gates("error_gates"),
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
    at: dict[str, Any] = field(default_factory=dict)  # what a point of the other experiment says
    variants: dict[str, str] = field(default_factory=dict)  # of this page -> of the other experiment


def with_beside(results: Sequence[Result]) -> list[Result]:
    """Each result with what its experiment wants beside it, at its first point."""
    found = []
    for result in results:
        for asked in result.info.config.get("experiment", {}).get("beside") or ():
            wanted, info = Beside(**asked), result.info
            there = (r for r in results if r.info.experiment == wanted.experiment and r.info.status == COMPLETE)
            other = next((r for r in there if wanted.metric in r.info.metrics), None)
            if other is None:
                continue
            theirs = other.info.metrics[wanted.metric]
            at = [name for name, point in other.info.points.items() if wanted.at.items() <= point.items()]
            rows = [
                Row(own, next(iter(info.points)), repeat, wanted.name, value, theirs.unit, process=process)
                for own, their in wanted.variants.items()
                for point in at[:1]
                for (process, repeat), value in other.values(their, point, wanted.metric).items()
            ]
            if rows:
                where = other.info.hardware
                if where == info.hardware and other.info.machine != info.machine:
                    where = wording.machine(other.info)
                metric = Metric(f"{wanted.label}, on {where}", theirs.unit, theirs.better)
                info = replace(info, metrics={**info.metrics, wanted.name: metric})
                result = replace(result, info=info, rows=(*result.rows, *rows))
        found.append(result)
    return found
