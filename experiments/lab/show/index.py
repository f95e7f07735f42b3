"""The index: every mechanism by the settings it was measured in, and the README's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.lab.axes import IN_PROCESS, NO_SCALE
from experiments.lab.judge import pairs
from experiments.lab.judge.claims import Verdict
from experiments.lab.judge.metrics import Better
from experiments.lab.show import effects, wording
from experiments.lab.show.answer import figures, flags, sentence
from experiments.lab.show.effects import judgements, variant_kinds
from experiments.lab.show.pages import MARK, overrides
from experiments.lab.show.screen import moved
from experiments.lab.store.history import Since
from experiments.lab.store.result import Result, RunInfo, page_name

CPU, SMALL, LARGE, SERVED, GPUS = "CPU", "small", "7B", "served", "GPUs"
COLUMNS = (CPU, SMALL, LARGE, SERVED, GPUS)
BEGIN, END = "<!-- results: begin (made by `python run.py report`) -->", "<!-- results: end -->"
ABOUT = """\
What each mechanism was worth, by what it was measured on: *small* and *7B* are models on one GPU (kernels stand under
the model whose shapes they have), *served* is over HTTP. A figure is of the first claim of its page, beside the
baseline's, and comes from a file in `results/`; `python run.py report` makes these pages from them again. *n commits
since* says how often the code that a page names has changed after it was measured."""


def index_page(results: Sequence[Result], damaged: Iterable[Path], since: Since) -> str:
    others = [r for r in results if r.info.run != "default"]
    cells: dict[str, dict[str, list[str]]] = {}
    for result in results:
        if result.info.run == "default":
            row = cells.setdefault(result.info.experiment, {})
            row.setdefault(column(result.info), []).append(_cell(result, since))
    lines = [(name, *("<br><br>".join(row.get(c, [])) for c in COLUMNS)) for name, row in cells.items()]
    parts = [
        MARK,
        "# Reports",
        ABOUT,
        *(f"> **CANNOT BE READ**: `results/{path.as_posix()}`" for path in damaged),
        wording.table(("mechanism", *COLUMNS), lines),
    ]
    if others:
        found = [(_link(r.info), r.info.hardware, overrides(r.info), _cell(r, since)) for r in others]
        parts += ["## Other runs", wording.table(("experiment", "hardware", "with", "found"), found)]
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
    lines = [(f"[{r.info.title}](reports/{page_name(r.info)}.md)", sentence(r)) for r in best.values()]
    return wording.table(("", f"measured on {', '.join(dict.fromkeys(r.info.hardware for r in best.values()))}"), lines)


def _cell(result: Result, since: Since) -> str:
    """The effect, its verdicts, and whether the code has moved since."""
    info, behind = result.info, moved(result.info, since)
    over = " over HTTP" if column(info) == CPU and _is_served(info) else ""
    parts = [f"[{_effect(result)}]({page_name(info)}.md){over}"]
    found = [j.verdict for j in judgements(result)]
    if found:
        counted = f"{found.count(Verdict.supported)} of {len(found)} claims supported"
        refuted = found.count(Verdict.refuted)
        parts.append(counted + (f", **{refuted} refuted**" if refuted else ""))
    parts += [f"**{flag.partition(' (')[0]}**" for flag in flags(result)]
    parts += [f"*{behind}*"] if behind and behind != "not known" else []
    return "<br>".join(parts)


def _effect(result: Result) -> str:
    """In a few words."""
    names = pairs.metrics(result)
    if names and pairs.of(result, names[0]):
        return f"{len(pairs.of(result, names[0]))} pairs"
    found = effects.of_claims(result)
    if not found or found[0].own is None:
        return "no figure that counts" if found else "no claim"
    first, info = found[0], result.info
    short = wording.short(first.metric, info)
    if first.gain is None or first.reference is None:
        return f"{short} {figures(first, info)}"
    if first.told == 0:
        return f"{short}: no difference shown"
    if first.better is Better.higher:
        return f"{wording.number(first.gain.median)}x {short}"
    return f"{short} {figures(first, info)}"


def _link(info: RunInfo) -> str:
    return f"[{page_name(info)}]({page_name(info)}.md)"
