"""Sweeps: runs that differ in one key stand together, as the points of one result, with a curve over that key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store.result import Result, RunInfo, run_name, slug

PANELS = 3  # metrics that are drawn over the key


def joined(results: Sequence[Result]) -> list[Result]:
    """Results of one page: those of a sweep as one, in the place of the first, and all others as they are."""
    found: list[Result] = []
    seen: set[int] = set()
    for index, result in enumerate(results):
        if index in seen:
            continue
        sweeps = {key: _beside(key, result, results) for key in result.info.changed}
        key = max(sweeps, key=lambda name: len(sweeps[name]), default="")
        if not key or len(sweeps[key]) < 2:
            found.append(result)
            continue
        seen |= {index for index, other in enumerate(results) if any(other is run for run in sweeps[key])}
        found.append(_join(key, [*_unchanged(key, result, results), *sweeps[key]]))
    return found


def _beside(key: str, result: Result, results: Sequence[Result]) -> list[Result]:
    """The runs on the same machine that differ from `result` in this key alone, itself included."""
    rest = _without(key, result.info)
    return [r for r in results if key in r.info.changed and r.info.hardware == result.info.hardware
            and _without(key, r.info) == rest]  # fmt: skip


def _unchanged(key: str, result: Result, results: Sequence[Result]) -> list[Result]:
    """The run without the change, whose value of the key its config knows."""
    rest = _without(key, result.info)
    return [r for r in results if r.info.changed == rest and r.info.hardware == result.info.hardware
            and _value(key, r.info) is not None]  # fmt: skip


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
    """Each run's points, with the key's value in their names and settings. What belongs to one run alone, such as its
    steps, stays on the disk."""
    values = {id(run): _value(key, run.info) for run in runs}
    if all(isinstance(value, (int, float)) for value in values.values()):
        runs = sorted(runs, key=lambda run: float(values[id(run)]))
    rest = _without(key, runs[-1].info)
    first, short = runs[0].info, key.rpartition(".")[2].rpartition("/")[2]
    names = {id(run): (lambda point, value=values[id(run)]: f"{short}={value} {point}".strip()) for run in runs}
    metrics = [name for name in first.metrics if all(name in run.info.metrics for run in runs)]
    drawn = list(dict.fromkeys([*(claim.metric for claim in first.claims if claim.metric in metrics), *metrics]))
    panels = tuple(PanelSpec(metric, PanelKind.lines, x=key, x_label=short) for metric in drawn[:PANELS])
    info = replace(
        first,
        run=",".join([f"sweep-{slug(short)}", *([run_name(rest)] if rest else [])]),
        points={
            names[id(r)](p): {**settings, key: values[id(r)]} for r in runs for p, settings in r.info.points.items()
        },
        metrics={name: first.metrics[name] for name in metrics},
        claims=(),
        gates=tuple(replace(gate, point=names[id(r)](gate.point)) for r in runs for gate in r.info.gates),
        samples=(),
        plots=(PlotSpec(f"over-{slug(short)}", f"Over {short}", panels),),
        profiles=(),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.info.notes)),
    )
    rows = tuple(
        replace(row, point=names[id(run)](row.point)) for run in runs for row in run.rows if row.metric in metrics
    )
    return Result(info, rows, runs=tuple(run.info for run in runs))
