"""The page of an experiment as markdown: one screen that answers, and everything else folded below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.lab.show.answer import flags
from experiments.lab.show.details import details, fold
from experiments.lab.show.figures.gallery import Picture
from experiments.lab.show.screen import screen
from experiments.lab.store.history import Since
from experiments.lab.store.result import Result, RunInfo, page_name

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
        *(part for result in results for part in _result(result, since, len(results) > 1)),
        fold("What the numbers do not say", "\n".join(f"- {limit}" for limit in limits)),
        fold("The code", "\n".join(f"- [{path}](../{path})" for path in code)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(info: RunInfo) -> str:
    return info.hardware if info.run == "default" else f"{info.hardware}, with {overrides(info)}"


def overrides(info: RunInfo) -> str:
    """A run's name in pieces that a line can be broken between, and that are no markdown."""
    return ", ".join(f"`{piece}`" for piece in info.run.split(",") if piece)


def figure_name(info: RunInfo, picture: str) -> str:
    run = "" if info.run == "default" else f"-{info.run}"
    return f"{page_name(info)}-{info.hardware}{run}-{picture}.png"


def _result(result: Result, since: Since, several: bool) -> list[str]:
    def line(picture: Picture) -> str:
        return f"![{picture.title}]({FIGURES}/{figure_name(result.info, picture.name)})"

    named = [f"## {heading(result.info)}"] if several or result.info.run != "default" else []
    return [*named, screen(result, since, line), *details(result, line)]
