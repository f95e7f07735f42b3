"""Costs of steps (mini_infer/simulation/costs.py), fitted to steps that were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.lab.measure.traces import StepRow
from mini_infer.simulation.costs import ATTENTION, OF_HEAT, Curve, FittedCosts, Heat, Work

MOST_KNOTS = 24  # of a curve
OUTLIERS = 5.0  # times the median error: a step that is further off met something else than its work
MIN_STEPS = 20  # of each kind, for a fit
ROUNDS = 8  # of least squares, until steps that are far off hardly count
SMALLEST_ERROR = 0.01  # that weighs a step less: below it errors are noise
SETTLES_S = (0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.6, 0.8)  # of a device's heat: what is tried

Array = NDArray[np.float64]


class MeasuredStep(NamedTuple):
    work: Work
    rows: int
    device_s: float
    host_s: float
    end_s: float  # on one clock for all
    launch_s: float | None = None  # of one with prompts that came behind rows alone: when the end of these was told


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
    far_off: int  # steps that met something else than their work: they hardly count


KINDS: dict[str, Callable[[Work], bool]] = {
    "decode": lambda work: not work.prompt_tokens,
    "prompts": lambda work: work.prompt_tokens > 0,
}


def fit(steps: Sequence[MeasuredStep], block_s: float = 0.0, captured_tokens: int | None = None) -> Fit:
    """The costs that come nearest to all steps alike, whatever they take: least absolute relative errors, with no cost
    below zero. The steps are in their order. ValueError where there are too few of a kind.

    Args:
        captured_tokens: FittedCosts'; None where nobody waits for a launch, since steps do not overlap.
    """
    steps = [step for step in steps if step.device_s > 0]
    for kind, is_kind in KINDS.items():
        count = sum(is_kind(step.work) for step in steps)
        if count < MIN_STEPS:
            raise ValueError(f"{count} steps of the kind {kind!r} are too few for a fit, which takes {MIN_STEPS}")
    tried = [_fit(steps, block_s, settles_s) for settles_s in SETTLES_S]
    costs, errors = min(tried, key=lambda one: float(np.minimum(one[1], 1.0).mean()))
    if captured_tokens is not None:
        pieces_s = _launched([step for step in steps if step.work.tokens <= captured_tokens])
        eager_s = _launched([step for step in steps if step.work.tokens > captured_tokens])
        costs = replace(costs, pieces_s=pieces_s, eager_s=max(pieces_s, eager_s), captured_tokens=captured_tokens)
    far = errors > max(OUTLIERS * float(np.median(errors)), 0.1)
    return Fit(costs, int(far.sum()))


def residuals(costs: FittedCosts, steps: Sequence[MeasuredStep]) -> dict[str, Residuals]:
    steps = [step for step in steps if step.device_s > 0]
    found, heats = {}, _heated(steps, costs.heat(1))
    works = [step.work._replace(heat=heat) for step, heat in zip(steps, heats.tolist(), strict=True)]
    errors = np.array([costs.device_s(work) / step.device_s - 1 for work, step in zip(works, steps, strict=True)])
    seconds = np.array([step.device_s for step in steps])
    for kind, is_kind in KINDS.items():
        own = np.array([is_kind(work) for work in works])
        if own.any():
            median, p90 = np.percentile(np.abs(errors[own]), [50, 90])
            bias = float(errors[own] @ seconds[own] / seconds[own].sum())
            found[kind] = Residuals(int(own.sum()), float(median), float(p90), bias)
    return found


def _launched(steps: Sequence[MeasuredStep]) -> float:
    """The median of those behind the fewest rows: what rows take hides a shorter launch. 0 where none was told."""
    told = [(step.work.decode_tokens, step.launch_s) for step in steps if step.launch_s]
    fewest = min((rows for rows, _ in told), default=0)
    return float(np.median([seconds for rows, seconds in told if rows == fewest])) if told else 0.0


def _heated(steps: Sequence[MeasuredStep], heat: Heat) -> Array:
    """[N] that of the device as each step begins."""
    found = []
    for step in steps:
        begin = step.end_s - step.device_s
        found.append(heat.at(begin))
        if step.work.prompt_tokens:
            heat.add(begin, step.device_s)
    return np.array(found)


def _fit(steps: Sequence[MeasuredStep], block_s: float, settles_s: float) -> tuple[FittedCosts, Array]:
    """And how far each step is from them, as a share of what they say: of what was measured, one that was told too
    short would count for a hundred others."""
    seconds = np.array([step.device_s for step in steps])
    work = np.array([step.work for step in steps], dtype=float)
    tokens, with_prompts = work[:, 0] + work[:, 1], work[:, 1] > 0
    # Rows beside prompts add up to numbers of tokens that mean nothing: knots are those of prompts alone.
    alone = tokens[with_prompts & (work[:, 0] == 0)]
    most = tokens[with_prompts].max()
    knots = [_knots(tokens[~with_prompts]), np.union1d(_knots(alone if alone.size else tokens[with_prompts]), [most])]
    curves = zip(knots, (~with_prompts, with_prompts), strict=True)
    columns = [_rises(tokens, own) * of_kind[:, None] for own, of_kind in curves]
    fewest = ~with_prompts & (tokens == tokens[~with_prompts].min())
    heats = _heated(steps, Heat(settles_s, float(np.median(seconds[fewest]))))
    of_heat = np.column_stack([heats * tokens * with_prompts, heats * ~with_prompts])
    matrix = np.column_stack([*columns, work[:, 2:6], work[:, 0] * with_prompts, of_heat])
    solution, errors = _least_absolute(matrix, seconds, _typical(tokens, with_prompts, seconds))
    linear = dict(zip((*ATTENTION, *OF_HEAT), solution[-7:].tolist(), strict=True))
    decode, prompts = (
        Curve(tuple(int(t) for t in own), tuple(np.cumsum(rise).tolist()))
        for own, rise in zip(knots, np.split(solution[:-7], [len(knots[0])]), strict=True)
    )
    rows = np.column_stack([np.ones(len(steps)), [step.rows for step in steps]])
    plan_s, row_s = nonnegative(rows, np.array([step.host_s for step in steps])).tolist()
    costs = FittedCosts(
        decode,
        prompts,
        **linear,
        plan_s=plan_s,
        row_s=row_s,
        block_s=block_s,
        settles_s=settles_s if any(linear[name] for name in OF_HEAT) else 0.0,
    )
    return costs, errors


def _typical(tokens: Array, with_prompts: NDArray[np.bool_], seconds: Array) -> Array:
    """[N] the median of the steps of a kind with about as many tokens."""
    alike = 2 * np.round(3 * np.log2(tokens)) + with_prompts
    medians = {each: float(np.median(seconds[alike == each])) for each in np.unique(alike).tolist()}
    return np.array([medians[each] for each in alike.tolist()])


def _least_absolute(matrix: Array, target: Array, scale: Array) -> tuple[Array, Array]:
    """No x is below 0; and the errors, as shares of `matrix @ x`. `scale`: about that, to begin with. By least squares
    again and again, in which each squared error is divided by how large it was the last time (Holland and Welsch 1977,
    "Robust regression using iteratively reweighted least-squares")."""
    roots = np.ones(len(target))
    for _ in range(ROUNDS):
        x = nonnegative(matrix * (roots / scale)[:, None], target * roots / scale)
        scale = np.maximum(matrix @ x, 1e-9)
        errors = np.abs(target / scale - 1)
        roots = 1 / np.sqrt(np.maximum(errors, SMALLEST_ERROR))
    return x, errors


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
