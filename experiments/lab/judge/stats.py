"""Statistics of repeated measurements: medians, 95 % intervals, paired ratios, order of variants, percentiles.

A result is made of processes, and of repeats in each. `absolute`, `factors`, `ratio` and `apart` take values by
(process, repeat) and know both levels; docs/metrics.md says how, and has the measured coverage of the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.lab.store.rows import Turn

T = TypeVar("T")

Z = NormalDist().inv_cdf(0.975)  # both sides together leave out 5 %
SAMPLES_BEYOND = 10  # a percentile is shown where at least this many samples lie beyond it: P99 takes 1,000
MEDIAN_SAMPLES = 10  # a median of requests or gaps takes this many
DIFFER_Z = NormalDist().inv_cdf(0.75)  # see `processes_differ`
FEW = 3  # values, which can be told one by one
OFTEN = 0.8  # of runs: what so many show can be relied on


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval. One value has no interval: `low` and `high` are None then."""

    median: float
    low: float | None
    high: float | None
    n: int  # values, of all processes
    processes: int = 1  # that the values come from
    beyond: str = ""  # "> " or "< " of a knee that lies outside of the searched range, of which `median` is the end
    few: tuple[float, ...] = ()  # the values that it rests on, where they are two or three: an interval is wide then
    uncut: tuple[float, float] | None = None  # of knees: the interval beyond the rates that were searched

    @property
    def judged(self) -> tuple[float, float] | None:
        """The ends by which anything is shown: an interval that was cut shows nothing of what lies beyond its ends."""
        return self.uncut or (None if self.low is None or self.high is None else (self.low, self.high))

    def spans(self, times: float) -> bool:
        """Whether the interval reaches from its lower end to more than so many times it."""
        return self.judged is not None and self.judged[1] > times * self.judged[0]

    @property
    def told(self) -> int:
        """Of a ratio: 1 where the whole interval lies above 1, -1 where it lies below, 0 where nothing is shown."""
        low, high = self.judged or (1.0, 1.0)
        return 1 if low > 1 else -1 if high < 1 else 0

    def apart_from(self, other: Estimate) -> bool:
        """Whether the two intervals have no more than an end in common."""
        if self.judged is None or other.judged is None:
            return False
        return max(self.judged[0], other.judged[0]) >= min(self.judged[1], other.judged[1])


class Kept(float):
    """The highest rate at which a search saw its promise kept, 0 where even the lowest rate missed it. The knee lies
    between it and `missed`, the lowest rate that missed it; infinity where even the highest rate kept it. `searched`
    are the ends of the range: what a search can find is one of its rates, or that the knee lies outside."""

    missed: float
    searched: tuple[float, float]

    def __new__(cls, kept: float, missed: float, searched: tuple[float, float] = (0.0, math.inf)) -> Kept:
        knee = super().__new__(cls, kept)
        knee.missed, knee.searched = missed, searched
        return knee

    @property
    def in_range(self) -> bool:
        return self > 0 and math.isfinite(self.missed)


class Part(float):
    """What is left of `whole`, as of a rate that was offered: never more than that."""

    whole: float

    def __new__(cls, part: float, whole: float) -> Part:
        left = super().__new__(cls, part)
        left.whole = whole
        return left


def estimate(values: Sequence[float]) -> Estimate:
    """The median, with a Student t interval of the mean (Student 1908): of the logarithms where all values are above
    0, as times, rates and ratios are, which vary by factors; else of the values. docs/metrics.md says why."""
    centre, n = float(median(values)), len(values)
    if n == 1:
        return Estimate(centre, None, None, 1)
    if min(values) == max(values):
        return Estimate(centre, centre, centre, n)
    y, back = _additive(values)
    middle, half = float(y.mean()), t_quantile(n - 1) * float(y.std(ddof=1)) / math.sqrt(n)
    found = _around(centre, back(middle - half), back(middle + half), n)
    return replace(found, few=tuple(sorted(values))) if n <= FEW else found


def _additive(values: Sequence[float]) -> tuple[np.ndarray, Callable[[float], float]]:
    """Numbers whose noise adds up, the logarithms where all values are above 0; and the way back from them."""
    x = np.asarray(values, dtype=np.float64)
    back = lambda y: math.exp(min(max(y, -700.0), 700.0))  # noqa: E731  # two wild values have an interval without end
    return (np.log(x), back) if x.min() > 0 else (x, float)


def _around(centre: float, low: float, high: float, n: int) -> Estimate:
    return Estimate(centre, min(low, centre), max(high, centre), n)


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t: exact for 1 and 2, else within 0.2 % (Abramowitz and Stegun 1964, 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, v = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def absolute(values: Mapping[Turn, float], share: bool = False) -> Estimate:
    """The median of the processes' medians, with the interval of what varies between them, or between the repeats of
    one. That of values none of which is below 0 is not either, and that of a share stays below 1, of a part below its
    whole.

    That of knees reaches from rates that were kept to rates that were missed, and is open where a knee lies outside of
    the range. A knee that was found is one of the rates of a grid, so no interval tells more of it than the searched
    range: its ends are cut there. What is judged by it is judged by `uncut`, as few searches do not show that another
    one would end inside of the range."""
    found = estimate(independent(values))
    if _knees(values):  # from the rates that were kept up to those that were missed
        missed = independent(_missed(values))
        if found.low is not None:
            high = estimate(missed).high if math.isfinite(max(missed)) else math.inf
            low = found.low if min(independent(values)) > 0 else 0.0
            found = _cut(replace(found, low=low, high=high, few=found.few if in_range(values) else ()), values, {})
        end = float(median(missed))
        beyond = {"median": end, "beyond": "< "} if found.median == 0 else {"beyond": "> " if math.isinf(end) else ""}
        found = replace(found, **beyond)
    if found.low is not None and found.high is not None:
        low = max(found.low, 0.0) if min(values.values()) >= 0 else found.low
        most = 1.0 if share else min((v.whole for v in values.values() if isinstance(v, Part)), default=math.inf)
        found = replace(found, low=low, high=min(found.high, max(most, found.median)))
    return replace(found, n=len(values), processes=len(by_process(values)))


def factors(values: Mapping[Turn, float]) -> Estimate:
    """The median of the processes' medians of paired quantities, such as ratios within a repeat, with the interval of
    all of them together; where they differ between processes, of what varies between processes."""
    centre, found = float(median(independent(values))), estimate(_judged_by(values))
    if found.low is not None and found.high is not None:
        found = replace(_around(centre, found.low, found.high, len(values)), few=found.few)
    return replace(found, median=centre, n=len(values), processes=len(by_process(values)))


def _judged_by(values: Mapping[Turn, float]) -> list[float]:
    """What their interval is taken of: all of them, or the means of processes that differ."""
    groups = by_process(values)
    if not processes_differ(groups):
        return list(values.values())
    return [back(float(y.mean())) for y, back in map(_additive, groups)]  # the means that `estimate` compares


def ratio(values: Mapping[Turn, float], baseline: Mapping[Turn, float]) -> Estimate | None:
    """values / baseline, paired by process and repeat, over those that both have: what slows a whole repeat down
    cancels out. None where the median of either is 0, or no pair has a baseline above 0: pairs that are left out then
    would choose those that count. None, too, where a knee lies outside of the searched range."""
    shared = {turn: value for turn, value in values.items() if turn in baseline}
    if not in_range(shared) or not in_range({turn: baseline[turn] for turn in shared}):
        return None
    if not paired(shared, baseline) or 0 in (median(shared.values()), median(baseline[turn] for turn in shared)):
        return None
    return _between_knees(lambda values, baseline: factors(paired(values, baseline)), shared, baseline)


def paired(values: Mapping[Turn, float], baseline: Mapping[Turn, float]) -> dict[Turn, float]:
    """Ratios, repeat by repeat, of those that both have, where the baseline is above 0."""
    return {turn: value / baseline[turn] for turn, value in values.items() if baseline.get(turn, 0) > 0}


class Power(NamedTuple):
    share: float  # of such runs that would show the ratio that was asked for
    often: float  # the ratio nearest to 1, to the same side of it, that `OFTEN` of them would show


def power(values: Mapping[Turn, float], baseline: Mapping[Turn, float], true: float) -> Power | None:
    """What runs with the spread of this one would show if their ratio were really `true`, which is not 1: how many have
    an interval, as that of `ratio`, that lies on that side of 1. None without a pair, and of knees.

    An interval as wide as this run's, t standard errors to either side, is laid around middles that scatter by this
    run's standard error. The mean over many runs is near the share of them that find the difference (docs/metrics.md).
    That of a noncentral t, with the same standard error, is too high where processes are few."""
    pairs = paired(values, baseline)
    if not pairs or _knees(values):
        return None
    judged = _judged_by(pairs)
    if len(judged) == 1:
        return Power(0.0, math.inf if true > 1 else 0.0)
    y, back = _additive(judged)
    one, aim = map(math.log if min(judged) > 0 else float, (1.0, true))
    error, t = float(y.std(ddof=1)) / math.sqrt(len(y)), t_quantile(len(y) - 1)
    share = NormalDist().cdf(abs(aim - one) / error - t) if error else 1.0
    return Power(share, back(one + math.copysign(error * (t + NormalDist().inv_cdf(OFTEN)), true - 1)))


def apart(values: Mapping[Turn, float], baseline: Mapping[Turn, float]) -> Estimate:
    """The ratio of two results that were measured apart, by what varies between processes, or repeats of one."""
    found = _between_knees(lambda a, b: unpaired_ratio(independent(a), independent(b)), values, baseline)
    return replace(found, processes=min(len(by_process(values)), len(by_process(baseline))))


def in_range(values: Mapping[Turn, float]) -> bool:
    """Whether every knee among them lies inside of the range that was searched."""
    return all(knee.in_range for knee in _knees(values))


def _knees(values: Mapping[Turn, float]) -> list[Kept]:
    return [value for value in values.values() if isinstance(value, Kept)]


def _missed(values: Mapping[Turn, float]) -> dict[Turn, float]:
    return {turn: value.missed if isinstance(value, Kept) else value for turn, value in values.items()}


def _between_knees(
    of: Callable[[Mapping[Turn, float], Mapping[Turn, float]], Estimate],
    values: Mapping[Turn, float],
    baseline: Mapping[Turn, float],
) -> Estimate:
    """`of` both; of knees, with the interval from the least that their rates allow to the most, cut at the ends of what
    the searched ranges can give: from the lowest rate over the baseline's highest to the highest over its lowest."""
    found = of(values, baseline)
    if not _knees(values):
        return found
    low, high = of(values, _missed(baseline)).low, of(_missed(values), baseline).high
    return _cut(replace(found, low=low, high=high), values, baseline)


def _cut(found: Estimate, values: Mapping[Turn, float], baseline: Mapping[Turn, float]) -> Estimate:
    """Without what lies beyond the ends of the searched range; an end that is open, or 0, stays so."""
    if found.low is None or found.high is None:
        return found
    (lowest, highest), (least, most) = _searched(values), _searched(baseline) if baseline else (1.0, 1.0)
    low = max(found.low, lowest / most) if found.low > 0 else 0.0
    high = min(found.high, highest / least if least else math.inf) if math.isfinite(found.high) else math.inf
    uncut = (found.low, found.high)
    return found if uncut == (low, high) else replace(found, low=low, high=high, uncut=uncut)


def _searched(values: Mapping[Turn, float]) -> tuple[float, float]:
    """The ends of the range of rates in which knees were searched; all numbers above 0 of what is none."""
    ends = [knee.searched for knee in _knees(values)] or [(0.0, math.inf)]
    return min(low for low, _ in ends), max(high for _, high in ends)


def independent(values: Mapping[Turn, float]) -> list[float]:
    """The values that count as drawn apart from each other: each process's median; of one process its repeats."""
    groups = by_process(values)
    return [median(group) for group in groups] if len(groups) > 1 else list(values.values())


def processes_differ(groups: Sequence[Sequence[float]]) -> bool:
    """Whether values differ between processes by more than they do within them: an F test at the 25 % level, which
    Bancroft (1964) recommends before pooling, by Paulson's approximation (1942)."""
    if len(groups) < 2 or max(len(group) for group in groups) < 2:
        return False
    every = [value for group in groups for value in group]
    logs = [np.log(group) if min(every) > 0 else np.asarray(group, dtype=np.float64) for group in groups]
    a, b = len(groups) - 1, len(every) - len(groups)
    middle = float(np.mean(np.concatenate(logs)))
    between = sum(len(group) * (float(group.mean()) - middle) ** 2 for group in logs) / a
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in logs) / b
    if within == 0:
        return between > 0
    root = (between / within) ** (1 / 3)
    z = ((1 - 2 / (9 * b)) * root - (1 - 2 / (9 * a))) / math.sqrt(2 / (9 * b) * root**2 + 2 / (9 * a))
    return z > DIFFER_Z


def by_process(values: Mapping[Turn, float]) -> list[list[float]]:
    processes = dict.fromkeys(process for process, _ in values)
    return [[value for (own, _), value in values.items() if own == process] for process in processes]


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The ratio of two medians that were measured apart, with the interval of Welch's t (Welch 1947) on logarithms:
    nothing cancels out, so the noise of both counts."""
    if any(v <= 0 for v in (*values, *baseline)):
        raise ValueError("a ratio needs values above 0")
    centre = median(values) / median(baseline)
    sizes = (len(values), len(baseline))
    if min(sizes) < 2:
        return Estimate(centre, None, None, min(sizes))
    (x, back), (y, _) = _additive(values), _additive(baseline)
    a, b = float(x.var(ddof=1)) / sizes[0], float(y.var(ddof=1)) / sizes[1]
    freedom = 1 if a + b == 0 else max(1, int((a + b) ** 2 / (a**2 / (sizes[0] - 1) + b**2 / (sizes[1] - 1))))
    middle, half = float(x.mean() - y.mean()), t_quantile(freedom) * math.sqrt(a + b)
    return _around(centre, back(middle - half), back(middle + half), min(sizes))


def abba(variants: Sequence[T], repeat: int) -> list[T]:
    """The order of the variants in one repeat: A B, then B A, then A B ... so that a drift hits all alike."""
    return list(variants) if repeat % 2 == 0 else list(reversed(variants))


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile, or None where the sample is too small to show it."""
    if len(values) < samples_needed(q):
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def samples_needed(q: float) -> int:
    """P99 takes 1,000 samples, P95 200, P90 100, P50 10."""
    return MEDIAN_SAMPLES if q <= 50 else math.ceil(round(100 * SAMPLES_BEYOND / (100 - q), 6))


def front(found: Iterable[T], place: Callable[[T], tuple[float, float]]) -> list[T]:
    """Those that no other beats in two numbers, of which less is better (Pareto), by the first of them."""
    kept: list[T] = []
    for one in sorted(found, key=place):
        if not kept or place(one)[1] < place(kept[-1])[1]:
            kept.append(one)
    return kept
