"""The single requests and tokens behind a metric, as curves."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from experiments.lab.judge import distributions
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.style import line_style
from experiments.lab.store.result import Result


def draw(ax: Axes, metric: str, result: Result) -> bool:
    """The share of requests, or of tokens, that took longer than the time on the x axis: a straight look at the tail,
    where 1 % on the y axis is the P99."""
    shown = distributions.of(metric, result)
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
        frame.log(ax.xaxis, ax, True)
    ax.set_yscale("log")
    ax.set_ylim(max(smallest / 1.5, 0.01), 130)
    frame.log_ticks(ax.yaxis, 1000)
    ax.set_xlabel(shown.label, fontsize=9)
    ax.set_ylabel(f"share of {shown.what} above (%)", fontsize=9)
    return True
