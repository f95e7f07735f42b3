"""The pages of the reports as markdown: one of an experiment, and the index of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from experiments.lab.judge import pairs
from experiments.lab.judge.claims import Verdict
from experiments.lab.show import profile_plot, timeline, wording
from experiments.lab.show.answer import answer, flags, headline, judgements
from experiments.lab.show.gate_words import gate_lines
from experiments.lab.show.grids import Sheet
from experiments.lab.store import result as store
from experiments.lab.store.result import Result, RunInfo

FIGURES = "figures"  # their folder beside the pages
MARK = "<!-- Made by `python run.py report` from results/: what is written here by hand is lost. -->"
NAMES_SHOWN = 12  # of preempted requests
FRESH = "every measurement starts from a fresh engine that is warmed up on other prompts"
TOKENS = """\
Before a variant's speed counts, its greedy tokens are compared with the
baseline's (*same tokens*)."""
ERRORS = """\
*error* is the largest relative error of a row, ||x - reference|| / ||reference||, against a reference that computes the
same in fp32."""
STATISTICS = """\
Tables give the median over the repeats and, in brackets, a 95 % interval. A claim is *supported* or *refuted* only
where the whole interval lies on one side of its bound, else *inconclusive*. INVALID values are listed and never
counted. [docs/metrics.md](../docs/metrics.md) has the formulas."""


def report_page(results: Sequence[Result], damaged: Sequence[Path]) -> str:
    first = results[0].info
    answers = [answer(result) for result in results]
    if len(results) == 1:
        answered = f"**Answer** ({_heading(first)}). {answers[0]}"
    else:
        pairs = zip(results, answers, strict=True)
        answered = "**Answer.**\n\n" + "\n".join(f"- *{_heading(r.info)}*: {text}" for r, text in pairs)
    parts = [
        MARK,
        f"# {first.title}",
        *(f"> **NOT IN THIS REPORT**: `results/{path.as_posix()}` cannot be read." for path in damaged),
        *(f"> **{flag}**, on {_heading(r.info)}" for r in results for flag in flags(r)),
        f"**Question.** {first.question}",
        answered,
        _figures_to_reach(first),
        *(_run(result) for result in results),
        "## How the numbers are made",
        *_texts(results, "method"),
        _comparison(results),
        STATISTICS,
        "## Limits" if any(r.info.limits for r in results) else "",
        "\n".join(f"- {limit}" for limit in dict.fromkeys(limit for r in results for limit in r.info.limits)),
        "## The code",
        "\n".join(f"- [{path}](../{path})" for path in dict.fromkeys(path for r in results for path in r.info.code)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _comparison(results: Sequence[Result]) -> str:
    infos = [result.info for result in results]
    parts = []
    if infos[0].baseline is not None:
        begins = "; or, ".join(dict.fromkeys(info.procedure or FRESH for info in infos))
        parts.append(f"Variants take turns in ABBA order, and {begins}.\nA ratio is taken repeat by repeat.")
        if any(info.gates or not info.error_gates for info in infos):
            parts.append(TOKENS)
    if any(info.error_gates for info in infos):
        parts.append(ERRORS)
    return " ".join(parts)


def _texts(results: Sequence[Result], name: str) -> list[str]:
    """The same text once; where runs were made with other texts, each with its run."""
    texts = [getattr(result.info, name) for result in results]
    if len(set(texts)) == 1:
        return texts[:1]
    return [f"*{_heading(result.info)}*: {text}" for result, text in zip(results, texts, strict=True) if text]


def _heading(info: RunInfo) -> str:
    return info.hardware if info.run == "default" else f"{info.hardware}, with {_overrides(info)}"


def _overrides(info: RunInfo) -> str:
    """A run's name in pieces that a line can be broken between, and that are no markdown."""
    return ", ".join(f"`{piece}`" for piece in info.run.split(",") if piece)


def _figures_to_reach(info: RunInfo) -> str:
    parts = []
    if info.original:
        parts.append(f"The original project's figure: {info.original}.")
    if info.target:
        parts.append(f"To reach or beat: {info.target}.")
    return " ".join(parts)


def _run(result: Result) -> str:
    info, sheet = result.info, Sheet(result)
    repeats = f"{sheet.repeats} repeats" if sheet.repeats != 1 else "one repeat, which has no interval"
    parts = [
        f"## Results: {_heading(info)}",
        f"On {wording.device(info)}; {repeats}.{_ceilings(info)}",
        _workload(info),
        _verdicts(result),
        f"### Remarks\n\n{result.remarks}" if result.remarks else "",
        "\n".join(f"- {note}" for note in info.notes),
        *(_picture(plot.title, info, plot.name) for plot in info.plots),
        *(grid.markdown() for grid in (*pairs.grids(result), *sheet.grids(list(info.metrics)))),
        _invalid(result),
        _steps(result),
        _profile(result),
        _samples(info),
        _provenance(result),
    ]
    return "\n\n".join(part for part in parts if part)


def _ceilings(info: RunInfo) -> str:
    used = {"floor_ms", "mbu", "mfu"} & set(info.metrics)
    return f" Measured ceilings: {wording.settings(info.ceilings)}." if info.ceilings and used else ""


def _workload(info: RunInfo) -> str:
    return f"Workload: {wording.settings(info.workload)}." if info.workload else ""


def _verdicts(result: Result) -> str:
    info = result.info
    lines = [(claim, f"**{verdict}**", figure, "the gate") for claim, verdict, figure in gate_lines(info)]
    for j in judgements(result):
        verdict = f"**{j.verdict.value}**" + (f": {j.reason}" if j.reason else "")
        lines.append((wording.claim(j.claim, info), verdict, wording.measured(j, info), j.claim.source))
    return _table(("claim", "verdict", "measured", "source"), lines) if lines else ""


def _invalid(result: Result) -> str:
    """Values by reason, so that a pass that does not count is one line and not one a metric."""
    dropped = [row for row in result.rows if not row.valid and not row.is_absent]  # the notes say who is absent
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
            repeats = ", ".join(str(r + 1) for r in sorted({row.repeat for row in own}))
            plural = "s" if "," in repeats else ""
            lines.append(f"  - {f'{info.variants[variant]} {point}'.strip()}, repeat{plural} {repeats}: {metrics}")
    return "\n".join([f"### INVALID: {len(dropped):,} values were kept but not counted", "", *lines])


def _steps(result: Result) -> str:
    if not result.steps:
        return ""
    info = result.info
    pictures = [
        _picture(f"Step by step {point}".strip(), info, steps_name(point)) for point in timeline.points(result)
    ]  # fmt: skip
    run = "" if info.run == "default" else f"/{info.run}"
    command = f"python run.py trace '{store.run_path(info).parent}{run}'"
    again = f"`{command}` writes the same steps, with every request, for Perfetto."
    return "\n\n".join(["### Step by step", timeline.describe(result), *pictures, *_preempted(result), again])


def _profile(result: Result) -> str:
    if not result.info.profiles:
        return ""
    parts = ["### Where a decode step's time goes", profile_plot.describe(result)]
    for point in profile_plot.points(result):
        parts.append(_picture(f"Decode step {point}".strip(), result.info, profile_name(point)))
        parts += [grid.markdown().replace("### ", "#### ", 1) for grid in profile_plot.tables(point, result)]
    return "\n\n".join(parts)


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
        "### What was generated",
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
    return "\n".join(
        [
            "### Where it comes from, and how to run it again",
            "",
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


def index_page(results: Sequence[Result], damaged: Iterable[Path]) -> str:
    """One line an experiment and hardware: its default run, or whatever runs it has."""
    lines, others = [], []
    for _, group in groupby(results, key=lambda r: (store.page_name(r.info), r.info.hardware)):
        first, *rest = group
        info = first.info
        name = _link(info) + ("" if info.run == "default" else f" {_overrides(info)}")
        lines.append((name, info.hardware, info.question, info.original, info.target, *_headline(first)))
        others += [(_link(r.info), r.info.hardware, _overrides(r.info), *_headline(r)) for r in rest]
    parts = [
        MARK,
        "# Reports",
        "Every number comes from a file in `results/`; `python run.py report` makes these pages from them again. "
        "*Measured* is the median for the first claim of an experiment, with its 95 % interval in brackets. A verdict "
        "holds for this hardware and workload: the reports say what was run and what it does not show.",
        *(f"> **CANNOT BE READ**: `results/{path.as_posix()}`" for path in damaged),
        _table(("experiment", "hardware", "question", "original", "to reach", "measured", "verdict"), lines),
    ]
    if others:
        parts += ["## Other runs", _table(("experiment", "hardware", "with", "measured", "verdict"), others)]
    return "\n\n".join(parts) + "\n"


def _headline(result: Result) -> tuple[str, str]:
    """The figure of the first claim, and all verdicts: the first claim's alone could hide the others."""
    first, info = headline(result), result.info
    warnings = "; ".join(f"**{flag}**" for flag in flags(result))
    if first is None:
        return answer(result), warnings or "no claim"
    claim = first.claim
    where = ", ".join(
        part for part in (info.variants[claim.variant] if len(info.variants) > 1 else "", claim.point) if part
    )
    measured = wording.measured(first, info) if first.estimate else "no figure that counts"
    figure = f"{measured}: {info.metrics[claim.metric].label}" + (f" ({where})" if where else "")
    verdict = f"**{first.verdict.value}**"
    if len(info.claims) > 1:
        counts = Counter(j.verdict for j in judgements(result))
        every = ", ".join(f"{counts[v]} {v.value}" for v in Verdict if counts[v])
        verdict += (
            f" (all {len(info.claims)} claims)" if len(counts) == 1 else f" (of {len(info.claims)} claims {every})"
        )
    return figure, f"{verdict}; {warnings}" if warnings else verdict


def _link(info: RunInfo) -> str:
    page = store.page_name(info)
    return f"[{page}]({page}.md)"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(wording.cell(text) for text in line)} |" for line in every)


def _picture(title: str, info: RunInfo, plot: str) -> str:
    return f"![{title}]({FIGURES}/{figure_name(info, plot)})"


def figure_name(info: RunInfo, plot: str) -> str:
    run = "" if info.run == "default" else f"-{info.run}"
    return f"{store.page_name(info)}-{info.hardware}{run}-{plot}.png"


def steps_name(point: str) -> str:
    """As a plot's name."""
    return f"steps-{store.slug(point)}" if point else "steps"


def profile_name(point: str) -> str:
    """Likewise."""
    return f"profile-{store.slug(point)}" if point else "profile"
