"""All the pictures of a result, by the name of their files, and which of them stand where on its page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure

from experiments.lab.show import effects, wording
from experiments.lab.show.answer import at_most
from experiments.lab.show.figures import experts, forest, frame, load, panels, profile, stacks, timeline, waits
from experiments.lab.store import result as store
from experiments.lab.store.result import Result


@dataclass(frozen=True)
class Picture:
    name: str  # of the file, without what says which result it is of
    title: str
    make: Callable[[], Figure]

    def draw(self) -> Figure:
        with frame.default_style():
            figure = self.make()
            figure.suptitle(textwrap.fill(self.title, 100), fontsize=12)
            return figure


@dataclass(frozen=True)
class Gallery:
    """`first` are the two that stand above the fold: how much, and how it comes about."""

    first: tuple[Picture, ...]
    others: tuple[Picture, ...]

    @property
    def every(self) -> tuple[Picture, ...]:
        return (*self.first, *self.others)


def of(result: Result) -> Gallery:
    """The baseline's second arm stands in the tables alone."""
    info = result.info
    result = replace(result, info=replace(info, variants={v: n for v, n in info.variants.items() if v != info.aa}))
    plots = [Picture(plot.name, plot.title, partial(panels.draw, plot, result)) for plot in result.info.plots]
    courses = list(_courses(result))
    profiles = [Picture("profile", profile.TITLE, partial(profile.draw, result))] if info.profiles else []
    compared = {profile.variant for profile in info.profiles}
    first = [*courses, *(profiles if len(compared) > 1 else []), *plots][:1]
    if effects.shown(result, 1) and not at_most(result):
        first.insert(0, Picture("effects", "How much better", partial(forest.draw, result)))
    kept = {picture.name for picture in first}
    others = (*plots, *courses, *profiles, *_under_load(result))
    return Gallery(tuple(first), tuple(picture for picture in others if picture.name not in kept))


def _courses(result: Result) -> Iterator[Picture]:
    for point in timeline.points(result):
        for index, variants in enumerate(timeline.pairs(result, point)):
            labels = " and ".join(result.info.variants[v] for v in variants)
            title = wording.titled(f"Step by step: {labels}", point)
            name = _named("steps", point) + (f"-{index + 1}" if index else "")
            yield Picture(name, title, partial(timeline.draw, result, point, variants))


def _under_load(result: Result) -> Iterator[Picture]:
    """Latency, goodput, waiting and memory, of what was measured."""
    curve, rates = load.pareto_of(result), load.goodput_of(result)
    if curve is not None:
        yield Picture("pareto", "Throughput against latency", partial(load.pareto, *curve))
    if rates is not None:
        yield Picture("goodput", "What of an offered rate comes out in time", partial(load.goodput, rates))
    if waited := waits.of(result):
        yield Picture("waits", waits.title(waited, result), partial(waits.draw, waited, result))
    if stacks.memory_of(result):
        yield Picture("memory-map", "Where the memory goes", partial(stacks.memory, result))
    if result.experts:
        yield Picture("experts", experts.TITLE, partial(experts.draw, result))


def _named(kind: str, point: str) -> str:
    return f"{kind}-{store.slug(point)}" if point else kind
