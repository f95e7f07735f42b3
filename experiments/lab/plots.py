"""Figures of a result: medians with their 95 % intervals and every repeat as a dot. The same result gives the same
bytes: no pyplot, default style, no metadata."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab import stats, wording
from experiments.lab.metrics import Better
from experiments.lab.rows import Table
from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store import Result

# Okabe and Ito's palette, which people with any colour vision can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
DARK = ("#0072B2", "#000000")  # white text is read on these, black text on the others
MARKERS = "os^Dv<>"
INK = "#404040"
FAR = 3  # a bound this many times above everything measured would only press the data flat
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.6  # inches


def draw(plot: PlotSpec, result: Result) -> bytes:
    """One figure as PNG bytes."""
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(PANEL_WIDTH * len(plot.panels), PANEL_HEIGHT), dpi=144, layout="constrained")
        axes = figure.subplots(1, len(plot.panels), squeeze=False)[0]
        for ax, panel in zip(axes, plot.panels, strict=True):
            _panel(ax, panel, result)
        handles, labels = axes[0].get_legend_handles_labels()
        if len(result.info.variants) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(plot.title, fontsize=12)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _panel(ax: Axes, panel: PanelSpec, result: Result) -> None:
    metric = result.info.metrics[panel.metric]
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.8)
    ax.set_axisbelow(True)
    if panel.kind is PanelKind.lines:
        _lines(ax, panel, result)
    else:
        _bars(ax, panel, result)
    if panel.log_y:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
    ax.set_ylabel(textwrap.fill(label, 34), fontsize=9)
    ax.set_title(f"{'higher' if metric.better is Better.higher else 'lower'} is better", fontsize=8, color=INK)
    ax.tick_params(labelsize=9)
    _limits(ax, panel, result)


def _bars(ax: Axes, panel: PanelSpec, result: Result) -> None:
    table, variants = Table(result.rows), list(result.info.variants.items())
    points = [p for p in result.info.points if any(table.values(v, p, panel.metric) for v, _ in variants)]
    width = 0.8 / len(variants)
    for column, (variant, label) in enumerate(variants):
        places, values = [], []
        for group, point in enumerate(points):
            found = table.values(variant, point, panel.metric)
            if found:
                places.append(group + (column - (len(variants) - 1) / 2) * width)
                values.append(list(found.values()))
        medians, errors = _with_errors(values)
        colour = COLOURS[column % len(COLOURS)]
        ax.bar(places, medians, width * 0.92, yerr=errors, color=colour, ecolor=INK, capsize=3, label=label)
        for place, median in zip(places, medians, strict=True):
            text = wording.number(median)
            ink = "white" if colour in DARK else "black"
            ax.annotate(text, (place, 0), (0, 3), textcoords="offset points", ha="center", color=ink, fontsize=8)
        _dots(ax, places, values)
    settings = [list(result.info.points[p].values()) for p in points]
    one_each = panel.x_label and all(len(values) == 1 for values in settings)  # the label says what the value is
    ax.set_xticks(range(len(points)), [str(s[0]) if one_each else p for p, s in zip(points, settings, strict=True)])
    ax.set_xlabel(panel.x_label, fontsize=9)


def _lines(ax: Axes, panel: PanelSpec, result: Result) -> None:
    table = Table(result.rows)
    assert panel.x is not None
    for row, (variant, label) in enumerate(result.info.variants.items()):
        places: list[float] = []
        values = []
        for point, settings in result.info.points.items():
            found = table.values(variant, point, panel.metric)
            if panel.x in settings and found:
                places.append(settings[panel.x])
                values.append(list(found.values()))
        medians, errors = _with_errors(values)
        style: dict[str, Any] = {"color": COLOURS[row % len(COLOURS)], "marker": MARKERS[row % len(MARKERS)]}
        ax.errorbar(places, medians, yerr=errors, capsize=3, markersize=5, label=label, **style)
        if panel.log_x:
            ax.set_xscale("log", base=2 if max(places, default=1) < 100_000 else 10)
        shown = places if panel.log_x else _spread(places)
        ax.set_xticks(shown, [f"{place:,}" for place in shown])
        ax.minorticks_off()
    ax.set_xlabel(panel.x_label or panel.x, fontsize=9)


def _limits(ax: Axes, panel: PanelSpec, result: Result) -> None:
    """The bound of an absolute claim about this metric, at its point."""
    for claim in result.info.claims:
        if claim.metric != panel.metric or claim.bound.is_ratio:
            continue
        top = ax.get_ylim()[1]
        if claim.value > FAR * top:
            continue
        ax.axhline(claim.value, color="#D55E00", linewidth=1, linestyle="--")
        ax.set_ylim(top=max(top, 1.12 * claim.value))
        side = "at least" if claim.bound.is_floor else "at most"
        text = f"claim: {side} {wording.number(claim.value)} at {claim.point}"
        ax.annotate(text, (0.02, claim.value), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                    fontsize=8, color="#D55E00", annotation_clip=True)  # fmt: skip


def _spread(places: Sequence[float]) -> list[float]:
    """Ticks of a linear axis that leave each other room for a label, the largest first."""
    room = 0.09 * (max(places, default=0) - min(places, default=0))
    shown: list[float] = []
    for place in sorted(places, reverse=True):
        if not shown or shown[-1] - place >= room:
            shown.append(place)
    return shown


def _with_errors(values: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and the distances from them to the ends of their intervals."""
    found = [stats.estimate(v) for v in values]
    below = [0.0 if e.low is None else max(e.median - e.low, 0.0) for e in found]
    above = [0.0 if e.high is None else max(e.high - e.median, 0.0) for e in found]
    return [e.median for e in found], [below, above]


def _dots(ax: Axes, places: Sequence[float], values: Sequence[Sequence[float]]) -> None:
    for place, repeats in zip(places, values, strict=True):
        ax.plot([place] * len(repeats), repeats, ".", color=INK, markersize=3, alpha=0.6)
