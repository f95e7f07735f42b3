"""What is folded below a report's first screen: all figures, tables, claims and gates, and how it was made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

from experiments.lab.judge import pairs
from experiments.lab.show import wording
from experiments.lab.show.figures import blocks, gallery, stacks, timeline
from experiments.lab.show.grids import Sheet, gains_predicted, predictions_of
from experiments.lab.store.result import Result, RunInfo, run_path
from experiments.lab.store.rows import Row

NAMES_SHOWN = 12  # of preempted requests
FRESH = "every measurement starts from a fresh engine that is warmed up on other prompts"
RATIO = "A ratio is taken repeat by repeat, and the median as that of values; it need not be the quotient of these."
PREDICTED = "A prediction's ratio is to the baseline's prediction."
TOKENS = """\
Before a variant's speed counts, what it answers under load is compared with what each request gets alone (*gate: alone*
has all tokens of a variant's gates), and where numbers do not depend on the batch, the tokens of the timed passes with
the baseline's (*same tokens*)."""
ERRORS = """\
*error* is the largest relative error of a row, ||x - reference|| / ||reference||, against a reference that computes the
same in fp32."""
RANKING = re.compile(rf"(?:Process [\d, ]+: )?(.*{wording.RANKED})(.*)\.")  # a note
SAMPLES = "Each prompt, and the greedy text that followed, cut at the length that was asked for."
STATISTICS = """\
Tables give the median of the processes' medians over their repeats, or of one process's repeats, and in brackets a 95 %
interval. A claim is *supported* or *refuted* only where the whole interval lies on one side of its bound, else
*inconclusive*. INVALID values are listed and never counted. [docs/metrics.md](../docs/metrics.md) has the formulas."""


def details(result: Result) -> list[str]:
    info = result.info
    tables = [*pairs.grids(result), *gains_predicted(result), *Sheet(result).grids(list(info.metrics))]
    profiles = [grid.markdown() for point in info.points for grid in stacks.tables(point, result)]
    judged = [(line.claim, f"**{line.verdict}**{line.why and f': {line.why}'}", line.measured, line.source)
              for line in wording.verdicts(result)]  # fmt: skip
    folds = {
        "Remarks": result.remarks,
        "Notes": "\n".join(f"- {note}" for note in _notes(info.notes)),
        "Figures": "\n\n".join([*(picture.markdown for picture in gallery.of(result).others), *_steps(result)]),
        "Tables": "\n\n".join(grid.markdown() for grid in tables),
        "Claims and gates": judged and wording.table(("claim", "verdict", "measured", "source"), judged),
        f"INVALID: {len(result.faults):,} values were kept but not counted": _invalid(result),
        "Where a decode step's time goes": profiles and "\n\n".join([stacks.describe(result), *profiles]),
        "What was generated": _samples(info),
        "How it was measured, and how to run it again": _made(result),
    }
    return [fold(title, text) for title, text in folds.items()]


def _notes(notes: Iterable[str]) -> Iterator[str]:
    """What several processes rank, each for itself, is one line, by its mean place; of many metrics that were left out
    for one reason the first two have their names."""
    ranked: dict[str, list[list[str]]] = {}
    for note in notes:
        found = RANKING.fullmatch(note)
        labels, because, why = note.partition(": left out, because ")
        first = labels.split("; ")
        if because and len(first) > 3:
            note = f"{'; '.join(first[:2])} and {len(first) - 2} more{because}{why}"
        ranked.setdefault(found[1] if found else note, []).append(found[2].split(", ") if found else [])
    for head, lists in ranked.items():
        place = {name: sum(own.index(name) if name in own else len(own) for own in lists) for name in chain(*lists)}
        best = ", ".join(sorted(place, key=lambda name: place[name])[: len(lists[0])])
        over = f" (by mean place in {len(lists)} processes)" if len(lists) > 1 else ""
        yield f"{head}{best}{over}." if best else head


def fold(title: str, text: object) -> str:
    """Nothing where there is nothing to fold."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>" if text else ""


def _made(result: Result) -> str:
    info, repeats, many = result.info, result.repeats, len(result.info.processes) > 1
    counted = f"{repeats} repeats" if repeats != 1 else "one repeat" if many else "one repeat, which has no interval"
    counted += f" in each of {len(info.processes)} processes" if many else ""
    used = {"floor_ms", "mbu", "mfu"} & set(info.metrics)
    ceilings = f" Measured ceilings: {wording.settings(info.ceilings)}." if info.ceilings and used else ""
    compared = info.baseline is not None
    told = [
        compared and f"Variants take turns in ABBA order, and {info.procedure or FRESH}.\n{RATIO}",
        compared and predictions_of(info) and PREDICTED,
        compared and (info.gates or not info.error_gates) and TOKENS,
        info.error_gates and ERRORS,
    ]
    parts = [
        info.method,
        " ".join(str(text) for text in told if text),
        STATISTICS,
        f"On {wording.device(info)}; {counted}.{_of_the_gpu(info)}{ceilings}",
        f"Workload: {wording.settings(info.workload)}." if info.workload else "",
        _provenance(result),
    ]
    return "\n\n".join(filter(None, parts))


def _of_the_gpu(info: RunInfo) -> str:
    """What it said of itself, process by process; of several, the first one."""
    told = [f"{p.clock_mhz:,.0f} MHz, {p.power_w:.0f} W, {p.temperature_c:.0f} °C"
            for p in info.processes if p.clock_mhz and p.power_w and p.temperature_c]  # fmt: skip
    which = "the first GPU" if info.provenance.device.get("gpus", 1) > 1 else "the GPU"
    in_median = f"At the ends of passes {which} had in the median (power: over a second)"
    return f" {in_median} {'; '.join(told)}." if told else ""


def _invalid(result: Result) -> str:
    """Values by reason, so that a pass that does not count is one line and not one a metric."""
    found: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in result.faults:  # the notes say who is absent
        found.setdefault(row.reason, {}).setdefault((row.variant, row.point), []).append(row)
    info, lines = result.info, []
    for reason, cells in found.items():
        lines.append(f"- {reason}:")
        for (variant, point), rows in cells.items():
            names = dict.fromkeys(row.metric for row in rows)
            metrics = "all metrics" if len(names) == len(info.metrics) else ", ".join(f"`{name}`" for name in names)
            turns = sorted({(row.process, row.repeat) for row in rows})
            repeats = ", ".join(f"{p + 1}.{r + 1}" if len(info.processes) > 1 else str(r + 1) for p, r in turns)
            who, plural = f"{info.variants[variant]} {point}".strip(), "s" if len(turns) > 1 else ""
            lines.append(f"  - {who}, repeat{plural} {repeats}: {metrics}")
    return "\n".join(lines)


def _steps(result: Result) -> list[str]:
    """What the figures of steps show, who lost its place and how often, and where to see more."""
    if not result.steps:
        return []
    lines, path = [], run_path(result.info)
    for variant, label in result.info.variants.items():
        times = Counter(name for step in result.steps if step.variant == variant for name in step.preempted)
        names = [f"{name} {count} times" if count > 1 else name for name, count in times.most_common(NAMES_SHOWN)]
        more = f" and {len(times) - NAMES_SHOWN} more" if len(times) > NAMES_SHOWN else ""
        lines += [f"- Preempted by {label}: {', '.join(names)}{more}."] if names else []
    run = (path if result.info.run != "default" else path.parent).as_posix()
    again = f"`python run.py trace {run}` writes the same steps, with every request, for Perfetto."
    of_blocks = blocks.DESCRIBED if result.blocks else ""
    return list(filter(None, [timeline.describe(result), of_blocks, "\n".join(lines), again]))


def _samples(info: RunInfo) -> str:
    parts = []
    for prompt, group in groupby(info.samples, key=lambda s: s.prompt):
        parts.append(f"Prompt:\n\n{_fenced(prompt)}")
        for sample in group:
            authors = " and ".join(info.variants[variant] for variant in sample.variants)
            parts.append(f"{authors}{', alike' if len(sample.variants) > 1 else ''}:\n\n{_fenced(sample.text)}")
    return "\n\n".join([SAMPLES, *parts]) if parts else ""


def _fenced(text: str) -> str:
    fence = max(("```", *(f"{ticks}`" for ticks in re.findall("`+", text))), key=len)
    return f"{fence}python\n{text.strip(chr(10))}\n{fence}"


def _provenance(result: Result) -> str:
    info, origin = result.info, result.info.provenance
    if result.runs:
        return f"Data: {', '.join(f'[{run.run}](../results/{run_path(run).as_posix()}.csv)' for run in result.runs)}."
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    data = f"../results/{run_path(info).as_posix()}"
    files = {"csv": ".csv", "json": ".json", **({"steps": ".steps.csv"} if result.steps else {})}
    files |= {"kernels": ".profile.csv"} if result.kernels else {}
    lines = [
        f"Measured {origin.started} in {wording.number(origin.seconds)} s; {wording.commit(origin)}; {versions}.",
        *(
            f"Process {p.index + 1}: measured at commit {p.commit[:12]}, since which no code that is named has changed."
            for p in info.processes
            if p.commit not in (None, origin.commit)
        ),
        *(f"{info.variants[v]}: {'; or '.join(map(wording.settings, about))}." for v, about in info.peers.items()),
        f"Data: {', '.join(f'[{name}]({data}{ending})' for name, ending in files.items())}.",
    ]
    return "\n".join([*lines, "", f"```\n{origin.command}\n```"])
