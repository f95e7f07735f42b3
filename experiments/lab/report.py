"""Reports: `reports/<experiment>.md` with its figures, and the index. Made from result files alone, so that rebuilding
them changes no byte."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from experiments.lab import plots, stats, store, wording
from experiments.lab.claims import Judgement, judge, ratio
from experiments.lab.gate import Gate
from experiments.lab.metrics import Better
from experiments.lab.rows import Table
from experiments.lab.store import Result, RunInfo, StoreError

FIGURES = "figures"
COMPARISON = """\
Variants take turns in ABBA order, and every measurement starts from a fresh engine that is warmed up on other prompts.
A ratio is taken repeat by repeat. Before a variant's speed counts, its greedy tokens are compared with the
baseline's (*same tokens*)."""
STATISTICS = """\
Tables give the median over n repeats and, in brackets, its bootstrap 95 % interval. (The interval of n values cannot
leave their range, which holds the true median with probability 1 - 2^(1-n).) A claim is *supported* or *refuted* only
where the whole interval lies on one side of its bound, else *inconclusive*."""


def rebuild(results: Path, reports: Path, only: str | None = None) -> list[Path]:
    """Writes the report of every experiment with results (or of `only` one), and the index, which comes last.

    Raises StoreError on a damaged result file; reports written before it stay."""
    found = store.read_all(results)
    if not found:
        raise StoreError(f"{results} holds no results yet: run an experiment first")
    written = []
    for experiment, group in groupby(found, key=lambda r: r.info.experiment):
        if only in (None, experiment):
            written.append(_write(reports, experiment, list(group)))
    index = reports / "README.md"
    store.write_atomic(index, _index(found))
    return [*written, index]


def summary(result: Result) -> str:
    """Verdicts for the terminal."""
    lines = [f"  {_gate_verdict(g):>12}  {_gate_claim(g, result.info)}: {_gate_figure(g)}" for g in result.info.gates]
    for j in _judgements(result):
        figure = wording.measured(j, result.info) + (f" ({j.reason})" if j.reason else "")
        lines.append(f"  {j.verdict.value:>12}  {wording.claim(j.claim, result.info)}; measured {figure}")
    return "\n".join(lines)


def _write(reports: Path, experiment: str, results: Sequence[Result]) -> Path:
    (reports / FIGURES).mkdir(parents=True, exist_ok=True)
    for result in results:
        for plot in result.info.plots:
            store.write_atomic(reports / FIGURES / _figure_name(result.info, plot.name), plots.draw(plot, result))
    path = reports / f"{experiment}.md"
    store.write_atomic(path, _report(results))
    return path


def _report(results: Sequence[Result]) -> str:
    first = results[0].info
    parts = [
        f"# {first.title}",
        f"**Question.** {first.question}",
        *(_run(result) for result in results),
        "## How the numbers are made",
        first.method,
        COMPARISON if first.baseline is not None else "",
        STATISTICS,
        "## Limits" if first.limits else "",
        "\n".join(f"- {limit}" for limit in first.limits),
        "## The code",
        "\n".join(f"- [{path}](../{path})" for path in first.code),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _run(result: Result) -> str:
    info = result.info
    heading = info.hardware if info.run == "default" else f"{info.hardware}, with {info.run}"
    figures = [
        f"![{plot.title}]({FIGURES}/{_figure_name(info, plot.name)})" for plot in info.plots
    ]  # fmt: skip
    parts = [
        f"## Results: {heading}",
        f"On {wording.device(info)}.",
        _verdicts(result),
        *figures,
        *(_metric_table(result, metric) for metric in info.metrics),
        _invalid(result),
        _samples(info),
        _provenance(info),
    ]
    return "\n\n".join(part for part in parts if part)


def _verdicts(result: Result) -> str:
    info = result.info
    lines = [
        f"| {_gate_claim(g, info)} | **{_gate_verdict(g)}** | {_gate_figure(g)} | the gate |" for g in info.gates
    ]  # fmt: skip
    for j in _judgements(result):
        verdict = f"**{j.verdict.value}**" + (f": {j.reason}" if j.reason else "")
        figure = wording.measured(j, info)
        lines.append(f"| {wording.claim(j.claim, info)} | {verdict} | {figure} | {j.claim.source} |")
    return "\n".join(["| claim | verdict | measured | source |", "|---|---|---|---|", *lines]) if lines else ""


def _metric_table(result: Result, name: str) -> str:
    info, table = result.info, Table(result.rows)
    metric = info.metrics[name]
    gates = {(g.variant, g.point): g for g in info.gates}
    several, has_points = info.baseline is not None, any(info.points)
    many = len(info.variants) > 1
    header = [
        *(["point"] if has_points else []),
        *(["variant"] if many else []),
        f"{metric.unit or 'value'}, median [95 %]",
        "n",
    ]
    if several:
        header += [f"ratio to {info.variants[str(info.baseline)]}", "same tokens"]
    lines = []
    for point in info.points:
        for variant, label in info.variants.items():
            values = table.values(variant, point, name)
            if not values:
                continue
            cells = [*([point] if has_points else []), *([label] if many else [])]
            cells += [wording.interval(stats.estimate(list(values.values()))), str(len(values))]
            if several:
                found = None
                if variant != info.baseline:
                    found = ratio(values, table.values(str(info.baseline), point, name))
                cells.append(wording.interval(found, "x") if found else "1")
                cells.append(_gate_figure(gates[variant, point]) if (variant, point) in gates else "baseline")
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return ""
    better = "higher" if metric.better is Better.higher else "lower"
    rule = "|" + "---|" * len(header)
    title = f"### {metric.label[0].upper()}{metric.label[1:]} ({better} is better)"
    return "\n".join([title, "", f"| {' | '.join(header)} |", rule, *lines])


def _invalid(result: Result) -> str:
    dropped = [row for row in result.rows if not row.valid]
    if not dropped:
        return ""
    lines = sorted({f"- {result.info.variants[r.variant]} {r.point}, {r.metric}: {r.reason}" for r in dropped})
    return "\n".join([f"### INVALID: {len(dropped)} values were kept but not counted", "", *lines])


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


def _provenance(info: RunInfo) -> str:
    origin = info.provenance
    commit = "no commit yet" if origin.commit is None else f"commit {origin.commit[:12]}"
    if origin.clean is False:
        commit += ", with uncommitted changes"
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    data = f"../results/{info.experiment}/{info.hardware}/{info.run}"
    return "\n".join(
        [
            f"Measured {origin.started} in {wording.number(origin.seconds)} s; {commit}; {versions}.",
            f"Data: [csv]({data}.csv), [json]({data}.json). Run it again:",
            "",
            f"```\n{origin.command}\n```",
        ]
    )


def _index(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        info = result.info
        name = f"[{info.experiment}]({info.experiment}.md)" + ("" if info.run == "default" else f" {info.run}")
        start = f"| {name} | {info.hardware} |"
        lines += [
            f"{start} {_gate_claim(g, info)} | the gate | {_gate_figure(g)} | {_gate_verdict(g)} |" for g in info.gates
        ]
        lines += [
            f"{start} {wording.claim(j.claim, info)} | {j.claim.source} | {wording.measured(j, info)} "
            f"| {j.verdict.value} |"
            for j in _judgements(result)
        ]
        if not info.gates and not info.claims:
            lines.append(f"{start} {info.question} | | | |")
    return "\n".join(
        [
            "# Reports",
            "",
            "Every number comes from a file in `results/`; `python run.py report` makes these pages from them again.",
            "Brackets are 95 % intervals.",
            "",
            "| experiment | hardware | claim | source | measured | verdict |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def _judgements(result: Result) -> list[Judgement]:
    return [judge(claim, result.rows, result.info.gates) for claim in result.info.claims]


def _gate_claim(gate: Gate, info: RunInfo) -> str:
    at = f" at {gate.point}" if gate.point else ""
    return f"{info.variants[gate.variant]} generates the same greedy tokens as {info.variants[str(info.baseline)]}{at}"


def _gate_verdict(gate: Gate) -> str:
    return "supported" if gate.passed else "refuted"


def _gate_figure(gate: Gate) -> str:
    figure = f"{gate.equal_tokens:,} of {gate.total_tokens:,} tokens"
    if gate.first_difference is not None:
        where = gate.first_difference
        figure += (
            f" (first difference: request {where.request}, token {where.position}: {where.expected} became {where.got})"
        )
    return figure


def _figure_name(info: RunInfo, plot: str) -> str:
    run = "" if info.run == "default" else f"-{info.run}"
    return f"{info.experiment}-{info.hardware}{run}-{plot}.png"
