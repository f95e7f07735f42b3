"""Medians and their 95 % intervals, for error bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from experiments.lab.judge import stats
from experiments.lab.judge.metrics import Metric
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import wording
from experiments.lab.store.rows import Turn

Repeats = Mapping[Turn, float]
Estimator = Callable[[Repeats], Estimate]
WILD = 1000.0  # times its median: no axis shows as much of an interval


class Intervals(NamedTuple):
    """Of one series: medians, and distances to their ends below and above; NaN, which is not drawn, where there are
    none."""

    medians: list[float]
    errors: tuple[list[float], list[float]]


def of_metric(metric: Metric | None) -> Estimator:
    """Its repeats' estimate, which of a share stays between 0 and 1."""
    return partial(stats.absolute, share=metric is not None and metric.share)


def intervals(values: Iterable[Repeats], of: Estimator = stats.absolute) -> Intervals:
    """Of each place's repeats. What is a ratio already is estimated by `stats.factors`."""
    found = [of(repeats) for repeats in values]
    below = [math.nan if e.low is None else e.median - e.low for e in found]
    above = [math.nan if e.high is None else min(e.high - e.median, WILD * abs(e.median)) for e in found]
    return Intervals([e.median for e in found], (below, above))


def tip(name: str, where: str, repeats: Repeats, of: Estimator) -> str:
    """What a point says to the pointer."""
    estimate = wording.interval(of(repeats))
    return f"{', '.join(part for part in (name, where) if part)}: {estimate}, {len(repeats)} repeats"
