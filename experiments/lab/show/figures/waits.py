"""How long requests and tokens waited: the share that took longer than the time on the x axis, a straight look at the
tail, where 1 % on the y axis is the P99."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.show import effects, wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import INK, line_style
from experiments.lab.store.result import Result

ALIKE = 1.05  # times the least of a variant's times: then a median says it all
ENOUGH = 10  # requests, or tokens, of a variant: of fewer a distribution is not shown
MANY = 6  # lines that can still be told apart
HEIGHT = 4.1
Weighted = tuple[list[float], list[float]]  # times in milliseconds, and how often each counts


@dataclass(frozen=True)
class Waits:
    what: str  # is counted
    point: str  # at which it was
    label: str
    values: dict[str, Weighted]  # by variant


def of(result: Result) -> list[Waits]:
    """At the first claim's point, if its requests are stored, else where they are most: first tokens of requests, from
    the passes whose steps are stored, and decoded tokens from these steps: the time from one step's end to the next
    one's counts once for each token that the step decoded. Of more variants than can be told apart those that claims
    name go first. Left out is where no variant's times differ by more than a little."""
    stored = Counter(request.point for request in result.traced) or Counter(step.point for step in result.steps)
    claimed = effects.of_claims(result)
    point = next((p for p in (*(e.cell[1] for e in claimed), *dict(stored.most_common())) if p in stored), "")
    named = [cell[0] for effect in claimed for cell in (effect.reference, effect.cell) if cell is not None]
    few = list(dict.fromkeys([*named, *result.info.variants]))[:MANY]
    firsts: dict[str, Weighted] = {}
    for request in result.traced:
        own = request.point == point and request.variant in few
        if own and request.first_token_s is not None and request.end_s is not None:
            times, weights = firsts.setdefault(request.variant, ([], []))
            times.append(1e3 * (request.first_token_s - request.arrival_s))
            weights.append(1.0)
    gaps: dict[str, Weighted] = {}
    for before, step in pairwise(result.steps):
        own = step.point == point and step.variant in few
        if own and (before.variant, before.point) == (step.variant, step.point) and step.decode_tokens:
            times, weights = gaps.setdefault(step.variant, ([], []))
            times.append(1e3 * (step.start_s + step.duration_s - before.start_s - before.duration_s))
            weights.append(float(step.decode_tokens))
    found = (
        Waits("requests", point, "time to first token of a request (ms)", _enough(firsts)),
        Waits("decoded tokens", point, "inter-token latency of a token (ms)", _enough(gaps)),
    )
    return [each for each in found if any(max(times) > ALIKE * min(times) for times, _ in each.values.values())]


def _enough(found: dict[str, Weighted]) -> dict[str, Weighted]:
    return {variant: both for variant, both in found.items() if sum(both[1]) >= ENOUGH}


def title(found: Sequence[Waits], result: Result) -> str:
    text = wording.titled(f"How long {' and '.join(each.what.split()[-1] for each in found)} waited", found[0].point)
    count = len(result.info.variants)
    return f"{text} ({MANY} of {count} variants)" if count > MANY else text


def draw(found: Sequence[Waits], result: Result) -> Figure:
    figure = frame.new(frame.WIDTH if len(found) > 1 else 0.7 * frame.WIDTH, HEIGHT)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for ax, waits in zip(axes, found, strict=True):
        frame.tidy(ax)
        _panel(ax, waits, result)
    frame.legend(figure, axes)
    return figure


def above(times: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """`times` in order, and the share of the weight, in percent, that lies above each; it starts with all of it."""
    order = np.argsort(times, kind="stable")
    x = np.asarray(times, dtype=np.float64)[order]
    weight = np.asarray(weights, dtype=np.float64)[order]
    left = 100 * (1 - np.cumsum(weight) / weight.sum())
    left[-1] = 0.0
    return [x[0], *x.tolist()], [100.0, *left.tolist()]


def _panel(ax: Axes, waits: Waits, result: Result) -> None:
    drawn = [(row, v) for row, v in enumerate(result.info.variants) if v in waits.values]
    smallest = 100.0
    for row, variant in drawn:
        x, share = above(*waits.values[variant])
        style = line_style(row, 0)
        ax.step(x, share, where="post", label=result.info.variants[variant], color=style["color"],
                linestyle=style["linestyle"])  # fmt: skip
        smallest = min(smallest, *(s for s in share if s > 0))
    every = [time for _, variant in drawn for time in waits.values[variant][0]]
    if 0 < 30 * min(every) < max(every):
        frame.log(ax.xaxis, ax, True)
    ax.set_yscale("log")
    ax.set_ylim(max(smallest / 1.5, 0.01), 130)
    frame.log_ticks(ax.yaxis, 100 / smallest)
    ax.set_title("lower is better", fontsize=8, color=INK)
    ax.set_xlabel(waits.label, fontsize=9)
    ax.set_ylabel(f"share of {waits.what} above (%)", fontsize=9)
