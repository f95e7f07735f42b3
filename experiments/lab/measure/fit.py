"""Costs of steps (mini_infer/simulation/costs.py), fitted to steps that were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.lab.measure.traces import StepRow
from mini_infer.simulation.costs import ATTENTION, Curve, FittedCosts, StepCosts, Work

MOST_KNOTS = 24  # of a curve
OUTLIERS = 5.0  # times the median error: a step that is further off met something else than its work
MIN_STEPS = 20  # of each kind, for a fit

Array = NDArray[np.float64]


class MeasuredStep(NamedTuple):
    work: Work
    rows: int
    device_s: float
    host_s: float


def device_seconds(rows: Sequence[StepRow], overlap: bool) -> list[float]:
    """What the device took for each of an engine's steps, in their order. Where steps overlap, the device works from
    the end of one to that of the next while there is something to do, and the host beside it costs nothing."""
    found, end, busy = [], -math.inf, False
    for row in rows:
        ended = row.start_s + row.duration_s
        took = ended - (end if busy else row.start_s)
        found.append(took if busy and overlap else took - (row.host_s or 0.0))
        end, busy = ended, row.num_running + row.num_prefilling + row.num_waiting + row.num_swapped > 0
    return found


@dataclass(frozen=True)
class Residuals:
    """How far predictions are from steps that were measured: shares of the measured time."""

    steps: int
    median: float
    p90: float
    bias: float  # of all steps' time together; above 0 where too much is predicted


@dataclass(frozen=True)
class Fit:
    costs: FittedCosts
    left_out: int  # steps that met something else than their work
    residuals: dict[str, Residuals] = field(default_factory=dict)  # by kind of step, of those that the fit has seen


KINDS: dict[str, Callable[[Work], bool]] = {
    "decode": lambda work: not work.prompt_tokens,
    "prompts": lambda work: work.prompt_tokens > 0,
}


def fit(steps: Sequence[MeasuredStep], block_s: float = 0.0) -> Fit:
    """The costs that come nearest to all steps alike, whatever they take: least squares of relative errors, with no
    cost below zero. ValueError where there are too few steps of a kind."""
    steps = [step for step in steps if step.device_s > 0]
    for kind, is_kind in KINDS.items():
        count = sum(is_kind(step.work) for step in steps)
        if count < MIN_STEPS:
            raise ValueError(f"{count} steps of the kind {kind!r} are too few for a fit, which takes {MIN_STEPS}")
    costs = _fit(steps, block_s)
    errors = np.abs(_errors(costs, steps))
    near = errors <= max(OUTLIERS * float(np.median(errors)), 0.1)
    kept = [step for step, is_near in zip(steps, near.tolist(), strict=True) if is_near]
    costs = _fit(kept, block_s)
    return Fit(costs, len(steps) - len(kept), residuals(costs, kept))


def residuals(costs: StepCosts, steps: Sequence[MeasuredStep]) -> dict[str, Residuals]:
    found = {}
    for kind, is_kind in KINDS.items():
        if own := [step for step in steps if is_kind(step.work)]:
            errors, seconds = _errors(costs, own), np.array([step.device_s for step in own])
            median, p90 = np.percentile(np.abs(errors), [50, 90])
            found[kind] = Residuals(len(own), float(median), float(p90), float(errors @ seconds / seconds.sum()))
    return found


def _errors(costs: StepCosts, steps: Sequence[MeasuredStep]) -> Array:
    return np.array([costs.device_s(step.work) / step.device_s - 1 for step in steps])


def _fit(steps: Sequence[MeasuredStep], block_s: float) -> FittedCosts:
    seconds = np.array([step.device_s for step in steps])
    work = np.array([step.work for step in steps], dtype=float)
    tokens, with_prompts = work[:, 0] + work[:, 1], work[:, 1] > 0
    # Rows beside prompts add up to numbers of tokens that mean nothing: knots are those of prompts alone.
    alone = tokens[with_prompts & (work[:, 0] == 0)]
    most = tokens[with_prompts].max()
    knots = [_knots(tokens[~with_prompts]), np.union1d(_knots(alone if alone.size else tokens[with_prompts]), [most])]
    curves = zip(knots, (~with_prompts, with_prompts), strict=True)
    columns = [_rises(tokens, own) * of_kind[:, None] for own, of_kind in curves]
    matrix = np.column_stack([*columns, work[:, 2:6], work[:, 0] * with_prompts])
    solution = nonnegative(matrix / seconds[:, None], np.ones(len(steps)))
    decode, prompts = (
        Curve(tuple(int(t) for t in own), tuple(np.cumsum(rise).tolist()))
        for own, rise in zip(knots, np.split(solution[:-5], [len(knots[0])]), strict=True)
    )
    attention = dict(zip(ATTENTION, solution[-5:].tolist(), strict=True))
    rows = np.column_stack([np.ones(len(steps)), [step.rows for step in steps]])
    plan_s, row_s = nonnegative(rows, np.array([step.host_s for step in steps])).tolist()
    return FittedCosts(decode, prompts, plan_s=plan_s, row_s=row_s, block_s=block_s, **attention)


def _knots(tokens: Array) -> Array:
    """Measured numbers of tokens; of many, the ends and the most frequent ones of equal stretches of logarithms."""
    known, counts = np.unique(tokens, return_counts=True)
    if len(known) <= MOST_KNOTS:
        return known
    ends = np.geomspace(known[0], known[-1], MOST_KNOTS)
    stretch = np.searchsorted(ends, known)
    often = [known[stretch == s][counts[stretch == s].argmax()] for s in np.unique(stretch)]
    return np.unique([known[0], *often, known[-1]])


def _rises(tokens: Array, knots: Array) -> Array:
    """[N, K]: of each number of tokens, how much of the first knot's height (all of it) and of each rise between two
    knots it has; behind the last knot the last rise goes on."""
    widths = np.diff(knots)
    shares = (tokens[:, None] - knots[:-1]) / widths
    shares[:, :-1] = np.minimum(shares[:, :-1], 1.0)
    return np.column_stack([np.ones(len(tokens)), np.maximum(shares, 0.0)])


def nonnegative(matrix: Array, target: Array) -> Array:
    """Least squares with no x below 0 (Lawson and Hanson 1974, "Solving least squares problems", chapter 23): one
    variable after the other is freed, as long as that helps, and held at 0 again where it would fall below."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    gram, moments = matrix.T @ matrix, matrix.T @ target
    x, free = np.zeros(len(moments)), np.zeros(len(moments), dtype=bool)
    for _ in range(3 * len(moments)):
        gain = np.where(free, -np.inf, moments - gram @ x)
        best = int(gain.argmax())
        if gain[best] <= 1e-10 * max(1.0, float(np.abs(moments).max())):
            break
        free[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moments[free], rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            share = float(np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300)))
            x = x + share * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = trial
    return x / scale
