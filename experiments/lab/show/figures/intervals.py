"""Medians and their 95 % intervals on axes that the medians rule. An interval that is very wide beside them is cut, and
seen to be: whole, it would press everything else flat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.markers import CARETDOWNBASE, CARETLEFTBASE, CARETRIGHTBASE, CARETUPBASE

from experiments.lab.judge import stats
from experiments.lab.judge.metrics import Metric
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import wording
from experiments.lab.show.figures.frame import INK
from experiments.lab.store.rows import Turn

Repeats = Mapping[Turn, float]
Estimator = Callable[[Repeats], Estimate]
SPARE = 1.0  # of what the medians take of an axis: on either side of them an interval may take as much
NOTE = "arrow: the interval goes on beyond the axis"
ARROW = 6.0  # points
_ARROWS = {"x": (CARETLEFTBASE, CARETRIGHTBASE), "y": (CARETDOWNBASE, CARETUPBASE)}


@dataclass(frozen=True)
class Reach:
    """How far intervals are drawn on an axis."""

    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Intervals:
    """Of one series.

    Attributes:
        errors: distances from the medians to the ends that are drawn, below and above; NaN, which is not drawn, where
            there is no interval.
        cut: likewise, whether the interval goes on from there.
    """

    medians: list[float]
    errors: tuple[list[float], list[float]]
    cut: tuple[list[bool], list[bool]]


def reach(estimates: Iterable[float], log: bool = False) -> Reach:
    """Of an axis for all of these, which starts at 0 unless it is logarithmic."""
    drawn = list(estimates)
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    if high <= 0:
        return Reach()
    if not log or low <= 0:
        return Reach(0.0, (1 + SPARE) * high)
    factor = max(1 + SPARE, (high / low) ** SPARE)
    return Reach(low / factor, high * factor)


def medians(values: Iterable[Repeats]) -> list[float]:
    """Of each place's repeats."""
    return [stats.absolute(repeats).median for repeats in values]


def of_metric(metric: Metric | None) -> Estimator:
    """Its repeats' estimate, which of a share stays between 0 and 1."""
    return partial(stats.absolute, share=metric is not None and metric.share)


def intervals(values: Iterable[Repeats], within: Reach, of: Estimator = stats.absolute) -> Intervals:
    """Of each place's repeats, as far as they are drawn. What is a ratio already is estimated by `stats.factors`."""
    found = Intervals([], ([], []), ([], []))
    for estimate in map(of, values):
        centre = estimate.median
        low, high = (math.nan if end is None else end for end in (estimate.low, estimate.high))
        found.medians.append(centre)
        found.errors[0].append(max(centre - max(low, within.low), 0.0))  # the order matters: NaN stays NaN
        found.errors[1].append(max(min(high, within.high) - centre, 0.0))
        found.cut[0].append(low < within.low)
        found.cut[1].append(high > within.high)
    return found


def mark_cut(
    ax: Axes, places: Sequence[float], found: Intervals, axis: Literal["x", "y"] = "y", colour: str = INK
) -> None:
    """Arrows where intervals go on, and what they mean, below the panel's title.

    Args:
        places: of the series on the other axis.
        axis: that the values are on.
    """
    for side, (sign, arrow) in enumerate(zip((-1, 1), _ARROWS[axis], strict=True)):
        series = zip(places, found.medians, found.errors[side], found.cut[side], strict=True)
        ends = [(place, median + sign * error) for place, median, error, cut in series if cut]
        if ends:
            at, value = zip(*ends, strict=True)
            x, y = (at, value) if axis == "y" else (value, at)
            ax.plot(x, y, linestyle="none", marker=arrow, color=colour, markersize=ARROW, clip_on=False, zorder=5)
    if any(map(any, found.cut)) and NOTE not in ax.get_title():
        ax.set_title(f"{ax.get_title()}\n{NOTE}".lstrip(), fontsize=8, color=INK)


def tip(name: str, where: str, repeats: Repeats, of: Estimator) -> str:
    """What a point says to the pointer."""
    estimate = wording.interval(of(repeats))
    return f"{', '.join(part for part in (name, where) if part)}: {estimate}, {len(repeats)} repeats"
