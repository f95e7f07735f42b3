"""Cost against latency: every layout that a planner simulated, and as a line those that no other beats in both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from experiments.lab.judge import stats
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import COLOURS, INK, MARKERS
from experiments.lab.spec import OF_BOUND, SHAPE, PanelSpec
from experiments.lab.store.result import Result

PLAIN = (1, 0, "none", None)  # values of SHAPE that need not be named


def draw(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """A colour a shape of layout; hollow, and not on the line, where steps are bounds, which no engine keeps."""
    assert panel.x is not None
    (variant,), table = result.info.variants, result.table
    every = {p: [table.values(variant, p, metric) for metric in (panel.x, panel.metric)] for p in result.info.points}
    found = {p: (next(iter(x.values())), next(iter(y.values()))) for p, (x, y) in every.items() if x and y}
    measured = [at for point, at in found.items() if OF_BOUND not in point]
    front = stats.front(measured, lambda at: at)
    if front:
        places = [*(a for a, _ in front), max(a for a, _ in found.values())]
        ax.step(places, [*(b for _, b in front), front[-1][1]], where="post", color=INK, linewidth=1,
                label="nothing is better in both")  # fmt: skip
    # The winner is the last, and has the first colour.
    shapes = list(dict.fromkeys(_shape(result.info.points[point]) for point in reversed(found)))
    for point, (x, y) in reversed(found.items()):
        index, bound = shapes.index(_shape(result.info.points[point])), OF_BOUND in point
        colour = COLOURS[index % len(COLOURS)]
        label = shapes[index] + (", a bound" if bound else "")
        fill, alpha = "white" if bound else colour, 1 if bound or (x, y) in front else 0.45
        (mark,) = ax.plot([x], [y], MARKERS[index % len(MARKERS)], color=colour, markersize=5.5, label=label,
                          markerfacecolor=fill, alpha=alpha)  # fmt: skip
        frame.says(mark, [f"{wording.point(point)}: {frame.plain(x)}, {wording.number(y)}"])
    if found:
        frame.log(ax.xaxis, ax, True)
        frame.from_zero(ax.yaxis, ax, False, 8)
        ax.set_xlabel(panel.x_label or frame.axis_label(result.info.metrics[panel.x], 44), fontsize=9)
        ax.set_ylabel(frame.axis_label(result.info.metrics[panel.metric], 36), fontsize=9)
    return bool(found)


def _shape(settings: Mapping[str, Any]) -> str:
    values = {key.rpartition(".")[2]: settings.get(key) for key in SHAPE}
    return wording.point(" ".join(f"{k}={v}" for k, v in values.items() if v not in PLAIN)) or "replicas"
