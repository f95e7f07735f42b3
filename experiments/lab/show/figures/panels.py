"""The figures that an experiment's YAML asks for: panels side by side. What colour tells is told again by hatches,
markers and line styles, so that a figure can be read printed in grey."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.judge.metrics import Better
from experiments.lab.show.figures import bars, distribution, formula, frame, limits, lines, matrix, points
from experiments.lab.show.figures.style import INK
from experiments.lab.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.store.result import Result

PANELS_A_ROW = 3
PANEL_HEIGHT = 3.5
ROW_HEIGHT = 0.5  # of a row of bars


def draw(plot: PlotSpec, result: Result) -> Figure:
    """The baseline's second arm stands in the tables alone."""
    info = result.info
    result = replace(result, info=replace(info, variants={v: n for v, n in info.variants.items() if v != info.aa}))
    with frame.default_style():
        columns = 2 if len(plot.panels) == 4 else min(len(plot.panels), PANELS_A_ROW)
        rows = -(-len(plot.panels) // columns)
        width = frame.WIDTH if columns > 1 else 0.7 * frame.WIDTH
        flat = [bars.rows_of(panel, _shown(panel, result)) for panel in plot.panels]
        longest = max((len(each.names) for each in flat if each), default=0)
        height = max(1.6 if all(flat) else PANEL_HEIGHT, 1.1 + ROW_HEIGHT * longest)
        figure = frame.new(width, rows * height + 0.6)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for index, (panel, own) in enumerate(zip(plot.panels, flat, strict=True)):
            before = flat[index - 1] if index % columns else None
            named = own is None or before is None or before.names != own.names
            _panel(axes[index], panel, result, width / columns, named)
        for ax in axes[len(plot.panels) :]:
            ax.set_visible(False)
        frame.legend(figure, axes)
        figure.suptitle(textwrap.fill(plot.title, 100), fontsize=12)
        return figure


def _panel(ax: Axes, panel: PanelSpec, result: Result, width: float, named: bool) -> None:
    if panel.kind is PanelKind.distribution:
        frame.tidy(ax)
        ax.set_title("lower is better", fontsize=8, color=INK)
        stored = distribution.draw(ax, panel.metric, result)
        return None if stored else frame.nothing(ax, "not stored for this run (experiment.timeline)")
    metric = result.info.metrics.get(panel.metric)
    if metric is None or (panel.kind is PanelKind.curve and panel.x not in result.info.metrics):
        return frame.nothing(ax, f"{panel.metric}: not measured in this run")  # which may have chosen other metrics
    result = _shown(panel, result)
    rows = bars.rows_of(panel, result)
    frame.tidy(ax, "x" if rows else "y")
    words = [f"{key.rpartition('.')[2]}={points.plain_setting(value)}" for key, value in panel.where.items()]
    words.append(f"{'higher' if metric.better is Better.higher else 'lower'} is better")
    ax.set_title(", ".join(words), fontsize=8, color=INK)
    if panel.kind is PanelKind.matrix:
        return None if matrix.draw(ax, panel.metric, result) else frame.nothing(ax, "no valid value")
    if panel.kind is PanelKind.formula:
        return None if formula.draw(ax, panel, result) else frame.nothing(ax, "no valid value")
    if rows is not None:
        if not bars.draw_rows(ax, rows, named):
            return frame.nothing(ax, "no valid value")
        ax.set_xlabel(frame.axis_label(metric, 32), fontsize=9)
        return None
    drawn: bool | dict[str, float]
    if panel.kind is PanelKind.bars:
        drawn = bars.draw(ax, panel, result, width)
    elif panel.kind is PanelKind.curve:
        drawn = lines.curve(ax, panel, result)
    else:
        drawn = lines.draw(ax, panel, result)
    if not drawn:
        return frame.nothing(ax, "no valid value")
    if lines.has_log_y(panel, result):
        frame.log(ax.yaxis, ax, False)
    else:
        ax.set_ylim(bottom=0)
        frame.linear(ax.yaxis, 8)
    ax.set_ylabel(frame.axis_label(metric, 36), fontsize=9)
    limits.draw(ax, panel, result, drawn if isinstance(drawn, dict) else {})
    return None


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
