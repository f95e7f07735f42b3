"""The step timeline: what the engine did, step by step, drawn over time from a run's stored steps. Every variant gets
the same four panels on one time axis: tokens of each step, how long it took, KV blocks, and requests by state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from experiments.lab.measure.steps import StepRow
from experiments.lab.show import plots
from experiments.lab.store.result import Result, page_name

MAX_STEPS = 500  # drawn one by one; more of them would be thinner than a line
BINS = 400
FAINT = 0.1  # decode tokens below this share of the largest step would hardly be seen on a linear scale
HEIGHTS = (1.15, 0.75, 0.85, 0.85)  # inches
PREFILL, DECODE, USED, CACHED, TIME, LOST = "#E69F00", "#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#D55E00"


@dataclass(frozen=True)
class Shape:
    """A quantity over time, as the heights of a staircase between `edges` (one more than heights)."""

    edges: np.ndarray
    mean: np.ndarray
    largest: np.ndarray  # equals `mean` where nothing was put together


def draw(result: Result) -> dict[str, bytes]:
    """Point -> PNG, for every point whose steps the run stored."""
    return {point: _figure([s for s in result.steps if s.point == point], point, result) for point in points(result)}


def points(result: Result) -> list[str]:
    """The points whose steps the run stored, in the report's order."""
    stored = {step.point for step in result.steps}
    return [point for point in result.info.points if point in stored]


def describe(result: Result) -> str:
    """What the figures show, for the report's text."""
    text = (
        "What each engine variant did in its first repeat, on one time axis: tokens computed in each step, how long "
        "the step took, KV blocks (in % of the variant's own) and requests after it. A triangle marks a step that "
        "preempted somebody."
    )
    most = max(len(list(steps)) for _, steps in groupby(result.steps, key=lambda s: (s.variant, s.point)))
    if most > MAX_STEPS:
        text += (
            f" There are up to {most:,} steps, so the time is cut into {BINS} bins: tokens are a bin's mean over time "
            "with the largest step as a thin line, all else is a bin's largest value."
        )
    return text


def shape(
    steps: Sequence[StepRow], value: Callable[[StepRow], float], end: float, *, lasts: bool, binned: bool
) -> Shape:
    """One quantity of the steps from 0 to `end` seconds.

    Args:
        lasts: the value is a state, which holds from the end of its step to the end of the next one; else it belongs
            to the time of the step itself, and there is nothing between steps.
    """
    starts = np.array([s.start_s for s in steps])
    ends = starts + np.array([s.duration_s for s in steps])
    values = np.array([value(s) for s in steps], dtype=np.float64)
    if lasts:
        starts, ends = ends, np.append(ends[1:], ends[-1])
    if not binned and lasts:
        edges, heights = np.concatenate([[0.0], starts, ends[-1:]]), np.append(0.0, values)
        return Shape(edges, heights, heights)
    if not binned:  # before each step stands the time since the last one, at height 0
        edges = np.concatenate([[0.0], np.stack([starts, ends], axis=1).ravel()])
        heights = np.stack([np.zeros_like(values), values], axis=1).ravel()
        return Shape(edges, heights, heights)
    edges = np.linspace(0.0, end, BINS + 1)
    width = end / BINS
    area, largest = np.zeros(BINS), np.zeros(BINS)
    for start, stop, height in zip(starts, ends, values, strict=True):
        first, last = (min(int(t / width), BINS - 1) for t in (start, max(start, np.nextafter(stop, start))))
        covered = np.minimum(edges[first + 1 : last + 2], stop) - np.maximum(edges[first : last + 1], start)
        area[first : last + 1] += height * np.maximum(covered, 0.0)
        largest[first : last + 1] = np.maximum(largest[first : last + 1], height)
    return Shape(edges, area / width, largest)


def _figure(steps: Sequence[StepRow], point: str, result: Result) -> bytes:
    by_variant = {v: [s for s in steps if s.variant == v] for v in result.info.variants}
    by_variant = {v: own for v, own in by_variant.items() if own}
    end = max(s.start_s + s.duration_s for s in steps)
    binned = max(len(own) for own in by_variant.values()) > MAX_STEPS
    with matplotlib.style.context("default"):
        rows = len(HEIGHTS) * len(by_variant)
        height = sum(HEIGHTS) * len(by_variant) + 0.3 * len(by_variant) + 0.9
        figure = Figure(figsize=(plots.WIDTH, height), dpi=plots.DPI, layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, height_ratios=HEIGHTS * len(by_variant), squeeze=False)[:, 0]
        for index, own in enumerate(by_variant.values()):
            four = axes[index * len(HEIGHTS) : (index + 1) * len(HEIGHTS)]
            _variant(four, own, end, binned)
            four[0].set_title(_title(own, result), fontsize=10, loc="left", fontweight="bold")
        faint = max(s.decode_tokens for s in steps) < FAINT * max(s.decode_tokens + s.prefill_tokens for s in steps)
        for ax in axes[:: len(HEIGHTS)] if faint else ():
            ax.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
            _name(ax, "tokens\nin a step\n(√ scale)")
            most = max(s.decode_tokens + s.prefill_tokens for s in steps)
            ax.set_yticks([0, *(_round(share * most) for share in (0.06, 0.3, 0.9))])
        for row in range(len(HEIGHTS)):  # the same scale for all variants
            same = axes[row :: len(HEIGHTS)]
            top = max(ax.get_ylim()[1] for ax in same)
            for ax in same:
                ax.set_ylim(0, top)
        axes[-1].set_xlim(0, end)
        axes[-1].set_xlabel("seconds from the start of the timed pass", fontsize=9)
        plots.legend(figure, axes)
        figure.suptitle("Step by step" + (f" at {point}" if point else ""), fontsize=12)
        return plots.png(figure, page_name(result.info))


def _title(steps: Sequence[StepRow], result: Result) -> str:
    """Of one variant. Its pass may be one that does not count."""
    first, last = steps[0], steps[-1]
    lost = sum(len(step.preempted) for step in steps)
    parts = [
        f"{len(steps):,} steps in {last.start_s + last.duration_s:.3g} s",
        f"{last.kv_total_blocks:,} KV blocks",
        *([f"{lost:,} preemptions"] if lost else []),
    ]
    rows = [r for r in result.rows if (r.variant, r.point, r.repeat) == (first.variant, first.point, 0)]
    invalid = rows and not any(row.valid for row in rows)
    return f"{result.info.variants[first.variant]}: {', '.join(parts)}" + (" (this pass is INVALID)" if invalid else "")


def _variant(axes: Iterable[Axes], steps: Sequence[StepRow], end: float, binned: bool) -> None:
    tokens, duration, blocks, requests = axes

    def over_time(value: Callable[[StepRow], float], lasts: bool) -> Shape:
        return shape(steps, value, end, lasts=lasts, binned=binned)

    decode = over_time(lambda s: s.decode_tokens, False)
    both = over_time(lambda s: s.decode_tokens + s.prefill_tokens, False)
    tokens.stairs(decode.mean, decode.edges, fill=True, color=DECODE, label="decode tokens")
    tokens.stairs(both.mean, both.edges, baseline=decode.mean, fill=True, color=PREFILL, label="prefill tokens")
    if binned:
        tokens.stairs(both.largest, both.edges, color=plots.INK, linewidth=0.6, label="largest step of a bin")
    _name(tokens, "tokens\nin a step")

    times = over_time(lambda s: 1e3 * s.duration_s, False)
    duration.stairs(times.largest, times.edges, fill=True, color=TIME, label="time of a step")
    _name(duration, "step\n(ms)")

    total = steps[-1].kv_total_blocks  # of this variant; another one may have more
    used = over_time(lambda s: 100 * s.kv_used_blocks / total, True)
    held = over_time(lambda s: 100 * (s.kv_used_blocks + s.kv_cached_blocks) / total, True)
    blocks.stairs(used.largest, used.edges, fill=True, color=USED, label="KV blocks in use")
    if any(s.kv_cached_blocks for s in steps):
        blocks.stairs(held.largest, held.edges, baseline=used.largest, fill=True, facecolor=CACHED, hatch="....",
                      edgecolor="white", linewidth=0, label="KV blocks cached")  # fmt: skip
    lost = [s.start_s for s in steps if s.preempted]
    if lost:
        blocks.plot(lost, [112] * len(lost), "v", color=LOST, markersize=5, clip_on=False, label="preemption")
    _name(blocks, "KV blocks\n(%)")
    blocks.set_ylim(top=124)
    blocks.set_yticks([0, 50, 100])

    for label, value, colour, dashes in (
        ("running", lambda s: s.num_running + s.num_prefilling, DECODE, "-"),
        ("waiting", lambda s: s.num_waiting, PREFILL, "--"),
        ("swapped", lambda s: s.num_swapped, LOST, ":"),
    ):
        if label != "swapped" or any(s.num_swapped for s in steps):
            line = over_time(value, True)
            requests.stairs(line.largest, line.edges, baseline=None, color=colour, linestyle=dashes, linewidth=1.4,
                            label=f"requests {label}")  # fmt: skip
    _name(requests, "requests")


def _round(value: float) -> float:
    """To one significant digit."""
    return float(f"{value:.0e}")


def _name(ax: Axes, label: str) -> None:
    plots.tidy(ax)
    ax.set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    ax.tick_params(labelsize=8)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plots.plain(value)))
