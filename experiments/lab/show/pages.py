"""The page of an experiment as markdown: one screen that answers (the answer, whether to believe it, how much and how,
and what it is to be measured by), and everything else folded below it; the index, every mechanism by the settings
it was measured in; and the README's table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.lab.axes import IN_PROCESS, NO_SCALE
from experiments.lab.judge import marks, pairs
from experiments.lab.judge.claims import Verdict
from experiments.lab.show import answer, effects, predictions, wording
from experiments.lab.show.answer import flags, invalid, sentence
from experiments.lab.show.details import details, fold
from experiments.lab.show.effects import variant_kinds
from experiments.lab.show.figures import gallery
from experiments.lab.show.figures.gallery import Picture
from experiments.lab.show.grids import INVALID
from experiments.lab.store.result import COMPLETE, Result, RunInfo, page_name
from experiments.lab.store.runs import ASKED_DIFFERENTLY, Since, asked_differently

FIGURES = "figures"  # their folder beside the pages
MARK = "<!-- Made by `python run.py report` from results/: what is written here by hand is lost. -->"


def report_page(results: Sequence[Result], damaged: Sequence[Path], since: Since) -> str:
    first = results[0].info
    limits = dict.fromkeys(limit for r in results for limit in r.info.limits)
    code = dict.fromkeys(path for r in results for path in r.info.code)
    parts = [
        MARK,
        f"# {first.title}",
        *(f"> **NOT IN THIS REPORT**: `results/{path.as_posix()}` cannot be read." for path in damaged),
        *(f"> **{flag}**, on {heading(r.info)}" for r in results for flag in flags(r)),
        first.question,
    ]
    for result in results:

        def line(picture: Picture, info: RunInfo = result.info) -> str:
            return f"![{picture.title}]({FIGURES}/{figure_name(info, picture.name)})"

        if len(results) > 1 or result.info.run != "default":
            parts.append(f"## {heading(result.info)}")
        parts += [screen(result, since, line), *details(result, line)]
    parts.append(fold("What the numbers do not say", "\n".join(f"- {limit}" for limit in limits)))
    parts.append(fold("The code", "\n".join(f"- [{path}](../{path})" for path in code)))
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(info: RunInfo) -> str:
    return info.hardware if info.run == "default" else f"{info.hardware}, with {overrides(info)}"


def overrides(info: RunInfo) -> str:
    """A run's name in pieces that a line can be broken between, and that are no markdown."""
    return ", ".join(f"`{piece}`" for piece in info.run.split(",") if piece)


def figure_name(info: RunInfo, picture: str) -> str:
    run = "" if info.run == "default" else f"-{info.run}"
    return f"{page_name(info)}-{info.hardware}{run}-{picture}.png"


def screen(result: Result, since: Since, picture: Callable[[Picture], str]) -> str:
    """`picture` writes the line that shows one."""
    parts = [
        f"**{sentence(result)}**",
        _strip(result, since),
        *(picture(each) for each in gallery.of(result).first),
        *(grid.markdown() for grid in predictions.errors(result)),
        "\n".join(f"- {line}" for line in (*_not_counted(result), *_beside_others(result), *_of_the_limit(result))),
    ]
    return "\n\n".join(part for part in parts if part)


def moved(info: RunInfo, since: Since) -> str:
    """How far the code has gone on, and whether other claims are made by now."""
    count = since(info)
    text = "as measured" if info.provenance.clean is not False else "as measured, with uncommitted changes"
    if count is None:
        text = "no git history here"
    elif count:
        text = f"{count} commit{'s' if count != 1 else ''} since"
    return f"{text}, {ASKED_DIFFERENTLY}" if asked_differently(info) else text


def _strip(result: Result, since: Since) -> str:
    info, again = result.info, marks.again(result)
    seeds = [p.seed for p in info.processes] or [info.config.get("measure", {}).get("seed", 0)]
    gates, failed = len(info.every_gate), sum(not gate.passed for gate in info.every_gate)
    facts = {
        "measured": f"{info.provenance.started[:10]}, {info.hardware}",
        "processes x repeats": f"{len(info.processes) or 1} x {result.repeats}",
        "seeds": ", ".join(map(str, seeds)),
        "A/A": wording.interval(again, "x") if again else "not measured",
        "INVALID": f"**{invalid(result):,} of {len(result.rows):,}**" if invalid(result) else "none",
        "claims": wording.counted(result) or "none",
        "gates": f"**{failed} of {gates} FAILED**" if failed else f"{gates} passed" if gates else "none",
        "code": moved(info, since),
    }
    return wording.table(tuple(facts), [tuple(facts.values())])


def _not_counted(result: Result) -> list[str]:
    """Where most of the INVALID values are, and why."""
    places = Counter((row.variant, row.point) for row in result.rows if row.is_fault)
    if not places:
        return []
    ((variant, point), count), *others = places.most_common()
    reason = next(r.reason for r in result.rows if r.is_fault and (r.variant, r.point) == (variant, point))
    where = f"{result.info.variants[variant]}{f' at {wording.point(point)}' if point else ''}"
    more = f"; {places.total() - count} elsewhere" if others else ""
    below = " The remarks say more." if INVALID in result.remarks else ""
    return [f"**{INVALID}**: {count} values of {where} ({reason}){more}.{below}"]


def _beside_others(result: Result) -> list[str]:
    """The first claim's figure, and at the same point those of variants with namesakes among the peers', beside theirs;
    the original project's; and what is to be reached."""
    info, beside = result.info, []
    for effect in effects.of_claims(result)[:1]:
        (variant, point), metric = effect.cell, effect.metric
        compared: dict[str, list[str]] = {}
        for peer in effects.peers(info):
            own = effects.namesake(info, peer) or variant
            pair = effects.between(result, metric, (own, point), (peer, point))
            if peer != own and pair.gain and pair.own and pair.base:
                ours, theirs = (wording.middle(each, metric, info) for each in (pair.own, pair.base))
                name, gain = _named(info, peer), pair.gain
                compared.setdefault(f"{info.variants[own]} {ours}", []).append(
                    f"{wording.number(gain.median)}x as good as {name} ({theirs})"
                    if pair.told
                    else f"not told apart from {name} ({theirs}; {wording.interval(gain, 'x')} as good)"
                )
        if compared:
            at = f" at {wording.point(point)}" if point else ""
            said = "; ".join(", ".join([own, *theirs]) for own, theirs in compared.items())
            beside = [f"**Peers**, {wording.short(metric, info)}{at}: {said}."]
    return [
        *(beside or ["**Peers**: none ran beside it."]),
        *([f"**The original project**: {info.original}."] if info.original else []),
        *([f"**To reach**: {info.target}."] if info.target else []),
    ]


def _of_the_limit(result: Result) -> list[str]:
    """What the hardware allows, where the first claim's figure was measured."""
    info = result.info
    cells = [effect.cell for effect in effects.of_claims(result)] or [
        (v, p) for v in info.variants for p in info.points
    ]
    for cell in cells:
        found = [result.estimate(*cell, name) for name in ("floor_ms", "step_ms", "mbu", "mfu")]
        floor, step, *used = (each.median if each else 0.0 for each in found)
        where = ", ".join(part for part in (info.variants[cell[0]], wording.point(cell[1])) if part)
        if floor and step:
            text = f"of the {wording.number(step)} ms of a step the hardware needs at least {wording.number(floor)}"
            return [f"**Limit**: {text}: {wording.share(min(1.0, floor / step))} ({where})."]
        shares = {use: what for use, what in zip(used, ("memory bandwidth", "computing power"), strict=True) if use}
        if shares:
            most = max(shares)
            return [f"**Limit**: {wording.share(min(1.0, most))} of the {shares[most]} is used ({where})."]
    return []


def _named(info: RunInfo, variant: str) -> str:
    """With its version, where it says one: `vLLM 0.23.0, chunks of 512`, `vLLM 0.23.0 fp8`."""
    facts = info.peers.get(variant, ({},))[-1]
    version = next((str(facts[key]) for key in ("vllm", "transformers") if key in facts), "")
    name = info.variants[variant]
    return re.sub(r"^[\w.]+", rf"\g<0> {version}", name) if version else name


CPU, SMALL, LARGE, SERVED, GPUS = "CPU", "small", "7B", "served", "GPUs"
COLUMNS = (CPU, SMALL, LARGE, SERVED, GPUS)
BEGIN, END = "<!-- results: begin (made by `python run.py report`) -->", "<!-- results: end -->"
ABOUT = """\
What each mechanism was worth, by what it was measured on: *small* and *7B* are models on one GPU (kernels stand under
the model whose shapes they have), *served* is over HTTP. A figure is of the first claim of its page, beside the
baseline's, and comes from a file in `results/`; `python run.py report` makes these pages from them again. *Commits
since* have touched the code that the page names, or its question, since it was measured; of what was *asked differently
since* the claims are others by now. `python run.py stale` lists what is due."""


def index_page(results: Sequence[Result], damaged: Iterable[Path], since: Since) -> str:
    cells: dict[str, dict[str, list[str]]] = {}
    for result in results:
        if result.info.run == "default":
            row = cells.setdefault(result.info.experiment, {})
            row.setdefault(column(result.info), []).append(_cell(result, since))
    lines = [(name, *("<br><br>".join(row.get(c, [])) for c in COLUMNS)) for name, row in cells.items()]
    others = [(r.info.experiment, r.info.hardware, overrides(r.info), _cell(r, since)) for r in results
              if r.info.run != "default"]  # fmt: skip
    parts = [
        MARK,
        "# Reports",
        ABOUT,
        *(f"> **CANNOT BE READ**: `results/{path.as_posix()}`" for path in damaged),
        wording.table(("mechanism", *COLUMNS), lines),
        *(["## Other runs", wording.table(("experiment", "hardware", "with", "found"), others)] if others else []),
    ]
    return "\n\n".join(parts) + "\n"


def readme_with(text: str, results: Sequence[Result]) -> str:
    """A README whose table between the markers is made from the results; without them, as it was."""
    if BEGIN not in text or END not in text:
        return text
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{_readme_table(results)}\n{END}{rest.split(END, 1)[1]}"


def column(info: RunInfo) -> str:
    if info.hardware.startswith("cpu"):
        return CPU
    if re.search(r"x\d+$", info.hardware):
        return GPUS
    if _is_served(info):
        return SERVED
    return LARGE if info.scale in (NO_SCALE, "7b") else SMALL


def _is_served(info: RunInfo) -> bool:
    return info.via != IN_PROCESS or "served" in variant_kinds(info).values()


def _readme_table(results: Sequence[Result]) -> str:
    """What was measured on a GPU, each mechanism once: in the largest setting that it was measured in."""
    best: dict[str, Result] = {}
    order = (LARGE, GPUS, SERVED, SMALL)
    for result in results:
        place = column(result.info)
        if place in order and result.info.run == "default":
            known = best.get(result.info.experiment)
            if known is None or order.index(place) < order.index(column(known.info)):
                best[result.info.experiment] = result
    lines = [(f"[{r.info.title}](reports/{page_name(r.info)}.md)", _told(r)) for r in best.values()]
    return wording.table(("", f"measured on {', '.join(dict.fromkeys(r.info.hardware for r in best.values()))}"), lines)


def _told(result: Result) -> str:
    mark = "" if result.info.status == COMPLETE else "**incomplete**: "
    return mark + answer.sentence(result)


def _cell(result: Result, since: Since) -> str:
    """The effect, its verdicts and its age; what is beyond a claim, its aim, stands on the page."""
    info = result.info
    over = " over HTTP" if column(info) == CPU and _is_served(info) else ""
    parts = [f"[{_effect(result)}]({page_name(info)}.md){over}"]
    claims = [judged.verdict for judged in result.judgements]
    told = [f"{claims.count(Verdict.supported)} of {len(claims)} claims supported"] if claims else []
    told += [f"**{claims.count(Verdict.refuted)} refuted**"] if Verdict.refuted in claims else []
    told += [moved(info, since)] if since(info) or asked_differently(info) else []
    parts += [", ".join(told)] if told else []
    parts += [f"**{flag.partition(' (')[0]}**" for flag in answer.flags(result)]
    return "<br>".join(parts)


def _effect(result: Result) -> str:
    """The first claim's, in words; without any, the answer's first sentence."""
    found = effects.of_claims(result)
    if measured := [pair for name in pairs.metrics(result)[:1] for pair in pairs.of(result, name)]:
        told = sum(pair.interaction.told != 0 for pair in measured)
        return f"{told or 'none'} of {len(measured)} pairs told from the product of their gains"
    if most := answer.at_most(result):
        return f"{', '.join(most[:2])} at most"
    return answer.in_words(found[0], result.info) if found else answer.sentence(result).partition(". ")[0]
