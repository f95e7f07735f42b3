"""Requests as lines over time, from their arrival to their last token, in the colours of what they went through."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.measure.steps import RequestRow
from experiments.lab.show.figures import frame
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result

COLOURS = {
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


def first_pass(result: Result, variant: str, point: str) -> list[RequestRow]:
    """The requests of the first process's first repeat; those of the others are stored, too."""
    return [r for r in result.requests if (r.variant, r.point, r.process, r.repeat) == (variant, point, 0, 0)]


def phases(request: RequestRow) -> Iterator[tuple[str, float, float]]:
    """Name, start and end in seconds of what a request went through, up to the last moment that is known."""
    moments: list[tuple[str, float | None]] = [("queued", request.first_scheduled_s)]
    if request.first_scheduled_s is not None and request.prefill_s is not None and request.transfer_s is not None:
        end = request.first_scheduled_s
        parts = request.prefill_s, request.transfer_exposed_s, request.decode_wait_s
        for name, seconds in zip(("prefill", "transfer after it", "waiting for a decode step"), parts, strict=True):
            end += max(0.0, seconds or 0.0)
            moments.append((name, end))
        moments.append(("first decode step", request.first_token_s))
    else:
        moments.append(("prefill", request.first_token_s))
    start = request.arrival_s
    for name, moment in (*moments, ("decode", request.end_s)):
        if moment is None:
            return
        yield name, start, moment
        start = moment


def draw_requests(ax: Axes, requests: Sequence[RequestRow]) -> None:
    """A line each, in the order of their arrival; of those that arrived together, of their turns. Below it a thin one,
    as long as the copies of its KV took, which ends when the last of them did."""
    spans: dict[str, list[tuple[float, float, float, str]]] = {name: [] for name in COLOURS}
    copies: list[tuple[float, float, float]] = []
    turn = lambda r: (r.arrival_s, math.inf if r.first_scheduled_s is None else r.first_scheduled_s)  # noqa: E731
    for row, request in enumerate(sorted(requests, key=turn)):
        cached = f" ({request.cached_tokens:,} cached)" if request.cached_tokens else ""
        tokens = f"{request.prompt_tokens:,}{cached} in, {request.output_tokens:,} out"
        for phase, start, end in phases(request):
            spans[phase].append((row, start, end, f"{request.request}: {phase} {end - start:.3g} s; {tokens}"))
            if phase == "transfer after it" and request.transfer_s is not None:
                copies.append((row + 0.4, end - request.transfer_s, end))
    width = max(0.6, min(WIDEST, 75 / max(1, len(requests))))
    for phase, found in spans.items():
        if found:
            rows, starts, ends, tips = zip(*found, strict=True)
            lines = ax.hlines(rows, starts, ends, color=COLOURS[phase], linewidth=width,
                              label=LABELS.get(phase, phase))  # fmt: skip
            frame.says(lines, tips)
    if copies:
        rows, starts, ends = zip(*copies, strict=True)
        ax.hlines(rows, starts, ends, color=frame.INK, linewidth=1, label=COPIES)


def draw(panel: PanelSpec, result: Result) -> Figure | None:
    """The panel's first point whose requests are stored, a column a variant; None where there is none."""
    for point in result.info.points:
        found = {variant: first_pass(result, variant, point) for variant in result.info.variants}
        found = {variant: requests for variant, requests in found.items() if requests}
        if found:
            return _columns(found, result)
    return None


def _columns(found: dict[str, list[RequestRow]], result: Result) -> Figure:
    figure = frame.new(frame.WIDTH, 1.6 + ROW * max(map(len, found.values())))
    axes = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (variant, requests) in zip(axes, found.items(), strict=True):
        frame.tidy(ax, "x")
        draw_requests(ax, requests)
        ax.set_title(result.info.variants[variant], fontsize=9, loc="left", fontweight="bold")
        ax.set_xlabel("seconds from the start of the pass", fontsize=9)
        ax.set_yticks([])
    axes[0].set_ylabel("requests, one a line", fontsize=9)
    axes[0].set_ylim(max(map(len, found.values())), -0.8)  # the first one on top
    axes[0].set_xlim(left=0)
    frame.legend(figure, axes)
    return figure
