"""The page of an experiment as markdown, one screen that answers with everything else folded below it; the index, every
mechanism by the settings it was measured in; and the README's table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from experiments.lab.config.axes import IN_PROCESS, NO_SCALE
from experiments.lab.judge import marks, pairs, stats
from experiments.lab.judge.claims import Verdict
from experiments.lab.judge.metrics import Better
from experiments.lab.show import answer, effects, grids, limit, wording
from experiments.lab.show.answer import badges, flags, sentence
from experiments.lab.show.details import details, fold
from experiments.lab.show.figures import gallery, worth
from experiments.lab.show.grids import INVALID
from experiments.lab.store.result import COMPLETE, Result, RunInfo, page_name
from experiments.lab.store.runs import ASKED_DIFFERENTLY, Since, asked_differently

WORSE = 0.1  # the loss whose power is told
FAR = 10.0  # times worse: what is beyond is none that anybody asks for
_marked = partial(re.sub, r"^.+?(?= \(|$)", r"**\g<0>**")  # a flag, of which what follows in brackets says more
MARK = "<!-- Made by `python run.py report` from results/: what is written here by hand is lost. -->"


def report_page(results: Sequence[Result], damaged: Sequence[Path], since: Since) -> str:
    first = results[0].info
    limits = dict.fromkeys(text for r in results for text in r.info.limits)
    code = dict.fromkeys(path for r in results for path in r.info.code)
    machines = ", ".join(dict.fromkeys(r.info.hardware for r in results))
    parts = [
        MARK,
        f"# On {machines}: {first.title}",
        *(f"> **NOT IN THIS REPORT**: `results/{path.as_posix()}` cannot be read." for path in damaged),
        *(f"> On {heading(r.info)}: {'; '.join(map(_marked, told))}" for r in results if (told := flags(r))),
        first.question,
    ]
    for result in results:
        if len(results) > 1 or result.info.run != "default":
            parts.append(f"## {heading(result.info)}")
        parts += [screen(result, since), *details(result)]
    parts.append(fold("What the numbers do not say", "\n".join(f"- {text}" for text in limits)))
    parts.append(fold("The code", "\n".join(f"- [{path}](../{path})" for path in code)))
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(info: RunInfo) -> str:
    return f"{info.hardware}, with {overrides(info)}" if overrides(info) else info.hardware


def overrides(info: RunInfo) -> str:
    """A run's name in pieces that a line can be broken between, and that are no markdown; without what the page says in
    other places: on what device, and how often. Empty of a run that differs in nothing else."""
    said = ("device=", "processes=", "repeats=")
    pieces = [] if info.run == "default" else info.run.split(",")
    return ", ".join(f"`{piece}`" for piece in pieces if piece and not piece.startswith(said))


def screen(result: Result, since: Since) -> str:
    parts = [
        f"**{sentence(result)}**",
        _strip(result, since),
        *(picture.markdown for picture in gallery.of(result).first),
        *(grid.markdown() for grid in grids.errors_of_predictions(result)),
        "\n".join(f"- {line}" for of in (_not_counted, _power, _beside_others, limit.lines) for line in of(result)),
    ]
    return "\n\n".join(part for part in parts if part)


def moved(info: RunInfo, since: Since) -> list[str]:
    """How far the code has gone on, and whether other claims are made by now; empty where all is as it was."""
    count = since(info)
    parts = [f"{count} commit{'s' if count != 1 else ''} since"] if count else []
    parts += ["measured with uncommitted changes"] if info.provenance.clean is False else []
    return parts + ([ASKED_DIFFERENTLY] if asked_differently(info) else [])


def _strip(result: Result, since: Since) -> str:
    info, again, faults = result.info, marks.again(result), len(result.faults)
    code = {None: ["no git history here"], 0: ["as measured"]}.get(since(info), [])
    seeds = [p.seed for p in info.processes] or [info.config.get("measure", {}).get("seed", 0)]
    gates, failed = len(info.every_gate), sum(not gate.passed for gate in info.every_gate)
    lacks = "" if info.status == COMPLETE else ", not all whole"
    facts = {
        "measured": f"{info.measured}, {wording.machine(info)}",
        "processes x repeats": f"{len(info.processes) or 1} x {result.repeats}{lacks}",
        "seeds": ", ".join(map(str, seeds)),
        "A/A": wording.interval(again, "x") if again else "not measured",
        "INVALID": f"**{faults:,} of {len(result.rows):,}**" if faults else "none",
        "claims": _verdicts(result) or "none",
        "gates": f"**{failed} of {gates} FAILED**" if failed else f"{gates} passed" if gates else "none",
        "code": ", ".join([*code, *moved(info, since)]),
    }
    return wording.table(tuple(facts), [tuple(facts.values())])


def _not_counted(result: Result) -> list[str]:
    """Where most of the INVALID values are, and why."""
    places = Counter((row.variant, row.point) for row in result.faults)
    if not places:
        return []
    cell, count = places.most_common(1)[0]
    reason = next(row.reason for row in result.faults if (row.variant, row.point) == cell)
    where = f"{result.info.variants[cell[0]]}{wording.at(cell[1])}"
    more = f"; {places.total() - count} elsewhere" if len(places) > 1 else ""
    below = " The remarks say more." if INVALID in result.remarks else ""
    return [f"**{INVALID}**: {count} values of {where} ({reason}){more}.{below}"]


def _power(result: Result) -> list[str]:
    """How many such runs would show a loss in the paired ratios that are drawn: in the weakest, and in the others."""
    info, found = result.info, list[tuple[stats.Power, effects.Effect]]()
    for effect in effects.shown(result, worth.ROWS):
        ratio, true = effect.ratio, 1 + WORSE if effect.better is Better.lower else 1 - WORSE
        if ratio is None or effect.reference is None or effect.at_another_point:
            continue
        # Repeats of one process that are all alike say nothing of another one.
        alike = ratio.processes == 1 and ratio.low == ratio.high and (ratio.n > 1 or info.is_simulated)
        power = result.power(effect.cell, effect.reference, effect.metric, true)
        found += [(power, effect)] if power and not alike else []
    if not found:
        return []
    found.sort(key=lambda each: each[0].share)
    least, *more = (f"{100 * power.share // 1:.0f} %" if power.share >= 0.01 else "less than 1 %" for power, _ in found)
    power, effect = found[0]
    (variant, point), one = effect.cell, " of one process" if effect.ratio and effect.ratio.processes == 1 else ""
    told = f"a loss of {100 * WORSE:.0f} % would be detected in {least} of such runs{one}"
    if power.share < stats.OFTEN and 1 / FAR < power.often < FAR:
        told += f", one of {math.ceil(100 * abs(power.often - 1))} % in {100 * stats.OFTEN:.0f} %"
    told += f" ({wording.titled(f'{answer.called(variant, info)}, {wording.short(effect.metric, info)}', point)})"
    if more:
        which = f"the other {len(more)} ratios" if len(more) > 1 else "the other ratio"
        told += f"; of {which} in {' to '.join(dict.fromkeys((more[0], more[-1])))}"
    return [f"**Power**: {told}."]


def _beside_others(result: Result) -> list[str]:
    """The first claim's figure, and at the same point those of variants with namesakes among the peers', beside theirs;
    the original project's; and what is to be reached."""
    info, peers = result.info, effects.peers(result.info)
    ran = [_named(info, p) for p in peers if any(row.variant == p and row.valid for row in result.rows)]
    told = f": {', '.join(ran)} ran beside it, and the first claim is not about them" if ran else ": none ran beside it"
    for effect in effects.of_claims(result)[:1]:
        (variant, point), metric = effect.cell, effect.metric
        compared: dict[str, list[tuple[float, str]]] = {}
        for peer in peers:
            name = peer.partition("_")[2]  # our variant that it is like: of `vllm_w8a8` it is `w8a8`
            own = name if name in info.variants and name not in peers else variant
            pair = effects.between(result, metric, (own, point), (peer, point))
            if peer != own and pair.gain and pair.own and pair.base:
                ours, theirs = (wording.middle(each, metric, info) for each in (pair.own, pair.base))
                gain, who = wording.interval(pair.gain, "x"), _named(info, peer)
                text = f"{gain} as good as {who} ({theirs}{'; no interval' if pair.gain.low is None else ''})"
                if pair.gain.low is not None and not pair.told:
                    text = f"not told apart{wording.by_few(pair.gain)} from {who} ({theirs}; {gain} as good)"
                compared.setdefault(f"{answer.called(own, info)} {ours}", []).append((pair.gain.median, text))
        if compared:  # the best peer first
            every = ([own, *(text for _, text in sorted(theirs))] for own, theirs in compared.items())
            said = "; ".join(map(", ".join, every))
            told = f", {wording.short(metric, info)}{wording.at(point)}: {said}"
    others = {"The original project": info.original, "To reach": info.target}
    return [f"**Peers**{told}.", *(f"**{name}**: {text}." for name, text in others.items() if text)]


def _named(info: RunInfo, variant: str) -> str:
    """With its version, where it says one: `vLLM 0.23.0, chunks of 512`, `vLLM 0.23.0 fp8`."""
    facts = info.peers.get(variant, ({},))[-1]
    package, name = next((key for key in ("vllm", "transformers") if key in facts), ""), info.variants[variant]
    told = re.search(rf"\b{package}[\w.]*", name, re.IGNORECASE) or re.match(r"[\w.]+", name)
    return f"{name[: told.end()]} {facts[package]}{name[told.end() :]}" if package and told else name


CPU, ALONE, SMALL, LARGE, SERVED, GPUS = "CPU", "kernels", "small", "7B", "served", "GPUs"
COLUMNS = (CPU, ALONE, SMALL, LARGE, SERVED, GPUS)
BEGIN, END = "<!-- results: begin (made by `python run.py report`) -->", "<!-- results: end -->"
ABOUT = """\
What each mechanism was worth, by what it was measured on: *kernels* are calls on one GPU without a model, *small* and
*7B* models on one, *served* is over HTTP; *with* names a run of settings of its own. A figure is of the first claim of
its page, beside the baseline's, and comes from a file in `results/`; `python run.py report` makes these pages from them
again. *Commits since* have touched the code that the page names, or its question, since it was measured; where *its
claims have changed since*, the experiment makes others today. `python run.py stale` lists what is due.\
"""


def index_page(results: Sequence[Result], damaged: Iterable[Path], since: Since, tests: str = "") -> str:
    """`tests`: in a line, what came of those that are no experiment."""
    cells: dict[str, dict[str, list[str]]] = {}
    others = []
    inside = in_matrix(results)
    for info, cell in ((result.info, _cell(result, since)) for result in results):
        if info in inside:
            named = f"With {overrides(info)}: " if overrides(info) else ""
            cells.setdefault(info.experiment, {name: [] for name in COLUMNS})[column(info)].append(named + cell)
        else:
            others.append((info.experiment, info.hardware, overrides(info), cell))
    lines = [(name, *map("<br><br>".join, row.values())) for name, row in cells.items()]
    parts = [
        MARK,
        "# Reports",
        ABOUT,
        tests,
        _processors(results),
        *(f"> **CANNOT BE READ**: `results/{path.as_posix()}`" for path in damaged),
        wording.table(("mechanism", *COLUMNS), lines),
        *(["## Other runs", wording.table(("experiment", "hardware", "with", "found"), others)] if others else []),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _processors(results: Sequence[Result]) -> str:
    """That CPU figures of different pages may be of different machines; empty where they are of one."""
    names = sorted({r.info.machine for r in results if r.info.hardware == wording.CPU})
    told = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else ""
    return (
        told and f"CPUs are {told}: each page says which one it is about, and speeds of one are not those of another."
    )


def in_matrix(results: Sequence[Result]) -> list[RunInfo]:
    """Default runs, and in cells that none of them fills those with a name that were measured."""
    every = [result.info for result in results]
    filled = {(info.experiment, column(info)) for info in every if info.run == "default"}
    return [info for info in every if info.run == "default"
            or not (info.is_simulated or (info.experiment, column(info)) in filled)]  # fmt: skip


def readme_with(text: str, results: Sequence[Result], since: Since) -> str:
    """A README whose table between the markers is made from the results; without them, as it was."""
    between = f"(?s)(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})"
    return re.sub(between, lambda _: f"\n{_readme_table(results, since)}\n", text, count=1)


def column(info: RunInfo) -> str:
    if info.hardware.startswith("cpu"):
        return CPU
    if re.search(r"x\d+$", info.hardware):
        return GPUS
    if _is_served(info):
        return SERVED
    return {NO_SCALE: ALONE, "7b": LARGE}.get(info.scale, SMALL)


def _is_served(info: RunInfo) -> bool:
    return info.via != IN_PROCESS or "served" in effects.variant_kinds(info).values()


def _readme_table(results: Sequence[Result], since: Since) -> str:
    """What was measured on a GPU, each mechanism once: in the first of these columns that it was measured in, and there
    with the largest model."""
    order = (LARGE, ALONE, GPUS, SERVED, SMALL)
    inside = in_matrix(results)
    own = [r for r in results if r.info in inside and column(r.info) in order]
    # A scale's name begins with the billions of its model's parameters, where it says them: 0_6b, 7b.
    size = lambda info: [float(n.replace("_", ".")) for n in re.findall(r"^(\d+(?:_\d+)?)b", info.scale)]  # noqa: E731
    rank = lambda r: (-order.index(column(r.info)), size(r.info))  # noqa: E731
    lines = []
    for _, runs in groupby(own, key=lambda r: r.info.experiment):
        result = sorted(runs, key=rank)[-1]
        info, mark = result.info, ", ".join(badges(result))
        named = f", with {overrides(info)}" if overrides(info) else ""
        told = f"{sentence(result)} {mark}".rstrip()
        age = ", ".join([info.measured, info.hardware, *moved(info, since)])
        lines.append((f"[{info.title}](reports/{page_name(info)}.md){named}", told, _verdicts(result), age))
    return wording.table(("", "found", "claims", "measured"), lines)


def _verdicts(result: Result) -> str:
    """`2 supported, **1 refuted**`"""
    counts = Counter(judged.verdict for judged in result.judgements)
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    return re.sub(r"\d+ refuted", r"**\g<0>**", told)


def _cell(result: Result, since: Since) -> str:
    """The effect, its verdicts and its age; what is beyond a claim, its aim, stands on the page."""
    info = result.info
    over = " over HTTP" if column(info) == CPU and _is_served(info) else ""
    told = [f"claims: {verdicts}"] if (verdicts := _verdicts(result)) else []
    lines = [f"[{_effect(result)}]({page_name(info)}.md){over}", ", ".join([*told, *moved(info, since)])]
    return "<br>".join(filter(None, [*lines, *badges(result)]))


def _effect(result: Result) -> str:
    """The first claim's, in words; without any, the answer's first sentence."""
    if measured := [pair for name in pairs.metrics(result)[:1] for pair in pairs.of(result, name)]:
        told = sum(pair.interaction.told != 0 for pair in measured)
        differ = f"{told or 'none'} of {len(measured)} pairs differ{'s' * (told == 1)} from the product of their gains"
        return differ + " (of pairs whose gains multiply 1 in 20 would)" * (told > 0)
    if most := answer.at_most(result):
        return f"{', '.join(most[:2])} at most"
    found = effects.of_claims(result)
    if found and effects.is_prediction(found[0], result.info) and (misses := grids.misses_in_words(result)):
        return misses.partition(";")[0].rstrip(".")
    return "; ".join(answer.told_once(found[:1], result.info)) if found else sentence(result).partition(". ")[0]
