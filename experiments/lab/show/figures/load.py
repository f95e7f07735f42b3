"""How an engine bears load: throughput against latency, what of an offered rate comes out in time, and how
long requests and tokens waited, as the share that took longer than the time on the x axis, where 1 % is P99."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.config.spec import RATE, PanelKind, PanelSpec
from experiments.lab.judge import knees
from experiments.lab.show import effects, wording
from experiments.lab.show.figures import frame, lines
from experiments.lab.store.result import Result

COUNTS = ("workload.count", "workload.conversations")
IN_FLIGHT = ("workload.concurrency", *COUNTS)
SPEED, GOODPUT = "output_tokens_per_s", knees.GOODPUT
LATENCIES = ("itl_p50_ms", "tpot_ms", "ttft_ms")
ENOUGH = 3  # points of a curve
WIDTH, HEIGHT, LETTERS = 0.8 * frame.WIDTH, 4.2, 110  # of a title's line


def pareto_of(result: Result) -> tuple[Result, str] | None:
    """The points that differ in how many requests are in flight, and a metric of latency; None for too few of them."""
    every = ((_over(key, result, latency, SPEED), latency) for key in IN_FLIGHT for latency in LATENCIES)
    return next(((found, latency) for found, latency in every if found is not None), None)


def pareto(result: Result, latency: str) -> Figure:
    """Throughput over latency, a curve a variant; what is above and to the left of another is better."""
    figure, ax = frame.one(HEIGHT, WIDTH)
    ax.set(title="up and left is better", ylabel=frame.axis_label(result.info.metrics[SPEED], 36))
    lines.curve(ax, PanelSpec(SPEED, PanelKind.curve, x=latency, log_x=True, log_y=True), result)
    frame.scale(ax.yaxis, log=True)
    frame.legend(figure, [ax])
    return figure


def goodput_of(result: Result) -> tuple[Result, str] | None:
    """The points that differ in the rate at which requests arrive, and where the knee is; None for too few of them."""
    found = _over(RATE, result, GOODPUT)
    return (found, _knee(found.info.points, result)) if found else None


def goodput(result: Result, knee: str) -> Figure:
    """Requests a second that met every objective, over those that were offered: up to the knee both are the same."""
    figure, ax = frame.one(HEIGHT, WIDTH)
    most = max(settings[RATE] for settings in result.info.points.values())
    ax.plot([0, most], [0, most], color=frame.INK, linewidth=1, linestyle=":", label="all that is offered")
    lines.draw(ax, PanelSpec(GOODPUT, PanelKind.lines, x=RATE, x_label="requests a second offered"), result)
    ax.set(title=knee, ylabel=frame.axis_label(result.info.metrics[GOODPUT], 40))
    ax.set_xlim(left=0)
    frame.scale(ax.yaxis)
    frame.legend(figure, [ax])
    return figure


def _knee(points: Mapping[str, Mapping[str, Any]], result: Result) -> str:
    """Of each variant what a search has found, else the last of the points' rates up to which the share was in time;
    nothing of those that no rate was tried with, as where a search is of some variants alone."""
    told, share = [], knees.share(result.info.config)
    for variant, label in result.info.variants.items():
        found = next((own for p in result.info.points if (own := result.estimate(variant, p, knees.FOUND))), None)
        tried = (result.values(variant, point, name) for point in points for name in (GOODPUT, knees.KEPT))
        if found is None and not any(tried):
            continue
        last = wording.interval(found) if found else ""
        for point, settings in {} if found else points.items():
            reached = result.estimate(variant, point, GOODPUT)
            if reached is not None and reached.median < share * settings[RATE]:
                break
            last = last if reached is None else wording.number(settings[RATE])
        told.append(f"{label}: {f'{last} requests/s' if last else 'no rate that was tried'}")
    line = f"{share:.0%} in time up to: {'; '.join(told)}"
    return line if len(line) <= LETTERS else line.replace("; ", ";\n")


def _over(key: str, result: Result, *metrics: str) -> Result | None:
    """With the most points that differ in `key` alone, a number, by which they are ordered where it is the rate, and
    where some variant has valid values of all metrics; None for too few of them. How many requests there are belongs to
    it: more of them come at a higher rate, or with more in flight."""
    info, alike = result.info, defaultdict[str, dict[str, dict[str, Any]]](dict)
    for name, settings in info.points.items():
        values = ([result.values(v, name, metric) for metric in metrics] for v in info.variants)
        if set(metrics) <= set(info.metrics) and wording.is_number(settings.get(key)) and any(map(all, values)):
            others = {k: v for k, v in settings.items() if k not in (key, *COUNTS)}
            alike[repr(others)][name] = {key: settings[key]}
    kept = max(alike.values(), key=len, default={})
    if key == RATE:
        kept = dict(sorted(kept.items(), key=lambda item: item[1][RATE]))
    return replace(result, info=replace(info, points=kept)) if len(kept) >= ENOUGH else None


ALIKE = 1.05  # times the least of a variant's times: then a median says it all
SAMPLES = 10  # requests, or tokens, of a variant: of fewer a distribution is not shown
TOLD = (90, 75, 50, 25, 10, 5, 2, 1, 0.5, 0.2, 0.1)  # percent above, of which the pointer is told
TINY = 1e-6  # percent, of rounding
MANY = 6  # lines that can still be told apart
Weighted = tuple[list[float], list[float]]  # times in milliseconds, and how often each counts


@dataclass(frozen=True)
class Waits:
    what: str  # is counted
    point: str  # at which it was
    label: str
    values: dict[str, Weighted]  # by variant


def waits_of(result: Result) -> list[Waits]:
    """At the first claim's point, if its requests are stored, else where they are most: first tokens of requests, and
    decoded tokens, of all passes that count. In a result that has no gaps between tokens these are made of the first
    pass's steps: the time from one step's end to the next one's counts once for each token that the step decoded. Where
    claims, or else metrics, are of a group of requests, first tokens are of this group alone; gaps and steps are not
    stored by group. Of more variants than can be told apart those that claims name go first. Left out is where no
    variant's times differ by more than a little."""
    stepped = {step.point for step in result.steps}
    stored = Counter(r.point for r in result.counted if not stepped or r.point in stepped) or Counter(stepped)
    claimed = effects.of_claims(result)
    point = next((p for p in (*(e.cell[1] for e in claimed), *dict(stored.most_common())) if p in stored), "")
    named = [cell[0] for effect in claimed for cell in (effect.reference, effect.cell) if cell is not None]
    few = list(dict.fromkeys([*named, *result.info.variants]))[:MANY]
    group, of_gaps = (_group(begins, result) for begins in ("ttft_", "itl_"))
    waited = [(r.variant, 1e3 * (r.first_token_s - r.arrival_s)) for r in result.counted if r.point == point
              and group in ("", r.name) and r.first_token_s is not None and r.end_s is not None]  # fmt: skip
    firsts = {v: (ms, [1.0] * len(ms)) for v in few if (ms := [took for variant, took in waited if variant == v])}
    gaps: dict[str, Weighted] = {}
    for row in (row for row in result.gaps if row.point == point and row.variant in few):
        for pooled, of_pass in zip(gaps.setdefault(row.variant, ([], [])), row.histogram, strict=True):
            pooled += of_pass
    which = "" if gaps else ", first pass"
    for variant in few if not gaps else ():
        own = result.steps_of(variant, point) if (variant, point, 0, 0) in result.counting else []
        ends = [(1e3 * (step.start_s + step.duration_s), float(step.decode_tokens)) for step in own]
        found = [(end - before, count) for (before, _), (end, count) in pairwise(ends) if count]
        gaps |= {variant: ([time for time, _ in found], [count for _, count in found])} if found else {}
    whose, any_ = f"{group} request".strip(), " of any request" if of_gaps else ""
    both = ((f"{whose}s", f"time to first token of a {whose} (ms)", firsts),
            ("decoded tokens", f"inter-token latency of a token{any_}{which} (ms)", gaps))  # fmt: skip
    enough = [Waits(what, point, label, {v: own for v, own in values.items() if sum(own[1]) >= SAMPLES})
              for what, label, values in both]  # fmt: skip
    return [each for each in enough if any(max(times) > ALIKE * min(times) for times, _ in each.values.values())]


def _group(begins: str, result: Result) -> str:
    """Of requests, which the first metric of the kind is about, claims first; empty: all."""
    names = (*(claim.metric for claim in result.info.claims), *result.info.metrics)
    return next((name for name in names if name.startswith(begins)), "").partition("@")[2]


def above(times: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """`times` in order, and the share of the weight, in percent, that lies above each; it starts with all of it."""
    order = np.argsort(times, kind="stable")
    x, weight = np.asarray(times, dtype=np.float64)[order], np.asarray(weights, dtype=np.float64)[order]
    left = 100 * (1 - np.cumsum(weight) / weight.sum())
    left[-1] = 0.0
    return [x[0], *x.tolist()], [100.0, *left.tolist()]


def waits(found: Sequence[Waits], result: Result) -> Figure:
    figure = frame.new(frame.WIDTH if len(found) > 1 else 0.7 * frame.WIDTH, 4.1)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for ax, each in zip(axes, found, strict=True):
        smallest = 100.0
        for row, (variant, label) in enumerate(result.info.variants.items()):
            if variant not in each.values:
                continue
            x, share = above(*each.values[variant])
            look = {name: frame.line_style(row, 0)[name] for name in ("color", "linestyle")}
            ax.step(x, share, where="post", label=label, **look)
            least = min(s for s in share if s > 0)
            told = [(next(time for time, left in zip(x, share, strict=True) if left <= s + TINY), s)
                    for s in TOLD if s + TINY >= least]  # fmt: skip
            (dots,) = ax.plot([time for time, _ in told], [s for _, s in told], ".", color=look["color"], markersize=4)
            frame.says(dots, [f"{label}: {s:g} % of {each.what} above {wording.number(time)} ms" for time, s in told])
            smallest = min(smallest, least)
        every = [time for times, _ in each.values.values() for time in times]
        if 0 < 30 * min(every) < max(every):
            frame.scale(ax.xaxis, log=True)
        ax.set_yscale("log")
        ax.set_ylim(max(smallest / 1.5, 0.01), 130)
        frame.log_ticks(ax.yaxis)
        lacking = [result.info.variants[v] for other in found for v in other.values if v not in each.values]
        known = f"; times of {', '.join(dict.fromkeys(lacking))} were not stored" if lacking else ""
        ax.set(title=f"lower is better{known}", xlabel=each.label, ylabel=f"share of {each.what} above (%)")
    frame.legend(figure, axes)
    return figure
