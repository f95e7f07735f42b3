"""Figures of a result: medians with their 95 % intervals and every repeat as a dot. The same result gives the same
bytes: no pyplot, default style, no date. What colour tells is told again by hatches, markers and line styles, so that
a figure can be read printed in grey."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image  # matplotlib writes its PNGs with it

from experiments.lab.judge import distributions
from experiments.lab.judge.claims import Claim
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.show import plot_formula, plot_matrix, wording
from experiments.lab.show.plot_intervals import ARROW, Intervals, intervals, mark_cut, medians, reach
from experiments.lab.show.plot_style import BOUND, COLOURS, HATCHES, INK, ON_TOP, line_style, plain, spread
from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store.result import Result, page_name
from experiments.lab.store.rows import Table

FAR = 3  # a bound this many times above everything measured would only press the data flat
DPI = 144
WIDTH = 10.2  # inches: about what a code-hosting page shows without shrinking
PANELS_A_ROW = 3
PANEL_HEIGHT = 3.5
BAR_HEIGHT = 0.5  # of a horizontal bar
MADE_FOR = "mini-infer report: "
LEGEND_CHARACTERS = 110  # a row
NAME_WIDTH = 12  # characters of a named point below its bars
DENSE = 0.34  # inches a bar: below, its number is turned upright


def draw(plot: PlotSpec, result: Result) -> bytes:
    """One figure as PNG bytes."""
    with matplotlib.style.context("default"):
        columns = 2 if len(plot.panels) == 4 else min(len(plot.panels), PANELS_A_ROW)
        rows = -(-len(plot.panels) // columns)
        width = WIDTH if columns > 1 else 0.7 * WIDTH
        flat = all(_is_horizontal(panel, _shown(panel, result)) for panel in plot.panels)
        height = max(1.6, 1.1 + BAR_HEIGHT * len(result.info.variants)) if flat else PANEL_HEIGHT
        figure = Figure(figsize=(width, rows * height + 0.6), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for index, panel in enumerate(plot.panels):
            _panel(axes[index], panel, result, width / columns, named=not flat or index % columns == 0)
        for ax in axes[len(plot.panels) :]:
            ax.set_visible(False)
        if not flat:
            legend(figure, axes)
        figure.suptitle(textwrap.fill(plot.title, 100), fontsize=12)
        return png(figure, page_name(result.info))


def png(figure: Figure, page: str) -> bytes:
    """The file names its page, so that a report whose results are gone can be told from other pictures."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None, "Description": f"{MADE_FOR}{page}"})
    return buffer.getvalue()


def made_for(path: Path) -> str | None:
    """The page on which a picture belongs; None where it is not one of ours."""
    try:
        with Image.open(path) as image:
            description = str(image.info.get("Description", ""))
    except OSError:
        return None
    return description.removeprefix(MADE_FOR) if description.startswith(MADE_FOR) else None


def legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend below all panels, in as many columns as have room for the longest label."""
    found: dict[str, dict[str, Any]] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            kind = "bar" if isinstance(handle, (BarContainer, Patch)) else "line"
            found.setdefault(label, {}).setdefault(kind, handle)
    if len(found) > 1:
        columns = max(1, LEGEND_CHARACTERS // (max(len(label) for label in found) + 10))
        handles: list[Any] = [tuple(kinds.values()) for kinds in found.values()]
        figure.legend(handles, found.keys(), loc="outside lower center", ncols=min(columns, len(found)), fontsize=9,
                      frameon=False, handlelength=3.4, handler_map={tuple: HandlerTuple(ndivide=None)})  # fmt: skip


def tidy(ax: Axes, grid: Literal["x", "y"] = "y") -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(axis=grid, color="#dddddd", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9)


def _panel(ax: Axes, panel: PanelSpec, result: Result, width: float, named: bool) -> None:
    metric = result.info.metrics.get(panel.metric)
    if metric is None or (panel.kind is PanelKind.curve and panel.x not in result.info.metrics):
        return _nothing(ax, f"{panel.metric}: not measured in this run")  # which may have chosen other metrics
    result = _shown(panel, result)
    flat = _is_horizontal(panel, result)
    tidy(ax, "x" if flat else "y")
    words = [f"{key.rpartition('.')[2]}={_plain_setting(value)}" for key, value in panel.where.items()]
    words.append(f"{'higher' if metric.better is Better.higher else 'lower'} is better")
    ax.set_title(", ".join(words), fontsize=8, color=INK)
    if panel.kind is PanelKind.matrix:
        return None if plot_matrix.draw(ax, panel.metric, result) else _nothing(ax, "no valid value")
    if panel.kind is PanelKind.formula:
        return None if plot_formula.draw(ax, panel, result) else _nothing(ax, "no valid value")
    if panel.kind is PanelKind.distribution:
        stored = _distribution(ax, panel, result)
        return _nothing(ax, "not stored for this run (experiment.timeline)") if not stored else None
    drawn: bool | dict[str, float]
    if flat:
        drawn = _horizontal_bars(ax, panel, result, named)
    elif panel.kind is PanelKind.bars:
        drawn = _bars(ax, panel, result, width)
    elif panel.kind is PanelKind.curve:
        drawn = _curve(ax, panel, result)
    else:
        drawn = _lines(ax, panel, result)
    if not drawn:
        return _nothing(ax, "no valid value")
    if flat:
        ax.set_xlim(left=0)
        _linear(ax.xaxis, 5)
        ax.set_xlabel(axis_label(metric, 32), fontsize=9)
        return None
    if _has_log_y(panel, result):
        _log(ax.yaxis, ax, False)
    else:
        ax.set_ylim(bottom=0)
        _linear(ax.yaxis, 8)
    ax.set_ylabel(axis_label(metric, 36), fontsize=9)
    _limits(ax, panel, result, drawn if isinstance(drawn, dict) else {})
    return None


def _shown(panel: PanelSpec, result: Result) -> Result:
    """The result with the panel's own points alone, whose names leave out what they have in common."""
    if not panel.where:
        return result
    points = {
        name: {key: value for key, value in settings.items() if key not in panel.where}
        for name, settings in result.info.points.items()
        if all(settings.get(key) == value for key, value in panel.where.items())
    }
    return replace(result, info=replace(result.info, points=points))


def axis_label(metric: Metric, width: int) -> str:
    label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
    return textwrap.fill(label, width)


def _is_horizontal(panel: PanelSpec, result: Result) -> bool:
    """Bars at a single point: the variants' names stand beside them, where any length has room."""
    table, info = Table(result.rows), result.info
    points = [p for p in info.points if any(table.values(v, p, panel.metric) for v in info.variants)]
    return panel.kind is PanelKind.bars and len(points) == 1 and len(info.variants) > 1


def _horizontal_bars(ax: Axes, panel: PanelSpec, result: Result, named: bool) -> bool:
    table, variants = Table(result.rows), result.info.variants
    tried = {v: any((r.variant, r.metric) == (v, panel.metric) for r in result.rows) for v in variants}
    measured = []
    for variant in variants:
        found = [table.values(variant, point, panel.metric) for point in result.info.points]
        measured.append(next((list(f.values()) for f in found if f), []))
    within = reach(value for values in measured for value in values)
    ends = []
    for row, (variant, values) in enumerate(zip(variants, measured, strict=True)):
        if not values:
            ax.annotate(
                "INVALID" if tried[variant] else "not measured",
                (0, row),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            continue
        bar = intervals([values], within)
        ax.barh(row, bar.medians, 0.72, xerr=bar.errors, **_bar_style(row))
        mark_cut(ax, [row], bar, "x")
        _dots(ax, values, [row] * len(values))
        ends.append((row, bar.medians[0], *_end(values, bar, 0)))
    for row, median, end, away in ends:
        ax.annotate(wording.number(median), (end, row), (1 + away, 0), textcoords="offset points", va="center",
                    fontsize=8)  # fmt: skip
    ax.set_ylim(len(variants) - 0.4, -0.6)
    ax.set_yticks(range(len(variants)), [textwrap.fill(v, 26) for v in variants.values()] if named else [])
    ax.margins(x=0.16)
    return bool(ends)


def _bars(ax: Axes, panel: PanelSpec, result: Result, width: float) -> dict[str, float]:
    """Where each point stands on the x axis; empty where nothing is drawn."""
    table, variants = Table(result.rows), list(result.info.variants.items())
    points = [p for p in result.info.points if any(table.values(v, p, panel.metric) for v, _ in variants)]
    tried = {(row.variant, row.point) for row in result.rows if row.metric == panel.metric}
    step = 0.8 / len(variants)
    dense = width * 0.8 / max(1, len(points) * len(variants)) < DENSE
    within = reach(v for name, _ in variants for p in points for v in table.values(name, p, panel.metric).values())
    for column, (variant, label) in enumerate(variants):
        places, values = [], []
        for group, point in enumerate(points):
            found = table.values(variant, point, panel.metric)
            place = group + (column - (len(variants) - 1) / 2) * step
            if found:
                places.append(place)
                values.append(list(found.values()))
            elif (variant, point) in tried:
                ax.annotate("INVALID", (place, 0), (0, 3), textcoords="offset points", ha="center", va="bottom",
                            fontsize=7.5, rotation=90)  # fmt: skip
        bars = intervals(values, within)
        ax.bar(places, bars.medians, step * 0.92, yerr=bars.errors, label=label, **_bar_style(column))
        mark_cut(ax, places, bars)
        for index, (place, repeats) in enumerate(zip(places, values, strict=True)):
            top, away = _end(repeats, bars, index)
            ax.annotate(wording.number(bars.medians[index]), (place, top), (0, away), textcoords="offset points",
                        ha="center", va="bottom", fontsize=7.5, rotation=90 if dense else 0)  # fmt: skip
            _dots(ax, [place] * len(repeats), repeats)
    ax.margins(y=0.24 if dense else 0.1)
    _name_points(ax, panel, result, points, width)
    return {point: float(index) for index, point in enumerate(points)}


def _end(repeats: Sequence[float], bars: Intervals, index: int) -> tuple[float, float]:
    """Of all that is drawn at a bar, and points to leave free behind it."""
    top = float(np.nanmax([*repeats, bars.medians[index] + bars.errors[1][index]]))
    return top, 3 + ARROW * bars.cut[1][index]


def _bar_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0,
        "error_kw": {"ecolor": INK, "capsize": 3, "elinewidth": 1.4},
    }


def _name_points(ax: Axes, panel: PanelSpec, result: Result, points: Sequence[str], width: float) -> None:
    key = _only_key(result, points)
    names = [_in_lines(p, panel) for p in points] if key is None else [_setting(result, p) for p in points]
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    upright = longest * len(names) * 0.085 > width * 0.8  # about 0.085 inches a letter
    ax.set_xticks(range(len(points)), names)
    if upright:
        ax.tick_params(axis="x", labelrotation=90, labelsize=8)
    ax.set_xlabel(panel.x_label or key or "", fontsize=9)


def _in_lines(point: str, panel: PanelSpec) -> str:
    """A setting a line, without those that the panel's title has."""
    told = {f"{key.rpartition('.')[2]}={value}" for key, value in panel.where.items()} | {panel.where.get("case")}
    words = [word for word in point.split(" ") if word not in told]
    lines = re.sub(r" (?=\S+=)", "\n", " ".join(words)).split("\n")
    return "\n".join(textwrap.fill(line, NAME_WIDTH, break_long_words=False) for line in lines)


def _only_key(result: Result, points: Sequence[str]) -> str | None:
    """What all points differ in, where it is one thing: then its values are names enough."""
    keys = {tuple(result.info.points[point]) for point in points}
    (only, *others) = keys or {()}
    return only[0].rpartition(".")[2] if not others and len(only) == 1 else None


def _setting(result: Result, point: str) -> str:
    (value,) = result.info.points[point].values()
    return _plain_setting(value)


def _plain_setting(value: Any) -> str:
    return f"{value:,}" if _is_number(value) else str(value)


def _lines(ax: Axes, panel: PanelSpec, result: Result) -> dict[str, float]:
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
    within = reach(medians(list(found.values()) for found in every), _has_log_y(panel, result))
    for row, (variant, label) in enumerate(info.variants.items()):
        for kind, rest in enumerate(others):
            places: list[float] = []
            values = []
            for name in measured:
                found = table.values(variant, name, panel.metric)
                if found and rests[name] == rest:
                    places.append(place_of[at_x[name][panel.x]])
                    values.append(list(found.values()))
            if not places:
                continue
            order = sorted(range(len(places)), key=places.__getitem__)
            x, y = [places[i] for i in order], intervals([values[i] for i in order], within)
            text = ", ".join(part for part in (label if len(info.variants) > 1 else "", rest) if part)
            style = line_style(row, kind)
            ax.errorbar(x, y.medians, yerr=y.errors, label=text or label, **style)
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


def _curve(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """One curve a variant through its points, each at what was measured of two metrics: latency against the rate
    that was really reached, say."""
    assert panel.x is not None
    table, info = Table(result.rows), result.info
    measured = {
        variant: [
            (point, list(xs.values()), list(ys.values()))
            for point in info.points
            if (xs := table.values(variant, point, panel.x)) and (ys := table.values(variant, point, panel.metric))
        ]
        for variant in info.variants
    }
    every = [place for places in measured.values() for place in places]
    within_x = reach(medians(xs for _, xs, _ in every), panel.log_x)
    within_y = reach(medians(ys for _, _, ys in every), _has_log_y(panel, result))
    named = False
    for row, (variant, label) in enumerate(info.variants.items()):
        found = measured[variant]
        if not found:
            continue
        x = intervals([xs for _, xs, _ in found], within_x)
        y = intervals([ys for _, _, ys in found], within_y)
        style = line_style(row, 0)
        ax.errorbar(x.medians, y.medians, xerr=x.errors, yerr=y.errors, label=label, **style)
        key = _only_key(result, [point for point, _, _ in found])
        if not named:
            for (point, _, _), at_x, at_y in zip(found, x.medians, y.medians, strict=True):
                name = point if key is None else _setting(result, point)
                ax.annotate(name, (at_x, at_y), (5, -10), textcoords="offset points", fontsize=7.5, **ON_TOP)
            if key is not None:
                ax.set_title(f"{ax.get_title()} (small numbers: {key})", fontsize=8, color=INK)
            named = True
        mark_cut(ax, y.medians, x, "x", style["color"])
        mark_cut(ax, x.medians, y, "y", style["color"])
    if panel.log_x and every:
        _log(ax.xaxis, ax, True)
    elif every:
        ax.set_xlim(left=0)
        _linear(ax.xaxis, 5)
    ax.set_xlabel(panel.x_label or axis_label(info.metrics[panel.x], 44), fontsize=9)
    return bool(every)


def _distribution(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """The share of requests, or of tokens, that took longer than the time on the x axis: a straight look at the tail,
    where 1 % on the y axis is the P99."""
    shown = distributions.of(panel.metric, result)
    if not shown.values:
        return False
    smallest, low, high = 100.0, math.inf, 0.0
    for row, (variant, label) in enumerate(result.info.variants.items()):
        times, weights = shown.values.get(variant, ((), ()))
        if not times:
            continue
        x, share = distributions.above(times, weights)
        style = line_style(row, 0)
        ax.step(x, share, where="post", label=label, color=style["color"], linestyle=style["linestyle"])
        smallest = min(smallest, *(s for s in share if s > 0), 100.0)
        low, high = min(low, *times), max(high, *times)
    if low > 0 and high > 30 * low:
        _log(ax.xaxis, ax, True)
    ax.set_yscale("log")
    ax.set_ylim(max(smallest / 1.5, 0.01), 130)
    _plain(ax.yaxis, 1000)
    ax.set_xlabel(shown.label, fontsize=9)
    ax.set_ylabel(f"share of {shown.what} above (%)", fontsize=9)
    return True


def _limits(ax: Axes, panel: PanelSpec, result: Result, places: Mapping[str, float]) -> None:
    """The bounds of absolute claims about this metric. A single one is a line with words; several are marks at their
    points, whose numbers stand in the table of claims."""
    claims = []
    for claim in (side for both in result.info.claims for side in both.sides):
        if claim.metric == panel.metric and not claim.bound.is_ratio and claim.point in result.info.points:
            top = ax.get_ylim()[1]
            if claim.value <= FAR * top:
                ax.set_ylim(top=max(top, 1.12 * claim.value))
                claims.append(claim)
    if len(claims) > 1 and len(places) > 1:
        _marks(ax, panel, [claim for claim in claims if claim.point in places], places)
        return
    for index, claim in enumerate(claims):
        ax.axhline(claim.value, color=BOUND, linewidth=1, linestyle="--")
        side = "at least" if claim.bound.is_floor else "at most"
        text = f"claim: {side} {wording.number(claim.value)}" + (f" at {claim.point}" if claim.point else "")
        place = (0.02 + 0.48 * (index % 2), claim.value)
        note = ax.annotate(text, place, (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                           fontsize=8, color=BOUND, annotation_clip=True, **ON_TOP)  # fmt: skip
        note.set_in_layout(False)


def _marks(ax: Axes, panel: PanelSpec, claims: Sequence[Claim], places: Mapping[str, float]) -> None:
    label: str | None = "bound of a claim"
    for claim in claims:
        x = places[claim.point]
        if panel.kind is PanelKind.bars:
            ax.plot([x - 0.46, x + 0.46], [claim.value] * 2, color=BOUND, linewidth=1.6, zorder=5, label=label)
        else:
            ax.plot([x], [claim.value], "_", color=BOUND, markersize=17, markeredgewidth=1.8, zorder=5, label=label)
        label = None


def _places(values: Sequence[Any]) -> tuple[Mapping[Any, float], list[str] | None]:
    """Where values stand on an axis, and their names where they are no numbers."""
    distinct = list(dict.fromkeys(values))
    if all(_is_number(value) for value in distinct):
        return {value: float(value) for value in distinct}, None
    return {value: float(index) for index, value in enumerate(distinct)}, [str(value) for value in distinct]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rest(settings: Mapping[str, Any], x: str) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key != x)


def _has_log_y(panel: PanelSpec, result: Result) -> bool:
    return panel.log_y and all(row.value > 0 for row in result.rows if row.valid and row.metric == panel.metric)


def _log(axis: Axis, ax: Axes, is_x: bool) -> None:
    (ax.set_xscale if is_x else ax.set_yscale)("log")
    low, high = axis.get_view_interval()
    _plain(axis, high / low)


def _linear(axis: Axis, ticks: int) -> None:
    axis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def _plain(axis: Axis, span: float) -> None:
    """Ticks of a log axis as numbers that a person reads: 0.5 20 1,000 instead of powers."""
    subs = (1.0, 2.0, 5.0) if span < 300 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_formatter(NullFormatter())


def _dots(ax: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    ax.plot(x, y, ".", color=INK, markersize=3, alpha=0.6, zorder=4)


def _nothing(ax: Axes, why: str) -> None:
    ax.annotate(why, (0.5, 0.5), xycoords="axes fraction", ha="center", color=INK, fontsize=9)
    ax.set_xticks([])
    ax.set_yticks([])
