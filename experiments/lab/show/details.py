"""What is folded below a report's first screen: all figures, tables, claims and gates, and how it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby

from experiments.lab.judge import pairs
from experiments.lab.show import wording
from experiments.lab.show.effects import judgements
from experiments.lab.show.figures import gallery, profile, timeline
from experiments.lab.show.figures.gallery import Picture
from experiments.lab.show.gate_words import gate_lines
from experiments.lab.show.grids import Sheet
from experiments.lab.store import result as store
from experiments.lab.store.result import Result, RunInfo
from experiments.lab.store.rows import Row

NAMES_SHOWN = 12  # of preempted requests
FRESH = "every measurement starts from a fresh engine that is warmed up on other prompts"
TOKENS = """\
Before a variant's speed counts, what it answers under load is compared with what each request gets alone, and where
numbers do not depend on the batch, the tokens of the timed passes with the baseline's (*same tokens*)."""
ERRORS = """\
*error* is the largest relative error of a row, ||x - reference|| / ||reference||, against a reference that computes the
same in fp32."""
STATISTICS = """\
Tables give the median over the repeats and, in brackets, a 95 % interval. A claim is *supported* or *refuted* only
where the whole interval lies on one side of its bound, else *inconclusive*. INVALID values are listed and never
counted. [docs/metrics.md](../docs/metrics.md) has the formulas."""


def details(result: Result, picture: Callable[[Picture], str]) -> list[str]:
    """A fold each, as markdown; `picture` writes the line that shows one."""
    info, sheet = result.info, Sheet(result)
    grids = [*pairs.grids(result), *sheet.grids(list(info.metrics))]
    shown = [*(picture(each) for each in gallery.of(result).others), *_steps(result)]
    dropped = len(_dropped(result))
    return [
        fold("Remarks", result.remarks),
        fold("Notes", "\n".join(f"- {note}" for note in info.notes)),
        fold("Figures", "\n\n".join(shown)),
        fold("Tables", "\n\n".join(grid.markdown() for grid in grids)),
        fold("Claims and gates", _verdicts(result)),
        fold(f"INVALID: {dropped:,} values were kept but not counted", _invalid(result)),
        fold("Where a decode step's time goes", _profile(result)),
        fold("What was generated", _samples(info)),
        fold("How it was measured, and how to run it again", _made(result, sheet.repeats)),
    ]


def fold(title: str, text: str) -> str:
    """Nothing where there is nothing to fold."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>" if text else ""


def _made(result: Result, repeats: int) -> str:
    info = result.info
    counted = f"{repeats} repeats" if repeats != 1 else "one repeat, which has no interval"
    parts = [
        info.method,
        _comparison(info),
        STATISTICS,
        f"On {wording.device(info)}; {counted}.{_ceilings(info)}",
        f"Workload: {wording.settings(info.workload)}." if info.workload else "",
        _provenance(result),
    ]
    return "\n\n".join(part for part in parts if part)


def _comparison(info: RunInfo) -> str:
    parts = []
    if info.baseline is not None:
        parts.append(
            f"Variants take turns in ABBA order, and {info.procedure or FRESH}.\nA ratio is taken repeat by repeat."
        )
        if info.gates or not info.error_gates:
            parts.append(TOKENS)
    if info.error_gates:
        parts.append(ERRORS)
    return " ".join(parts)


def _ceilings(info: RunInfo) -> str:
    used = {"floor_ms", "mbu", "mfu"} & set(info.metrics)
    return f" Measured ceilings: {wording.settings(info.ceilings)}." if info.ceilings and used else ""


def _verdicts(result: Result) -> str:
    info = result.info
    lines = [(claim, f"**{verdict}**", figure, "the gate") for claim, verdict, figure in gate_lines(info)]
    for j in judgements(result):
        verdict = f"**{j.verdict.value}**" + (f": {j.reason}" if j.reason else "")
        lines.append((wording.claim(j.claim, info), verdict, wording.measured(j, info), j.claim.source))
    return wording.table(("claim", "verdict", "measured", "source"), lines) if lines else ""


def _invalid(result: Result) -> str:
    """Values by reason, so that a pass that does not count is one line and not one a metric."""
    dropped = _dropped(result)
    if not dropped:
        return ""
    info, lines = result.info, []
    for reason in dict.fromkeys(row.reason for row in dropped):
        lines.append(f"- {reason}:")
        rows = [row for row in dropped if row.reason == reason]
        for variant, point in dict.fromkeys((row.variant, row.point) for row in rows):
            own = [row for row in rows if (row.variant, row.point) == (variant, point)]
            names = list(dict.fromkeys(row.metric for row in own))
            metrics = "all metrics" if len(names) == len(info.metrics) else ", ".join(f"`{name}`" for name in names)
            turns = sorted({(row.process, row.repeat) for row in own})
            repeats = ", ".join(f"{p + 1}.{r + 1}" if len(info.processes) > 1 else str(r + 1) for p, r in turns)
            plural = "s" if "," in repeats else ""
            lines.append(f"  - {f'{info.variants[variant]} {point}'.strip()}, repeat{plural} {repeats}: {metrics}")
    return "\n".join(lines)


def _dropped(result: Result) -> list[Row]:
    """The notes say who is absent."""
    return [row for row in result.rows if row.is_fault]


def _steps(result: Result) -> list[str]:
    if not result.steps:
        return []
    info = result.info
    run = store.run_path(info) if info.run != "default" else store.run_path(info).parent
    again = f"`python run.py trace {run.as_posix()}` writes the same steps, with every request, for Perfetto."
    return [timeline.describe(result), *_preempted(result), again]


def _profile(result: Result) -> str:
    if not result.info.profiles:
        return ""
    grids = [grid.markdown() for point in profile.points(result) for grid in profile.tables(point, result)]
    return "\n\n".join([profile.describe(result), *grids])


def _preempted(result: Result) -> list[str]:
    """Who lost its place, and how often."""
    lines = []
    for variant, label in result.info.variants.items():
        times = Counter(name for step in result.steps if step.variant == variant for name in step.preempted)
        if times:
            names = [f"{name} {count} times" if count > 1 else name for name, count in times.most_common(NAMES_SHOWN)]
            more = f" and {len(times) - NAMES_SHOWN} more" if len(times) > NAMES_SHOWN else ""
            lines.append(f"- Preempted by {label}: {', '.join(names)}{more}.")
    return ["\n".join(lines)] if lines else []


def _samples(info: RunInfo) -> str:
    if not info.samples:
        return ""
    parts = [
        "Each prompt, and the greedy text that followed, cut at the length that was asked for.",
    ]
    for prompt, group in groupby(info.samples, key=lambda s: s.prompt):
        parts.append(f"Prompt:\n\n{_fenced(prompt)}")
        for sample in group:
            authors = " and ".join(info.variants[variant] for variant in sample.variants)
            parts.append(f"{authors}{', alike' if len(sample.variants) > 1 else ''}:\n\n{_fenced(sample.text)}")
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}python\n{text.strip(chr(10))}\n{fence}"


def _provenance(result: Result) -> str:
    info, origin = result.info, result.info.provenance
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    peers = info.peers.items()
    data = f"../results/{store.run_path(info).as_posix()}"
    if result.runs:
        paths = [(run.run, f"../results/{store.run_path(run).as_posix()}.csv") for run in result.runs]
        return "Data: " + ", ".join(f"[{name}]({path})" for name, path in paths) + "."
    return "\n".join(
        [
            f"Measured {origin.started} in {wording.number(origin.seconds)} s; {wording.commit(origin)}; {versions}.",
            *(f"{info.variants[name]}: {'; or '.join(map(wording.settings, about))}." for name, about in peers),
            f"Data: [csv]({data}.csv), [json]({data}.json)"
            + (f", [steps]({data}.steps.csv)" if result.steps else "")
            + (f", [kernels]({data}.profile.csv)" if result.kernels else "")
            + ".",
            "",
            f"```\n{origin.command}\n```",
        ]
    )
