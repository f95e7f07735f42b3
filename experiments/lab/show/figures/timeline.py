"""The mechanism at work: what the engine did step by step, two variants side by side on the same axes; and requests
alone, as lines in the colours of what they went through."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lab.config.spec import PanelSpec
from experiments.lab.measure.traces import RequestRow, StepRow
from experiments.lab.show import effects
from experiments.lab.show.figures import frame
from experiments.lab.store.result import Result

MAX_STEPS = 500  # drawn one by one; more of them would be thinner than a line
BINS = 400
FAINT = 0.1  # decode tokens below this share of the largest step would hardly be seen on a linear scale
SEEN = 4.0  # percent of the blocks: less would not be seen
HEAD: Any = {"fontsize": 9, "loc": "left", "fontweight": "bold", "color": "black"}  # of a column
LETTERS = 60  # of it in a line
HEIGHTS = (1.05, 0.65, 1.35, 1.0)  # inches
COLOURS = {  # in the order in which a request goes through them
    "queued": "#BDBDBD",
    "prefill": "#E69F00",
    "transfer after it": "#D55E00",
    "waiting for a decode step": "#56B4E9",
    "first decode step": "#009E73",
    "decode": "#0072B2",
}
COPIES = "copies of its KV, all in all"
LABELS = {"queued": "waiting"}  # where a legend has another word
ROW, WIDEST = 0.11, 5.0  # inches of a request, and points of its line
IN_GANTT = 16  # requests: beside the seconds that more of them take, none would be longer than a dot
LOADING, LOADED = "waiting for KV that is loaded", "#661100"
USED, UNUSED, CACHED, TIME, LOST = "#009E73", "#D9D9D9", "#56B4E9", "#CC79A7", "#D55E00"


@dataclass(frozen=True)
class Shape:
    """A quantity over time, as the heights of a staircase between `edges` (one more than heights)."""

    edges: np.ndarray
    mean: np.ndarray
    largest: np.ndarray  # equals `mean` where nothing was put together


def pairs(result: Result, point: str) -> list[tuple[str, ...]]:
    """Which variants stand on a figure together: first those that the first claim compares, then the others."""
    stored = [v for v in result.info.variants if result.steps_of(v, point)]
    cells = [cell for effect in effects.of_claims(result)[:1] for cell in (effect.reference, effect.cell) if cell]
    ordered = list(dict.fromkeys([*(cell[0] for cell in cells if cell[0] in stored), *stored]))
    return [tuple(ordered[i : i + 2]) for i in range(0, len(ordered), 2)]


def describe(result: Result) -> str:
    text = (
        "What each engine variant did in its first repeat, on one time axis: tokens computed in each step, how long "
        "the step took, each request (a line from its arrival: grey while it waits, orange while its prompt is "
        "computed, blue while it decodes), and what the KV blocks hold (in % of the variant's own). A triangle marks a "
        "step that preempted somebody."
    )
    if any(map(_loads, result.steps)):
        text += " Brown is a step that computes nothing, since the KV of a prompt has to be loaded first."
    most = max(Counter((step.variant, step.point) for step in result.steps).values())
    if most > MAX_STEPS:
        text += (
            f" There are up to {most:,} steps, so the time is cut into {BINS} bins: tokens are a bin's mean over time "
            "with the largest step as a thin line, all else is a bin's largest value."
        )
    return text


def draw(result: Result, point: str, variants: Sequence[str]) -> Figure:
    own = {v: result.steps_of(v, point) for v in variants}
    every = [step for steps in own.values() for step in steps]
    end = max(s.start_s + s.duration_s for s in every)
    binned = max(map(len, own.values())) > MAX_STEPS
    figure = frame.new(frame.WIDTH, sum(HEIGHTS) + 1.5)
    axes = figure.subplots(len(HEIGHTS), len(variants), sharex=True, sharey="row", height_ratios=HEIGHTS,
                           squeeze=False)  # fmt: skip
    for column, (variant, steps) in enumerate(own.items()):
        course = partial(shape, steps, end=end, binned=binned)
        decode, both = course(lambda s: s.decode_tokens), course(lambda s: s.decode_tokens + s.prefill_tokens)
        tokens, duration = axes[0, column], axes[1, column]
        tokens.stairs(decode.mean, decode.edges, fill=True, color=COLOURS["decode"], label="decode")
        tokens.stairs(both.mean, both.edges, baseline=decode.mean, fill=True, color=COLOURS["prefill"], label="prefill")
        if binned:
            tokens.stairs(both.largest, both.edges, color=frame.INK, linewidth=0.6, label="largest step of a bin")
        times, waits = course(lambda s: 1e3 * s.duration_s), course(lambda s: 1e3 * s.duration_s * _loads(s))
        duration.stairs(times.largest, times.edges, fill=True, color=TIME, label="time of a step")
        if waits.largest.any():
            duration.stairs(waits.largest, waits.edges, fill=True, color=LOADED, label=LOADING)
        loads = [(s.start_s, s.start_s + s.duration_s) for s in steps if _loads(s)]
        draw_requests(axes[2, column], first_pass(result, variant, point), loads)
        _blocks(axes[3, column], course, steps)
        last, lost = steps[-1], sum(len(step.preempted) for step in steps)
        what = f"{lost:,} preemptions" if lost else f"{last.kv_total_blocks:,} KV blocks"
        took = f"{len(steps):,} steps in {last.start_s + last.duration_s:.3g} s"
        invalid = "" if (variant, point, 0, 0) in result.counting else " (this pass is INVALID)"
        title = f"{result.info.variants[variant]}: {took}, {what}{invalid}"
        axes[0, column].set_title(textwrap.fill(title, LETTERS), **HEAD)
        axes[-1, column].set_xlabel("seconds from the start of the timed pass")
    for ax in axes.flatten():
        ax.tick_params(labelsize=8)
    _scales(list(axes[:, 0]), every, end)
    frame.legend(figure, axes.flatten())
    return figure


def shape(
    steps: Sequence[StepRow], value: Callable[[StepRow], float], end: float, *, lasts: bool = False, binned: bool
) -> Shape:
    """One quantity of the steps from 0 to `end` seconds. What `lasts` is a state, which holds from the end of its step
    to the end of the next one; else it belongs to the time of the step itself, and there is nothing between steps."""
    starts = np.array([s.start_s for s in steps])
    ends = starts + np.array([s.duration_s for s in steps])
    values = np.array([value(s) for s in steps], dtype=np.float64)
    if lasts:
        starts, ends = ends, np.append(ends[1:], ends[-1])
    if not binned:  # before each step stands the time since the last one, at height 0
        edges = [*starts, ends[-1]] if lasts else np.stack([starts, ends], axis=1).ravel()
        heights = np.append(0.0, values) if lasts else np.stack([np.zeros_like(values), values], axis=1).ravel()
        return Shape(np.append(0.0, edges), heights, heights)
    edges, width = np.linspace(0.0, end, BINS + 1), end / BINS
    area, largest = np.zeros((2, BINS))
    for start, stop, height in zip(starts, ends, values, strict=True):
        first, last = (min(int(t / width), BINS - 1) for t in (start, max(start, np.nextafter(stop, start))))
        covered = np.minimum(edges[first + 1 : last + 2], stop) - np.maximum(edges[first : last + 1], start)
        area[first : last + 1] += height * np.maximum(covered, 0.0)
        largest[first : last + 1] = np.maximum(largest[first : last + 1], height)
    return Shape(edges, area / width, largest)


def _loads(step: StepRow) -> bool:
    """Whether it computed nothing: those that run wait for KV of their prompts from host memory or files."""
    return step.num_prefilling > 0 and not step.decode_tokens and not step.prefill_tokens


def _blocks(ax: Axes, course: Callable[..., Shape], steps: Sequence[StepRow]) -> None:
    """From below: what tokens fill, what is reserved for a request and empty, and what the prefix cache keeps."""
    percent = 100 / steps[-1].kv_total_blocks  # of this variant; another one may have more
    full = lambda s: s.kv_used_slots / s.kv_reserved_slots if s.kv_reserved_slots else 1.0  # noqa: E731
    state = lambda value: course(lambda s: percent * value(s), lasts=True)  # noqa: E731
    used = state(lambda s: full(s) * s.kv_used_blocks)
    reserved = state(lambda s: s.kv_used_blocks)
    held = state(lambda s: s.kv_used_blocks + s.kv_cached_blocks)
    ax.stairs(used.largest, used.edges, fill=True, color=USED, label="KV in use")
    pieces = (
        ("KV reserved, empty", used, reserved, UNUSED, "////", (reserved.largest - used.largest).max() > SEEN),
        ("KV cached", reserved, held, CACHED, "....", any(s.kv_cached_blocks for s in steps)),
    )
    for label, below, above, colour, hatch, seen in pieces:
        if seen:
            ax.stairs(above.largest, used.edges, baseline=below.largest, fill=True, facecolor=colour, hatch=hatch,
                      edgecolor="white", linewidth=0, label=label)  # fmt: skip
    lost = [s.start_s for s in steps if s.preempted]
    if lost:
        ax.plot(lost, [112] * len(lost), "v", color=LOST, markersize=5, clip_on=False, label="preemption")


def _scales(axes: Sequence[Axes], steps: Sequence[StepRow], end: float) -> None:
    """Of the first column, which the others share."""
    names = ["tokens\nin a step", "step\n(ms)", "requests,\none a line", "KV blocks\n(%)"]
    most = max(s.decode_tokens + s.prefill_tokens for s in steps)
    if faint := max(s.decode_tokens for s in steps) < FAINT * most:
        names[0] += "\n(√ scale)"
    for ax, name in zip(axes, names, strict=True):
        ax.set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        ax.yaxis.set_major_formatter(frame.plain)
    if faint:
        axes[0].set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        ticks = [0, *(float(f"{share * most:.0e}") for share in (0.06, 0.3, 0.9))]
        axes[0].set(yticks=ticks, ylim=(0, 1.05 * most))
    axes[2].set_ylim(axes[2].get_ylim()[1] + 0.5, -0.5)  # the first one on top
    axes[3].set(ylim=(0, 124), yticks=[0, 50, 100], xlim=(0, end))


def first_pass(result: Result, variant: str, point: str) -> list[RequestRow]:
    """The requests of the first process's first repeat, whose steps are stored: of its last attempt."""
    own = [r for r in result.requests if (r.variant, r.point, r.process, r.repeat) == (variant, point, 0, 0)]
    return [r for r in own if r.attempt == own[-1].attempt]


def phases(request: RequestRow) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in seconds of what a request went through, up to the last moment that is known."""
    start, end = request.arrival_s, request.first_scheduled_s
    names, ends = ["queued", "prefill", "decode"], [end]
    if end is not None and request.prefill_s is not None and request.transfer_s is not None:
        names = list(COLOURS)
        for seconds in (request.prefill_s, request.transfer_exposed_s, request.decode_wait_s):
            end += max(0.0, seconds or 0.0)
            ends.append(end)
    for name, moment in zip(names, (*ends, request.first_token_s, request.end_s), strict=True):
        if moment is None:
            return
        yield name, start, moment
        start = moment


def draw_requests(ax: Axes, requests: Sequence[RequestRow], loads: Sequence[tuple[float, float]] = ()) -> None:
    """A line each, in the order of arrivals and turns; below it a thin one, as long as the copies of its KV took, which
    ends when the last of them did. `loads`: when steps waited for KV, which is no prefill."""
    spans: dict[str, list[tuple[float, float, float, str]]] = {name: [] for name in (*COLOURS, LOADING)}
    copies: list[tuple[float, float, float]] = []
    turn = lambda r: (r.arrival_s, math.inf if r.first_scheduled_s is None else r.first_scheduled_s)  # noqa: E731
    for row, request in enumerate(sorted(requests, key=turn)):
        cached = f" ({request.cached_tokens:,} cached)" if request.cached_tokens else ""
        tokens = f"{request.prompt_tokens:,}{cached} in, {request.output_tokens:,} out"
        for phase, start, end in phases(request):
            spans[phase].append((row, start, end, f"{request.request}: {phase} {end - start:.3g} s; {tokens}"))
            both = ((max(start, since), min(end, until)) for since, until in loads if phase == "prefill")
            spans[LOADING] += [(row, since, until, f"{request.request}: {LOADING} {until - since:.3g} s; {tokens}")
                               for since, until in both if since < until]  # fmt: skip
            if phase == "transfer after it" and request.transfer_s is not None:
                copies.append((row + 0.4, end - request.transfer_s, end))
    width = max(0.6, min(WIDEST, 75 / max(1, len(requests))))
    for phase, found in spans.items():
        if found:
            rows, starts, ends, tips = zip(*found, strict=True)
            lines = ax.hlines(rows, starts, ends, color=COLOURS.get(phase, LOADED), linewidth=width,
                              label=LABELS.get(phase, phase))  # fmt: skip
            frame.says(lines, tips)
    if copies:
        rows, starts, ends = zip(*copies, strict=True)
        ax.hlines(rows, starts, ends, color=frame.INK, linewidth=1, label=COPIES)


def first_of(panel: PanelSpec, result: Result) -> dict[str, list[RequestRow]]:
    """By variant the first requests of the panel's first point that has some stored."""
    for point in result.info.points:
        own = {v: [r for r in result.traced if (r.variant, r.point) == (v, point)] for v in result.info.variants}
        if found := {variant: requests[:IN_GANTT] for variant, requests in own.items() if requests}:
            return found
    return {}


def gantt(panel: PanelSpec, result: Result) -> Figure:
    """The first requests, a column a variant."""
    found = first_of(panel, result)
    most = max(map(len, found.values()))
    figure = frame.new(frame.WIDTH, 1.6 + ROW * most)
    axes = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (variant, requests) in zip(axes, found.items(), strict=True):
        frame.grid_of_rows(ax)
        draw_requests(ax, requests)
        ax.set_title(result.info.variants[variant], **HEAD)
        ax.set(xlabel="seconds from the start of the pass", yticks=[])
    axes[0].set(ylabel="requests,\none a line", ylim=(most, -0.8))  # the first one on top
    axes[0].set_xlim(left=0)
    frame.legend(figure, axes)
    return figure
