"""Lines over a setting, and curves of one metric over another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from experiments.lab.show import wording
from experiments.lab.show.figures import bars, frame, points
from experiments.lab.show.figures.intervals import intervals, mark_cut, medians, reach
from experiments.lab.show.figures.style import INK, ON_TOP, line_style, plain, spread
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Table


def draw(ax: Axes, panel: PanelSpec, result: Result) -> dict[str, float]:
    """One line a variant; where points differ in more than x, one line a variant and combination of the others. Where
    each point stands on the x axis; empty where nothing is drawn."""
    assert panel.x is not None
    table, info = Table(result.rows), result.info
    at_x = {name: settings for name, settings in info.points.items() if panel.x in settings}
    measured = [n for n in at_x if any(table.values(v, n, panel.metric) for v in info.variants)]
    place_of, names = _places([at_x[name][panel.x] for name in measured])
    alone = len(place_of) == len(measured)  # whatever else changes does so with x
    rests = {name: "" if alone else _rest(at_x[name], panel.x) for name in measured}
    others = list(dict.fromkeys(rests.values()))
    every = [found for v in info.variants for name in measured if (found := table.values(v, name, panel.metric))]
    within = reach(medians(every), has_log_y(panel, result))
    for row, (variant, label) in enumerate(info.variants.items()):
        for kind, rest in enumerate(others):
            places: list[float] = []
            values = []
            for name in measured:
                found = table.values(variant, name, panel.metric)
                if found and rests[name] == rest:
                    places.append(place_of[at_x[name][panel.x]])
                    values.append(found)
            if not places:
                continue
            order = sorted(range(len(places)), key=places.__getitem__)
            x, y = [places[i] for i in order], intervals([values[i] for i in order], within)
            text = ", ".join(part for part in (label if len(info.variants) > 1 else "", rest) if part)
            style = line_style(row, kind)
            line, *_ = ax.errorbar(x, y.medians, yerr=y.errors, label=text or label, **style)
            frame.says(line, [bars.tip(text, plain(x[one]), values[i]) for one, i in enumerate(order)])
            mark_cut(ax, x, y, colour=style["color"])
    shown = [place_of[value] for value in dict.fromkeys(at_x[name][panel.x] for name in measured)]
    if panel.log_x and names is None and min(shown, default=1) > 0:
        ax.set_xscale("log", base=10)
        shown = spread(shown, math.log)
    elif names is None:
        shown = spread(shown)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(shown, [plain(place) for place in shown] if names is None else names)
    ax.set_xlabel(panel.x_label or panel.x.rpartition(".")[2], fontsize=9)
    return {name: place_of[at_x[name][panel.x]] for name in measured}


def curve(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """One curve a variant through its points, each at what was measured of two metrics: latency against the rate
    that was really reached, say."""
    assert panel.x is not None
    table, info = Table(result.rows), result.info
    measured = {
        variant: [
            (point, xs, ys)
            for point in info.points
            if (xs := table.values(variant, point, panel.x)) and (ys := table.values(variant, point, panel.metric))
        ]
        for variant in info.variants
    }
    every = [place for places in measured.values() for place in places]
    within_x = reach(medians(xs for _, xs, _ in every), panel.log_x)
    within_y = reach(medians(ys for _, _, ys in every), has_log_y(panel, result))
    named = False
    for row, (variant, label) in enumerate(info.variants.items()):
        found = measured[variant]
        if not found:
            continue
        x = intervals([xs for _, xs, _ in found], within_x)
        y = intervals([ys for _, _, ys in found], within_y)
        style = line_style(row, 0)
        line, *_ = ax.errorbar(x.medians, y.medians, xerr=x.errors, yerr=y.errors, label=label, **style)
        frame.says(line, [bars.tip(label, wording.point(point), ys) for point, _, ys in found])
        key = points.only_key(result, [point for point, _, _ in found])
        if not named:
            for (point, _, _), at_x, at_y in zip(found, x.medians, y.medians, strict=True):
                name = point if key is None else points.setting(result, point)
                ax.annotate(name, (at_x, at_y), (5, -10), textcoords="offset points", fontsize=7.5, **ON_TOP)
            if key is not None:
                ax.set_title(f"{ax.get_title()} (small numbers: {key})", fontsize=8, color=INK)
            named = True
        mark_cut(ax, y.medians, x, "x", style["color"])
        mark_cut(ax, x.medians, y, "y", style["color"])
    if panel.log_x and every:
        frame.log(ax.xaxis, ax, True)
    elif every:
        ax.set_xlim(left=0)
        frame.linear(ax.xaxis, 5)
    ax.set_xlabel(panel.x_label or frame.axis_label(info.metrics[panel.x], 44), fontsize=9)
    return bool(every)


def _places(values: Sequence[Any]) -> tuple[Mapping[Any, float], list[str] | None]:
    """Where values stand on an axis, and their names where they are no numbers."""
    distinct = list(dict.fromkeys(values))
    if all(points.is_number(value) for value in distinct):
        return {value: float(value) for value in distinct}, None
    return {value: float(index) for index, value in enumerate(distinct)}, [str(value) for value in distinct]


def _rest(settings: Mapping[str, Any], x: str) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key != x)


def has_log_y(panel: PanelSpec, result: Result) -> bool:
    return panel.log_y and all(row.value > 0 for row in result.rows if row.valid and row.metric == panel.metric)
