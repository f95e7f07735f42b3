"""Bars of pieces: what a time is made of, where the memory of a device goes, and profiled decode steps by role, with a
table of the kernels that take longest."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.judge import stats
from experiments.lab.measure.profile import ROLES, KernelRow, StepProfile, by_role, role_of
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import COLOURS, HATCHES, INK, ON_TOP
from experiments.lab.show.grids import Grid
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result

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
    """Bars from the left, a row of pieces each, whose sizes in `unit` stand in them and their sum behind.

    Args:
        axis: what stands below it.
        looks: of each piece by its name, in the order of the legend.
        most: what a sum can be, if that is to stand beside it.
        ticks: what each row took without the profiler.
    """
    names = list(dict.fromkeys(name for pieces in rows.values() for name in pieces))
    looks = looks or {name: {"color": COLOURS[i], "hatch": HATCHES[i]} for i, name in enumerate(names)}
    figure, ax = frame.one(0.9 + 0.55 * len(rows) + 0.25 * -(-len(looks) // 3), grid="x")
    longest = max(sum(pieces.values()) for pieces in rows.values())
    for row, (who, pieces) in enumerate(rows.items()):
        left = 0.0
        for name, size in ((name, size) for name, size in pieces.items() if size > 0):
            seen = name in ax.get_legend_handles_labels()[1]
            (bar,) = ax.barh(row, size, 0.68, left=left, linewidth=0.6, label=None if seen else name,
                             **{"edgecolor": "white", **looks[name]})  # fmt: skip
            frame.says(bar, [f"{who}: {name} {wording.number(size)} {unit}"])
            if size > NARROW * longest:
                ax.annotate(wording.number(size), (left + size / 2, row), ha="center", va="center", fontsize=7.5,
                            **ON_TOP)  # fmt: skip
            left += size
        text = wording.number(left) + (f" of {wording.number(most)}" if most else "")
        ax.annotate(text, (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    if ticks:
        look: dict[str, Any] = {"color": INK, "markeredgewidth": 2, "linestyle": "none", "zorder": 7}
        (marks,) = ax.plot([ticks[who] for who in rows], range(len(rows)), "|", markersize=26, **look)
        ax.plot([], [], "|", markersize=10, label=PLAIN, **look)
        frame.says(marks, [f"{who}: {wording.number(ticks[who])} {unit}, {PLAIN}" for who in rows])
    frame.name_rows(ax, [textwrap.fill(who, 26) for who in rows])
    ax.set_xlim(0, 1.15 * max(longest, *(ticks or {}).values(), 0))
    ax.set_xlabel(axis, fontsize=9)
    frame.linear(ax.xaxis, 8)
    frame.legend(figure, [ax])
    return figure


def of_metrics(panel: PanelSpec, result: Result) -> Figure | None:
    """Metrics as the pieces of a bar for each variant and point; None where no variant has all of them anywhere."""
    info = result.info
    known = [part for part in panel.parts if part in info.metrics]
    rows: Rows = {}
    for point in info.points:
        for variant, label in info.variants.items():
            found = {part: list(result.table.values(variant, point, part).values()) for part in known}
            if found and all(found.values()):
                pieces = {info.metrics[part].label: max(0.0, stats.median(values)) for part, values in found.items()}
                rows[f"{label}, {wording.point(point)}"] = pieces
    metric = info.metrics[panel.metric]
    return draw(rows, metric.unit, frame.axis_label(metric, 60)) if rows else None


def memory_of(result: Result) -> Rows:
    """GiB by part, of every variant whose engine told its weights and its KV when it started."""
    found: Rows = {}
    for variant, label in result.info.variants.items():
        said = result.info.peers.get(variant, ({},))[-1]
        sizes = {part: sum(_gib(str(said[key])) for key in said if key.startswith(part)) for part in MEMORY}
        if sizes["weights"] and sizes["KV"]:
            found[label] = {part: size for part, size in sizes.items() if size}
    return found


def memory(result: Result) -> Figure:
    """What is left of the device is free, or work space: drawn, it would often dwarf the rest."""
    whole = result.info.provenance.device.get("gpu_memory_gib", 0.0)
    return draw(memory_of(result), "GiB", "GiB, of those that the device has", most=whole)


def _gib(told: str) -> float:
    found = _SIZE.findall(told)
    return sum(float(number.replace(",", "")) / (1 if unit == "GiB" else 1024) for number, unit in found)


ROWS = 14  # of a table of kernels; what is left is summed up
BETWEEN, WITHIN = "idle between steps", "between a step's kernels"
LOOKS: dict[str, dict[str, str]] = {
    **{role: {"color": colour, "hatch": frame.HATCHES[i % len(frame.HATCHES)]}
       for i, (role, colour) in enumerate(zip(ROLES, (*frame.COLOURS, "#332288", "#882255", "#DDCC77"), strict=False))},
    "other": {"color": frame.INK, "hatch": "**"},
    WITHIN: {"color": "#e4e4e4", "edgecolor": "#666666"},
    BETWEEN: {"color": "#ffffff", "hatch": "////", "edgecolor": "#666666"},
}  # fmt: skip
PLAIN = "the step's time without the profiler"
TITLE = "Where a decode step's time goes"
OVERLAP = 1.05  # times the time in which any kernel ran, there is more of them than can be


def points(result: Result) -> list[str]:
    profiled = {profile.point for profile in result.info.profiles}
    return [point for point in result.info.points if point in profiled]


def describe(result: Result) -> str:
    steps = " or ".join(str(n) for n in sorted({profile.steps for profile in result.info.profiles}))
    return (
        f"Where a decode step's time goes on the GPU: the mean over {steps} steps of each engine under torch.profiler, "
        "in a pass of their own after everything else had been timed. *step* is a step's time on the host's clock "
        "without the profiler; *profiled* is from step to step with it, which costs the host and each launch some "
        "time: where it is more than *step*, a tick in the picture, that is why, and so much of the idle time is the "
        "profiler's. In *kernels* some kernel ran; *idle between steps* is when none did from the end of one step to "
        "the start of the next; the rest is between a step's own kernels. A "
        f"kernel's role is guessed from its name.{_doubled(result)}"
    )


def _doubled(result: Result) -> str:
    """What is to be said of steps whose kernels' times add up to more than the time in which any ran."""
    own = [
        f"{result.info.variants[profile.variant]} {profile.point}".strip()
        for profile in result.info.profiles
        if sum(_roles(profile, result.kernels).values()) > OVERLAP * profile.busy_us
    ]
    if not own:
        return ""
    return (
        f" **Of {' and '.join(own)} the kernels' times are too long by what they overlap**: a kernel launched as a "
        "programmatic dependent waits in place for the one before it, and its waiting was counted. *kernels* and "
        "*step* are right; the share of each kernel is not."
    )


def tables(point: str, result: Result) -> list[Grid]:
    """One line a variant, and for each its kernels, the longest first."""
    info = result.info
    own = [profile for profile in info.profiles if profile.point == point]
    summary = Grid(
        f"Decode steps {point}".strip(),
        ("variant", "rows", "step, µs", "profiled, µs", "kernels, µs", "idle between steps, µs", "share"),
        tuple(
            (
                info.variants[p.variant],
                str(p.rows),
                *(wording.number(us) for us in (p.plain_us, p.profiled_us, p.busy_us, p.idle_us)),
                f"{100 * p.idle_share:.2f} %",
            )
            for p in own
        ),
    )
    return [summary, *(_kernels(profile, result) for profile in own)]


def _kernels(profile: StepProfile, result: Result) -> Grid:
    rows = [row for row in result.kernels if (row.variant, row.point) == (profile.variant, profile.point)]
    rows.sort(key=lambda row: -row.us)
    total = sum(row.us for row in rows)
    shown = rows if len(rows) <= ROWS + 1 else rows[:ROWS]
    lines = [_line(row.kernel, role_of(row), row.calls, row.us, total) for row in shown]
    rest = rows[len(shown) :]
    if rest:
        lines.append(_line(f"{len(rest)} others", "", sum(r.calls for r in rest), sum(r.us for r in rest), total))
    lines.append(_line("all", "", sum(row.calls for row in rows), total, total))
    title = f"Kernels of a step: {result.info.variants[profile.variant]} {profile.point}".strip()
    return Grid(title, ("kernel", "role", "calls", "µs", "share"), tuple(lines))


def _line(kernel: str, role: str, calls: float, us: float, total: float) -> tuple[str, ...]:
    share = f"{100 * us / total:.1f} %" if total else "-"
    return kernel, role, wording.number(round(calls, 2)), wording.number(us), share


def steps(result: Result) -> Figure:
    """A bar for each engine that was profiled, point by point, a peer's below ours."""
    info = result.info
    ordered = sorted(info.profiles, key=lambda profile: list(info.points).index(profile.point))
    names = {wording.titled(info.variants[p.variant], p.point): p for p in ordered}
    pieces = {name: _pieces(p, result.kernels) for name, p in names.items()}
    plain = {name: p.plain_us for name, p in names.items()}
    return draw(pieces, "µs", "µs of a decode step on the GPU, under the profiler", LOOKS, ticks=plain)


def _roles(profile: StepProfile, kernels: Sequence[KernelRow]) -> dict[str, float]:
    return by_role(row for row in kernels if (row.variant, row.point) == (profile.variant, profile.point))


def _pieces(profile: StepProfile, kernels: Sequence[KernelRow]) -> dict[str, float]:
    """Microseconds by role, and what is left of the step."""
    found = _roles(profile, kernels)
    within = profile.profiled_us - profile.busy_us - profile.idle_us
    return found | {WITHIN: max(within, 0.0), BETWEEN: profile.idle_us}
