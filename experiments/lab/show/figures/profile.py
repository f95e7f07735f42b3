"""Profiled decode steps for a report: bars by role, and the kernels that take longest."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.measure.profile import ROLES, KernelRow, StepProfile, by_role, role_of
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, style
from experiments.lab.show.grids import Grid
from experiments.lab.store.result import Result

ROWS = 14  # of a table of kernels; what is left is summed up
BETWEEN, WITHIN = "idle between steps", "between a step's kernels"
COLOURS = dict(zip(ROLES, style.COLOURS, strict=False)) | {"other": "#F0E442", WITHIN: "#e4e4e4", BETWEEN: "#ffffff"}
HATCHES = {role: style.HATCHES[i % len(style.HATCHES)] for i, role in enumerate(ROLES)}
HATCHES |= {"other": "**", WITHIN: "", BETWEEN: "////"}
OVERLAP = 1.05  # times the time in which any kernel ran, there is more of them than can be
NARROW = 0.045  # of the axis: a smaller piece has no room for its number


def points(result: Result) -> list[str]:
    profiled = {profile.point for profile in result.info.profiles}
    return [point for point in result.info.points if point in profiled]


def describe(result: Result) -> str:
    steps = " or ".join(str(n) for n in sorted({profile.steps for profile in result.info.profiles}))
    return (
        f"Where a decode step's time goes on the GPU: the mean over {steps} steps of each engine under torch.profiler, "
        "in a pass of their own after everything else had been timed. *step* is a step's time on the host's clock "
        "without the profiler; *profiled* is from step to step with it, which costs the host and each launch some "
        "time: where it is more than *step*, that is why. In *kernels* some kernel ran; *idle between steps* is when "
        "none did from the end of one step to the start of the next; the rest is between a step's own kernels. A "
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


def draw(result: Result, point: str) -> Figure:
    """A bar for each engine that was profiled there, a peer's beside ours."""
    own = [profile for profile in result.info.profiles if profile.point == point]
    with frame.default_style():
        figure = frame.new(frame.WIDTH, 1.5 + 0.62 * len(own))
        ax = figure.subplots()
        frame.tidy(ax, "x")
        longest = max(sum(_pieces(profile, result.kernels).values()) for profile in own)
        seen: set[str] = set()
        for row, profile in enumerate(own):
            _bar(ax, row, _pieces(profile, result.kernels), longest, seen, result.info.variants[profile.variant])
        labels = [textwrap.fill(result.info.variants[profile.variant], 26) for profile in own]
        ax.set_yticks(range(len(own)), labels)
        ax.set_ylim(len(own) - 0.4, -0.6)
        ax.set_xlim(0, 1.1 * longest)
        frame.linear(ax.xaxis, 8)
        ax.set_xlabel("µs of a decode step on the GPU, under the profiler", fontsize=9)
        frame.legend(figure, [ax])
        figure.suptitle("Where a decode step's time goes" + (f", {point}" if point else ""), fontsize=12)
        return figure


def _roles(profile: StepProfile, kernels: Sequence[KernelRow]) -> dict[str, float]:
    return by_role(row for row in kernels if (row.variant, row.point) == (profile.variant, profile.point))


def _pieces(profile: StepProfile, kernels: Sequence[KernelRow]) -> dict[str, float]:
    """Microseconds by role, and what is left of the step."""
    found = _roles(profile, kernels)
    within = profile.profiled_us - profile.busy_us - profile.idle_us
    return found | {WITHIN: max(within, 0.0), BETWEEN: profile.idle_us}


def _bar(ax: Axes, row: int, pieces: dict[str, float], longest: float, seen: set[str], who: str) -> None:
    left = 0.0
    for name, us in pieces.items():
        edge = "#666666" if name in (WITHIN, BETWEEN) else "white"
        (bar,) = ax.barh(row, us, 0.68, left=left, color=COLOURS[name], hatch=HATCHES[name], linewidth=0.6,
                         edgecolor=edge, label=None if name in seen else name)  # fmt: skip
        seen.add(name)
        frame.says(bar, [f"{who}: {name} {wording.number(us)} µs"])
        if us > NARROW * longest:
            ax.annotate(wording.number(us), (left + us / 2, row), ha="center", va="center", fontsize=7.5,
                        **style.ON_TOP)  # fmt: skip
        left += us
    ax.annotate(wording.number(left), (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
