"""The index: every mechanism by the settings it was measured in, and the README's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.lab.axes import IN_PROCESS, NO_SCALE
from experiments.lab.judge import pairs
from experiments.lab.judge.claims import Verdict
from experiments.lab.show import answer, effects, wording
from experiments.lab.show.effects import variant_kinds
from experiments.lab.show.pages import MARK, moved, overrides
from experiments.lab.store.history import Since
from experiments.lab.store.result import Result, RunInfo, page_name

CPU, SMALL, LARGE, SERVED, GPUS = "CPU", "small", "7B", "served", "GPUs"
COLUMNS = (CPU, SMALL, LARGE, SERVED, GPUS)
BEGIN, END = "<!-- results: begin (made by `python run.py report`) -->", "<!-- results: end -->"
ABOUT = """\
What each mechanism was worth, by what it was measured on: *small* and *7B* are models on one GPU (kernels stand under
the model whose shapes they have), *served* is over HTTP. A figure is of the first claim of its page, beside the
baseline's, and comes from a file in `results/`; `python run.py report` makes these pages from them again. *Commits
since* have touched the code that the page names since it was measured; `python run.py stale` lists what is due."""


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
    lines = [(f"[{r.info.title}](reports/{page_name(r.info)}.md)", answer.sentence(r)) for r in best.values()]
    return wording.table(("", f"measured on {', '.join(dict.fromkeys(r.info.hardware for r in best.values()))}"), lines)


def _cell(result: Result, since: Since) -> str:
    """The effect, its verdicts and its age; what is beyond a claim, its aim, stands on the page."""
    info = result.info
    over = " over HTTP" if column(info) == CPU and _is_served(info) else ""
    parts = [f"[{_effect(result)}]({page_name(info)}.md){over}"]
    claims = [judged.verdict for judged in result.judgements]
    told = [f"{claims.count(Verdict.supported)} of {len(claims)} claims supported"] if claims else []
    told += [f"**{claims.count(Verdict.refuted)} refuted**"] if Verdict.refuted in claims else []
    told += [moved(info, since)] if since(info) else []
    parts += [", ".join(told)] if told else []
    parts += [f"**{flag.partition(' (')[0]}**" for flag in answer.flags(result)]
    return "<br>".join(parts)


def _effect(result: Result) -> str:
    """The first claim's, in words; without any, the answer's first sentence."""
    found = effects.of_claims(result)
    if measured := [pair for name in pairs.metrics(result)[:1] for pair in pairs.of(result, name)]:
        told = sum(pair.told is not pairs.Told.within for pair in measured)
        return f"{told or 'none'} of {len(measured)} pairs told from the product of their gains"
    if most := answer.at_most(result):
        return f"{', '.join(most[:2])} at most"
    return answer.in_words(found[0], result.info) if found else answer.sentence(result).partition(". ")[0]
