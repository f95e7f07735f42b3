"""Medians as bars, one group a point, with their intervals and every repeat as a dot. Where bars would say nothing,
because a group has too many or one dwarfs the others, and where one point has long names, rows beside each other."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.lab.judge import stats
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, points
from experiments.lab.show.figures.intervals import ARROW, Intervals, intervals, mark_cut, medians, reach
from experiments.lab.show.figures.style import COLOURS, HATCHES, INK, line_style
from experiments.lab.spec import PanelKind, PanelSpec
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Table, Turn

DENSE = 0.34  # inches a bar: below, its number is turned upright
MANY = 4  # bars in a group that can still be told apart
DWARFED = 30  # a bar this many times another leaves nothing of it to be seen

GREYS = ("#202020", "#9a9a9a", "#5c5c5c", "#c8c8c8")


@dataclass(frozen=True)
class Rows:
    """What stands in rows: names, and for each series its label and the repeats of every row (none: not measured).

    Attributes:
        log: dots on a log axis; else bars where there is one series, and dots where there are more.
        by_point: the series are points, and the rows variants; else the other way round.
    """

    names: list[str]
    series: dict[str, list[dict[Turn, float]]]
    tried: list[bool]
    log: bool
    by_point: bool


def rows_of(panel: PanelSpec, result: Result) -> Rows | None:
    """None where upright bars are the better picture."""
    if panel.kind is not PanelKind.bars:
        return None
    table, variants = Table(result.rows), result.info.variants
    at = _points(panel, result, table)
    found = {(v, p): table.values(v, p, panel.metric) for v in variants for p in at}
    every = medians(values for values in found.values() if values)
    log = bool(every) and min(every) > 0 and max(every) > DWARFED * min(every)
    if len(variants) == 1 or not (log or len(at) == 1 or (len(at) > 1 and len(variants) > MANY)):
        return None
    tried = {row.variant for row in result.rows if row.metric == panel.metric}
    if len(at) > 1 and len(variants) <= MANY:
        by_variant = {label: [found[v, p] for p in at] for v, label in variants.items()}
        return Rows([wording.point(p) for p in at], by_variant, [True] * len(at), log, False)
    by_point = {wording.point(p): [found[v, p] for v in variants] for p in at}
    return Rows(list(variants.values()), by_point, [v in tried for v in variants], log, len(at) > 1)


def draw_rows(ax: Axes, rows: Rows, named: bool) -> bool:
    """False where nothing is drawn."""
    count, plain_bars = len(rows.series), len(rows.series) == 1 and not rows.log
    within = reach((m for each in rows.series.values() for m in medians(v for v in each if v)), rows.log)
    for index, (label, measured) in enumerate(rows.series.items()):
        kept = [(row, values) for row, values in enumerate(measured) if values]
        if not kept:
            continue
        drawn = intervals([values for _, values in kept], within)
        places = [row + (index - (count - 1) / 2) * 0.5 / count for row, _ in kept]
        tips = [tip(rows.names[row], label if count > 1 else "", values) for row, values in kept]
        if plain_bars:
            for one, (place, (row, _)) in enumerate(zip(places, kept, strict=True)):
                errors = [[side[one]] for side in drawn.errors]
                (bar,) = ax.barh(place, drawn.medians[one], 0.72, xerr=errors, **_bar_style(row))
                frame.says(bar, [tips[one]])
        else:
            style = line_style(index, 0) | {"linestyle": "none"}
            if rows.by_point:  # colours are the variants'
                style |= dict.fromkeys(("color", "markerfacecolor"), GREYS[index % len(GREYS)])
            points_, *_ = ax.errorbar(drawn.medians, places, xerr=drawn.errors, label=label if count > 1 else None,
                                      **style)  # fmt: skip
            frame.says(points_, tips)
        mark_cut(ax, places, drawn, "x")
        for one, (place, (_, values)) in enumerate(zip(places, kept, strict=True)):
            end, away = _end(values, drawn, one)
            _dots(ax, list(values.values()), [place] * len(values))
            if count == 1:
                ax.annotate(wording.number(drawn.medians[one]), (end, place), (1 + away, 0), va="center", fontsize=8,
                            textcoords="offset points")  # fmt: skip
    _unmeasured(ax, rows)
    ax.set_ylim(len(rows.names) - 0.4, -0.6)
    ax.set_yticks(range(len(rows.names)), [textwrap.fill(name, 26) for name in rows.names] if named else [])
    ax.margins(x=0.16)
    if rows.log:
        frame.log(ax.xaxis, ax, True)
    else:
        ax.set_xlim(left=0)
        frame.linear(ax.xaxis, 5)
    return any(values for measured in rows.series.values() for values in measured)


def draw(ax: Axes, panel: PanelSpec, result: Result, width: float) -> dict[str, float]:
    """Upright. Where each point stands on the x axis; empty where nothing is drawn."""
    table, variants = Table(result.rows), list(result.info.variants.items())
    at = _points(panel, result, table)
    tried = {(row.variant, row.point) for row in result.rows if row.metric == panel.metric}
    step = 0.8 / len(variants)
    dense = width * 0.8 / max(1, len(at) * len(variants)) < DENSE
    within = reach(v for name, _ in variants for p in at for v in table.values(name, p, panel.metric).values())
    for column, (variant, label) in enumerate(variants):
        places, values, tips = [], [], []
        for group, point in enumerate(at):
            found = table.values(variant, point, panel.metric)
            place = group + (column - (len(variants) - 1) / 2) * step
            if found:
                places.append(place)
                values.append(found)
                tips.append(tip(label, wording.point(point), values[-1]))
            elif (variant, point) in tried:
                ax.annotate("INVALID", (place, 0), (0, 3), textcoords="offset points", ha="center", va="bottom",
                            fontsize=7.5, rotation=90)  # fmt: skip
        drawn = intervals(values, within)
        bars = ax.bar(places, drawn.medians, step * 0.92, yerr=drawn.errors, label=label, **_bar_style(column))
        for bar, text in zip(bars, tips, strict=True):
            frame.says(bar, [text])
        mark_cut(ax, places, drawn)
        for index, (place, repeats) in enumerate(zip(places, values, strict=True)):
            top, away = _end(repeats, drawn, index)
            ax.annotate(wording.number(drawn.medians[index]), (place, top), (0, away), textcoords="offset points",
                        ha="center", va="bottom", fontsize=7.5, rotation=90 if dense else 0)  # fmt: skip
            _dots(ax, [place] * len(repeats), list(repeats.values()))
    ax.margins(y=0.24 if dense else 0.1)
    points.name_axis(ax, panel, result, at, width)
    return {point: float(index) for index, point in enumerate(at)}


def tip(name: str, where: str, repeats: Mapping[Turn, float]) -> str:
    """What a point says to the pointer."""
    estimate = wording.interval(stats.absolute(repeats))
    return f"{', '.join(part for part in (name, where) if part)}: {estimate}, {len(repeats)} repeats"


def _points(panel: PanelSpec, result: Result, table: Table) -> list[str]:
    return [p for p in result.info.points if any(table.values(v, p, panel.metric) for v in result.info.variants)]


def _unmeasured(ax: Axes, rows: Rows) -> None:
    for row, tried in enumerate(rows.tried):
        if not any(measured[row] for measured in rows.series.values()):
            ax.annotate("INVALID" if tried else "not measured", (0, row), (3, 0), xycoords=("axes fraction", "data"),
                        textcoords="offset points", va="center", fontsize=8)  # fmt: skip


def _end(repeats: Mapping[Turn, float], bars: Intervals, index: int) -> tuple[float, float]:
    """Of all that is drawn at a bar, and points to leave free behind it."""
    top = float(np.nanmax([*repeats.values(), bars.medians[index] + bars.errors[1][index]]))
    return top, 3 + ARROW * bars.cut[1][index]


def _bar_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0,
        "error_kw": {"ecolor": INK, "capsize": 3, "elinewidth": 1.4},
    }


def _dots(ax: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    ax.plot(x, y, ".", color=INK, markersize=3, alpha=0.6, zorder=4)
