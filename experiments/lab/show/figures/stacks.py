"""Bars of pieces: what a time is made of, where memory goes, profiled decode steps by role; and tables of kernels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.config.spec import PanelSpec
from experiments.lab.judge import stats
from experiments.lab.measure.profile import ROLES, KernelRow, StepProfile, by_role, role_of
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import COLOURS, HATCHES, INK, ON_TOP
from experiments.lab.show.grids import Grid
from experiments.lab.store.result import Result

PITCH, TOGETHER = 0.55, 3.0  # inches of a bar with what is between it and the next one, and at most of many
FIT = 10  # bars of steps above the fold
TICK = 47  # points, for an inch of that
NARROW = 0.045  # of the axis: a smaller piece of a bar has no room for its number
MEMORY = ("weights", "adapters", "draft model", "KV", "CUDA graphs")  # begin what an engine says of its sizes
_SIZE = re.compile(r"([\d,.]+) (GiB|MiB)")
Rows = dict[str, dict[str, float]]  # the sizes of each row's pieces


def draw(
    rows: Rows,
    unit: str,
    axis: str,
    looks: Mapping[str, Mapping[str, Any]] | None = None,
    most: float = 0.0,
    ticks: Mapping[str, float] | None = None,
) -> Figure:
    """Bars from the left, a row of pieces each, whose sizes in `unit` stand in them and their sum behind; below them
    `axis`, beside a sum what it can be at most, and a tick at what each row took without the profiler. `looks` are of
    the pieces, by their names."""
    names = list(dict.fromkeys(name for pieces in rows.values() for name in pieces))
    own = looks is None
    looks = looks or {name: {"color": COLOURS[i], "hatch": HATCHES[i]} for i, name in enumerate(names)}
    called = [textwrap.fill(who, 26) for who in rows]
    pitch = frame.pitch(called, PITCH, TOGETHER)
    figure, ax = frame.one(0.9 + pitch * len(rows) + 0.25 * -(-len(looks) // 3))
    longest = max(sum(pieces.values()) for pieces in rows.values())
    labels = {name: name for name in names}
    for name in names if own else ():
        sizes = [pieces[name] for pieces in rows.values() if name in pieces]
        if max(sizes) <= NARROW * longest:  # nowhere is it wide enough for its number
            ends = dict.fromkeys(map(wording.number, (min(sizes), max(sizes))))
            labels[name] = f"{name}: {' to '.join(ends)} {unit}"
    for row, (who, pieces) in enumerate(rows.items()):
        left = 0.0
        for name, size in ((name, size) for name, size in pieces.items() if size > 0):
            look = {"edgecolor": "white", "linewidth": 0.6, **looks[name]}
            (bar,) = ax.barh(row, size, 0.68, left=left, label=labels[name], **look)
            frame.says(bar, [f"{who}: {name} {wording.number(size)} {unit}"])
            if size > NARROW * longest:
                frame.beside(ax, wording.number(size), (left + size / 2, row), 0, ha="center", fontsize=7.5, **ON_TOP)
            left += size
        text, end = wording.number(left) + (f" of {wording.number(most)}" if most else ""), left
        if ticks:
            text, end = f"{text} (tick: {wording.number(ticks[who])})", max(left, ticks[who])
        frame.beside(ax, text, (end, row), 4)
    if ticks:
        look = {"color": INK, "markeredgewidth": 2, "linestyle": "none", "zorder": 7}
        (marks,) = ax.plot([ticks[who] for who in rows], range(len(rows)), "|", markersize=TICK * pitch, **look)
        ax.plot([], [], "|", markersize=10, label=PLAIN, **look)
        frame.says(marks, [f"{who}: {wording.number(ticks[who])} {unit}, {PLAIN}" for who in rows])
    frame.name_rows(ax, called)
    ax.set_xlim(0, 1.15 * max(longest, *(ticks or {}).values(), 0))
    ax.set_xlabel(axis)
    frame.linear(ax.xaxis, 8)
    frame.legend(figure, [ax])
    return figure


def parts_of(panel: PanelSpec, result: Result) -> Rows:
    """Metrics as the pieces of a bar for each variant and point that has all of them."""
    info = result.info
    rows: Rows = {}
    for variant, point in info.cells:
        found = {p: list(result.values(variant, point, p).values()) for p in panel.parts if p in info.metrics}
        if found and all(found.values()):
            pieces = {info.metrics[part].label: max(0.0, stats.median(values)) for part, values in found.items()}
            rows[f"{info.variants[variant]}, {wording.point(point)}"] = pieces
    return rows


def parts(panel: PanelSpec, result: Result) -> Figure:
    metric = result.info.metrics[panel.metric]
    # Parts are means, which add up, whatever the whole is told by.
    axis = f"{metric.label.partition(',')[0]}: its parts ({metric.unit})"
    return draw(parts_of(panel, result), metric.unit, axis)


def memory_of(result: Result) -> Rows:
    """GiB by part, of every variant whose engine told its weights and its KV when it started."""
    found: Rows = {}
    for variant, label in result.info.variants.items():
        said = result.info.peers.get(variant, ({},))[-1]
        sizes = dict.fromkeys(MEMORY, 0.0)
        for key in said:
            for part in filter(key.startswith, MEMORY):
                told = ((float(n.replace(",", "")), unit) for n, unit in _SIZE.findall(str(said[key])))
                sizes[part] += sum(size / (1 if unit == "GiB" else 1024) for size, unit in told)
        # Graphs of more than the weights are no graphs: somebody else, such as a peer, loaded while they were captured.
        if sizes["KV"] and sizes["weights"] > sizes["CUDA graphs"]:
            found[label] = {part: size for part, size in sizes.items() if size}
    return found


def memory(result: Result) -> Figure:
    """One bar for all variants whose sizes are the same. What is left of the device is free, or work space: drawn, it
    would often dwarf the rest."""
    whole = result.info.provenance.device.get("gpu_memory_gib", 0.0)
    alike: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for label, sizes in memory_of(result).items():
        alike.setdefault(tuple(sizes.items()), []).append(label)
    rows = {own[0] + (f" and {len(own) - 1} alike" if own[1:] else ""): dict(sizes) for sizes, own in alike.items()}
    return draw(rows, "GiB", "GiB of the GPU's memory (behind a bar: their sum, of all that it has)", most=whole)


ROWS = 14  # of a table of kernels; what is left is summed up
BETWEEN, WITHIN = "idle between steps", "between a step's kernels"
LOOKS: dict[str, dict[str, str]] = {
    **{role: {"color": colour, "hatch": hatch} for role, colour, hatch in
       zip(ROLES, (*COLOURS, "#332288", "#882255", "#DDCC77", "#44AA99", "#AA4499"), cycle(HATCHES))},
    "other": {"color": INK, "hatch": "**"},
    WITHIN: {"color": "#e4e4e4", "edgecolor": "#666666"},
    BETWEEN: {"color": "#ffffff", "hatch": "////", "edgecolor": "#666666"},
}  # fmt: skip
PLAIN = "mean step just before, without the profiler"
TITLE = "Where a decode step's time goes"
OVERLAP = 1.05  # times the time in which any kernel ran, there is more of them than can be


def describe(result: Result) -> str:
    steps = " or ".join(str(n) for n in sorted({profile.steps for profile in result.info.profiles}))
    text = (
        f"Where a decode step's time goes on the GPU: the mean over {steps} steps of each engine under torch.profiler, "
        "in a pass of their own after everything else had been timed. *step* is a step's time on the host's clock "
        "without the profiler; *profiled* is from step to step with it, which costs the host and each launch some "
        "time: where it is more than *step*, a tick in the picture, that is why, and so much of the idle time is the "
        "profiler's. *step* is a mean of as many steps, just before these: a slow one among them moves it, which the "
        "median ITL of all timed passes does not show. In *kernels* some kernel ran; *idle between steps* is when none "
        "did from the end of one step to the start of the next; the rest is between a step's own kernels. A kernel's "
        "role is guessed from its name."
    )
    own = [f"{result.info.variants[p.variant]} {p.point}".strip() for p in result.info.profiles
           if sum(by_role(_kernels(p, result)).values()) > OVERLAP * p.busy_us]  # fmt: skip
    if own:
        text += (
            f" **Of {' and '.join(own)} the kernels' times are too long by what they overlap**: a kernel launched as a "
            "programmatic dependent waits in place for the one before it, and its waiting was counted. *kernels* and "
            "*step* are right; the share of each kernel is not."
        )
    return text


def tables(point: str, result: Result) -> list[Grid]:
    """One line a variant, and for each its kernels, the longest first; none of a point that was not profiled."""
    labels, own = result.info.variants, [profile for profile in result.info.profiles if profile.point == point]
    rows = [(labels[p.variant], str(p.rows), *map(wording.number, (p.plain_us, p.profiled_us, p.busy_us, p.idle_us)),
             f"{100 * p.idle_share:.2f} %") for p in own]  # fmt: skip
    header = ("variant", "rows", "step, µs", "profiled, µs", "kernels, µs", "idle between steps, µs", "share")
    grids = [Grid(f"Decode steps {point}".strip(), header, tuple(rows))] if rows else []
    for profile in own:
        kernels = sorted(_kernels(profile, result), key=lambda row: -row.us)
        shown = kernels if len(kernels) <= ROWS + 1 else kernels[:ROWS]
        rest = kernels[len(shown) :]
        parts = [(row.kernel, role_of(row), [row]) for row in shown]
        parts += [(f"{len(rest)} others", "", rest)] if rest else []
        lines, total = [], sum(row.us for row in kernels)
        for name, role, each in (*parts, ("all", "", kernels)):
            calls, us = round(sum(row.calls for row in each), 2), sum(row.us for row in each)
            share = f"{100 * us / total:.1f} %" if total else wording.NOTHING
            lines.append((name, role, wording.number(calls), wording.number(us), share))
        title = f"Kernels of a step: {labels[profile.variant]} {point}".strip()
        grids.append(Grid(title, ("kernel", "role", "calls", "µs", "share"), tuple(lines)))
    return grids


def steps(result: Result) -> Figure:
    """A bar for each profiled engine, point by point: microseconds by role, and what is left of the step."""
    info, pieces, plain = result.info, {}, {}
    for p in sorted(info.profiles, key=lambda profile: list(info.points).index(profile.point)):
        name = wording.titled(info.variants[p.variant], p.point)
        within = max(p.profiled_us - p.busy_us - p.idle_us, 0.0)
        pieces[name] = by_role(_kernels(p, result)) | {WITHIN: within, BETWEEN: p.idle_us}
        plain[name] = p.plain_us
    return draw(pieces, "µs", "µs of a decode step on the GPU, under the profiler", LOOKS, ticks=plain)


def _kernels(profile: StepProfile, result: Result) -> list[KernelRow]:
    return [row for row in result.kernels if (row.variant, row.point) == (profile.variant, profile.point)]
