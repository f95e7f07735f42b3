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
from experiments.lab.show.figures import frame, lines
from experiments.lab.show.figures.frame import COLOURS, HATCHES, INK, SPARE, line_style
from experiments.lab.show.figures.intervals import Estimator, Intervals, intervals, of_metric, tip
from experiments.lab.spec import PanelKind, PanelSpec
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Turn

LETTER = 0.075  # inches, of a number above a bar: where it has not the room, it is turned upright
MANY = 4  # bars in a group that can still be told apart, and long names below them
LONG = 10  # letters
DWARFED = 30  # a bar this many times another leaves nothing of it to be seen
MIDDLE: dict[str, Any] = {"va": "center"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "bottom"}
GREYS = ("#202020", "#9a9a9a", "#5c5c5c", "#c8c8c8")


@dataclass(frozen=True)
class Rows:
    """What stands in rows: names, and for each series its label and the repeats of every row (none: not measured).

    Attributes:
        log: dots on a log axis; else bars where there is one series, and dots where there are more.
        by_point: the series are points, and the rows variants; else the other way round.
        estimate: of a row's repeats.
    """

    names: list[str]
    series: dict[str, list[dict[Turn, float]]]
    tried: list[bool]
    log: bool
    by_point: bool
    estimate: Estimator


def rows_of(panel: PanelSpec, result: Result) -> Rows | None:
    """None where upright bars are the better picture."""
    if panel.kind is not PanelKind.bars:
        return None
    variants, at = result.info.variants, _points(panel, result)
    found = {(v, p): result.table.values(v, p, panel.metric) for v in variants for p in at}
    every = [stats.absolute(values).median for values in found.values() if values]
    log = bool(every) and min(every) > 0 and max(every) > DWARFED * min(every)
    if len(variants) == 1:
        beside = len(at) > MANY and max(map(len, at)) > LONG
    else:
        beside = log or len(at) == 1 or len(variants) > MANY
    if not beside:
        return None
    estimate = of_metric(result.info.metrics.get(panel.metric))
    if len(at) > 1 and len(variants) <= MANY:
        by_variant = {label: [found[v, p] for p in at] for v, label in variants.items()}
        return Rows([wording.point(p) for p in at], by_variant, [True] * len(at), log, False, estimate)
    tried = {row.variant for row in result.rows if row.metric == panel.metric}
    by_point = {wording.point(p): [found[v, p] for v in variants] for p in at}
    return Rows(list(variants.values()), by_point, [v in tried for v in variants], log, True, estimate)


def draw_rows(ax: Axes, rows: Rows, named: bool) -> bool:
    """False where nothing is drawn."""
    count, plain_bars = len(rows.series), len(rows.series) == 1 and not rows.log
    most = max((v for each in rows.series.values() for values in each for v in values.values()), default=0.0)
    for index, (label, measured) in enumerate(rows.series.items()):
        kept = [(row, values) for row, values in enumerate(measured) if values]
        if not kept:
            continue
        repeats = [values for _, values in kept]
        drawn = intervals(repeats, rows.estimate)
        places = [row + (index - (count - 1) / 2) * 0.5 / count for row, _ in kept]
        tips = [tip(rows.names[row], label if count > 1 else "", values, rows.estimate) for row, values in kept]
        if plain_bars:
            for one, (place, (row, _)) in enumerate(zip(places, kept, strict=True)):
                errors = [[side[one]] for side in drawn.errors]
                colour = row if rows.by_point else 0  # is a variant's
                (bar,) = ax.barh(place, drawn.medians[one], 0.72, xerr=errors, **_bar_style(colour))
                frame.says(bar, [tips[one]])
        else:
            style = line_style(index, 0) | {"linestyle": "none"}
            if rows.by_point and count > 1:  # colours are the variants'
                style |= dict.fromkeys(("color", "markerfacecolor"), GREYS[index % len(GREYS)])
            points, *_ = ax.errorbar(drawn.medians, places, xerr=drawn.errors, label=label if count > 1 else None,
                                     **style)  # fmt: skip
            frame.says(points, tips)
        _repeats(ax, places, repeats, drawn, SPARE * most, across=True, number=count == 1)
    for row, tried in enumerate(rows.tried):
        if not any(measured[row] for measured in rows.series.values()):
            ax.annotate("INVALID" if tried else "not measured", (0, row), (3, 0), xycoords=("axes fraction", "data"),
                        textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    frame.name_rows(ax, [textwrap.fill(name, 26) for name in rows.names])
    if not named:
        ax.set_yticks([])
    ax.margins(x=0.16)
    if rows.log:
        frame.log(ax.xaxis, ax, True)
    else:
        frame.from_zero(ax.xaxis, ax, True, 5)
    return any(values for measured in rows.series.values() for values in measured)


def draw(ax: Axes, panel: PanelSpec, result: Result, width: float) -> dict[str, float]:
    """Upright, in a panel of `width` inches. Where each point stands on the x axis; empty where nothing is drawn."""
    variants, at = result.info.variants, _points(panel, result)
    found = {(v, p): result.table.values(v, p, panel.metric) for v in variants for p in at}
    tried = {(row.variant, row.point) for row in result.rows if row.metric == panel.metric}
    places_of = [v for v in variants if any(who == v for who, _ in tried)]
    step = 0.8 / max(1, len(places_of))
    estimates = (result.estimate(v, p, panel.metric) for v, p in found)
    longest = max((len(wording.number(each.median)) for each in estimates if each), default=0)
    dense = 0.8 * width * step / max(1, len(at)) < LETTER * longest
    most = max((value for values in found.values() for value in values.values()), default=0.0)
    estimate = of_metric(result.info.metrics[panel.metric])
    for column, (variant, label) in enumerate(variants.items()):
        if variant not in places_of:
            continue
        aside = (places_of.index(variant) - (len(places_of) - 1) / 2) * step
        place_of = {p: group + aside for group, p in enumerate(at)}
        for point, place in place_of.items():
            if not found[variant, point] and (variant, point) in tried:
                ax.annotate("INVALID", (place, 0), (0, 3), textcoords="offset points", ha="center", va="bottom",
                            fontsize=7.5, rotation=90)  # fmt: skip
        kept = [point for point in at if found[variant, point]]
        places, repeats = [place_of[point] for point in kept], [found[variant, point] for point in kept]
        drawn = intervals(repeats, estimate)
        bars = ax.bar(places, drawn.medians, step * 0.92, yerr=drawn.errors, label=label, **_bar_style(column))
        for bar, point in zip(bars, kept, strict=True):
            frame.says(bar, [tip(label, wording.point(point), found[variant, point], estimate)])
        _repeats(ax, places, repeats, drawn, SPARE * most, across=False, number=True, rotation=90 if dense else 0)
    ax.margins(y=0.24 if dense else 0.1)
    lines.name_points(ax, panel, result, at, width)
    return {point: float(index) for index, point in enumerate(at)}


def _points(panel: PanelSpec, result: Result) -> list[str]:
    info = result.info
    return [p for p in info.points if any(result.table.values(v, p, panel.metric) for v in info.variants)]


def _repeats(
    ax: Axes,
    places: Sequence[float],
    repeats: Sequence[Mapping[Turn, float]],
    drawn: Intervals,
    most: float,
    *,
    across: bool,
    number: bool,
    rotation: int = 0,
) -> None:
    """Every repeat as a dot, and the median behind what is seen of a bar, up to `most`. `across`: values are on the x
    axis."""
    for index, (place, values) in enumerate(zip(places, repeats, strict=True)):
        dots = [(value, place) if across else (place, value) for value in values.values()]
        ax.plot(*zip(*dots, strict=True), ".", color=INK, markersize=3, alpha=0.6, zorder=4)
        if number:
            end = min(float(np.nanmax([*values.values(), drawn.medians[index] + drawn.errors[1][index]])), most)
            away = 3 + across
            ax.annotate(wording.number(drawn.medians[index]), (end, place) if across else (place, end),
                        (away, 0) if across else (0, away), textcoords="offset points", rotation=rotation,
                        fontsize=8 if across else 7.5, **(MIDDLE if across else CENTRED))  # fmt: skip


def _bar_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0,
        "error_kw": {"ecolor": INK, "capsize": 3, "elinewidth": 1.4},
    }
