"""Statistics of repeated measurements: medians, bootstrap intervals, paired ratios, order of variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")

LEVEL = 0.95
RESAMPLES = 10_000
SAMPLES_BEYOND = 10  # a percentile is shown where at least this many samples lie beyond it: P99 takes 1,000


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval. One value has no interval: `low` and `high` are None then."""

    median: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Line:
    slope: float
    intercept: float
    r_squared: float


def median(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("the median of no values is not defined")
    return float(np.median(np.asarray(values, dtype=np.float64)))


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median with a percentile bootstrap interval (Efron 1979), the same for the same values.

    With n values the interval can reach no further than [min, max], which holds the true median with
    probability 1 - 2^(1 - n): below six repeats that is less than 95 %.
    """
    centre = median(values)
    n = len(values)
    if n == 1:
        return Estimate(centre, None, None, 1)
    rng = np.random.default_rng(seed)
    resampled = np.asarray(values, dtype=np.float64)[rng.integers(0, n, size=(RESAMPLES, n))]
    low, high = np.quantile(np.median(resampled, axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(centre, float(low), float(high), n)


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The ratio values / baseline, taken repeat by repeat: what slows a whole repeat down cancels out."""
    if len(values) != len(baseline):
        raise ValueError(f"a paired ratio needs as many values as baselines, got {len(values)} and {len(baseline)}")
    if any(b <= 0 for b in baseline):
        raise ValueError("a ratio needs baselines above 0")
    return estimate([v / b for v, b in zip(values, baseline, strict=True)])


def abba(variants: Sequence[T], repeat: int) -> list[T]:
    """The order of the variants in one repeat: A B, then B A, then A B ... so that a drift hits all alike."""
    return list(variants) if repeat % 2 == 0 else list(reversed(variants))


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, or None where the sample is too small to show it."""
    if len(values) * (100 - q) < SAMPLES_BEYOND * 100:
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares; `r_squared` is the share of y's variance that the line explains."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) < 3:
        raise ValueError(f"a fit needs at least three points, got {len(xs)}")
    slope, intercept = np.polyfit(xs, ys, 1)
    residual = float(np.sum((ys - (slope * xs + intercept)) ** 2))
    total = float(np.sum((ys - ys.mean()) ** 2))
    return Line(float(slope), float(intercept), 1.0 if total == 0 else 1 - residual / total)
