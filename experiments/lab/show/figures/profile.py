"""Profiled decode steps for a report: bars by role, and the kernels that take longest."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.lab.measure.profile import ROLES, KernelRow, StepProfile, by_role, role_of
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, stacks
from experiments.lab.show.grids import Grid
from experiments.lab.store.result import Result

ROWS = 14  # of a table of kernels; what is left is summed up
BETWEEN, WITHIN = "idle between steps", "between a step's kernels"
LOOKS: dict[str, dict[str, str]] = {
    **{role: {"color": colour, "hatch": frame.HATCHES[i % len(frame.HATCHES)]}
       for i, (role, colour) in enumerate(zip(ROLES, frame.COLOURS, strict=False))},
    "other": {"color": "#F0E442", "hatch": "**"},
    WITHIN: {"color": "#e4e4e4", "edgecolor": "#666666"},
    BETWEEN: {"color": "#ffffff", "hatch": "////", "edgecolor": "#666666"},
}  # fmt: skip
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


def draw(result: Result) -> Figure:
    """A bar for each engine that was profiled, point by point, a peer's below ours."""
    info = result.info
    ordered = sorted(info.profiles, key=lambda profile: list(info.points).index(profile.point))
    pieces = {wording.titled(info.variants[p.variant], p.point): _pieces(p, result.kernels) for p in ordered}
    return stacks.draw(pieces, "µs", "µs of a decode step on the GPU, under the profiler", LOOKS)


def _roles(profile: StepProfile, kernels: Sequence[KernelRow]) -> dict[str, float]:
    return by_role(row for row in kernels if (row.variant, row.point) == (profile.variant, profile.point))


def _pieces(profile: StepProfile, kernels: Sequence[KernelRow]) -> dict[str, float]:
    """Microseconds by role, and what is left of the step."""
    found = _roles(profile, kernels)
    within = profile.profiled_us - profile.busy_us - profile.idle_us
    return found | {WITHIN: max(within, 0.0), BETWEEN: profile.idle_us}
