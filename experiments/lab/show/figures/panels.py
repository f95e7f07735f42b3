"""The figures that an experiment's YAML asks for: panels side by side. What colour tells is told again by hatches,
markers and line styles, so that a figure can be read printed in grey."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.judge.metrics import Better
from experiments.lab.show import wording
from experiments.lab.show.figures import bars, formula, frame, gantt, lines, matrix, stacks
from experiments.lab.show.figures.frame import INK
from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store.result import Result

NO_VALUE = "no valid value"
PANELS_A_ROW = 3
PANEL_HEIGHT = 3.5
WHOLE = {PanelKind.stack: stacks.of_metrics, PanelKind.gantt: gantt.draw}  # which are the only panel of a figure


def draw(plot: PlotSpec, result: Result) -> Figure:
    own = [_shown(panel, result) for panel in plot.panels]
    if plot.panels[0].kind in WHOLE:
        return _whole(plot.panels[0], own[0])
    columns = 2 if len(own) == 4 else min(len(own), PANELS_A_ROW)
    rows = -(-len(own) // columns)
    width = frame.WIDTH if columns > 1 else 0.7 * frame.WIDTH
    flat = [bars.of(panel, each) if panel.kind is PanelKind.bars else None
            for panel, each in zip(plot.panels, own, strict=True)]  # fmt: skip
    height = max([1.6 if all(flat) else PANEL_HEIGHT, *(1.1 + each.height for each in flat if each)])
    figure = frame.new(width, rows * height + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for index, (ax, panel, each) in enumerate(zip(axes, plot.panels, own, strict=False)):
        frame.tidy(ax, "x" if flat[index] else "y")
        before, here = flat[index - 1] if index % columns else None, flat[index]
        named = here is None or before is None or before.names != here.names
        why = _panel(ax, panel, each, here, named)
        if why:
            frame.nothing(ax, why)
    for ax in axes[len(own) :]:
        ax.set_visible(False)
    frame.legend(figure, axes)
    return figure


def _whole(panel: PanelSpec, result: Result) -> Figure:
    figure = WHOLE[panel.kind](panel, result)
    if figure is None:
        figure, ax = frame.one(PANEL_HEIGHT)
        frame.nothing(ax, NO_VALUE)
    return figure


def _panel(ax: Axes, panel: PanelSpec, result: Result, groups: bars.Groups | None, named: bool) -> str:
    """Why there is nothing to draw; else empty. `groups`: of bars; `named`: whether they are."""
    metric = result.info.metrics.get(panel.metric)
    if metric is None or (panel.kind is PanelKind.curve and panel.x not in result.info.metrics):
        return f"{panel.metric}: not measured in this run"  # which may have chosen other metrics
    told = {key.rpartition(".")[2]: lines.plain_setting(value) for key, value in panel.where.items()}
    words = [value if key == "case" else wording.point(f"{key}={value}") for key, value in told.items()]
    words.append(f"{'higher' if metric.better is Better.higher else 'lower'} is better")
    ax.set_title(", ".join(words), fontsize=8, color=INK)
    if panel.kind is PanelKind.matrix:
        return "" if matrix.draw(ax, panel.metric, result) else NO_VALUE
    if panel.kind is PanelKind.formula:
        return "" if formula.draw(ax, panel, result) else NO_VALUE
    if groups is not None:
        ax.set_xlabel(frame.axis_label(metric, 32), fontsize=9)
        return "" if bars.draw(ax, groups, named) else NO_VALUE
    is_curve = panel.kind is PanelKind.curve
    places = {} if is_curve else lines.draw(ax, panel, result)
    if not places and not (is_curve and lines.curve(ax, panel, result)):
        return NO_VALUE
    if lines.has_log_y(panel, result):
        frame.log(ax.yaxis, ax, False)
    elif not (metric.share and frame.near_one(ax.yaxis, ax, 8)):
        frame.from_zero(ax.yaxis, ax, False, 8)
    ax.set_ylabel(frame.axis_label(metric, 36), fontsize=9)
    lines.bounds(ax, panel, result, places)
    return ""


def _shown(panel: PanelSpec, result: Result) -> Result:
    """The result with the panel's own points alone, whose names leave out what they have in common."""
    if not panel.where:
        return result
    kept = {
        name: {key: value for key, value in settings.items() if key not in panel.where}
        for name, settings in result.info.points.items()
        if all(settings.get(key) == value for key, value in panel.where.items())
    }
    return replace(result, info=replace(result.info, points=kept))
