"""All the pictures of a result, by the name of their files, and which of them stand where on its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure

from experiments.lab.show import effects, wording
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
            return self.make()


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
    courses, profiles = list(_courses(result)), list(_profiles(result))
    compared = {profile.variant for profile in result.info.profiles}
    first = [*courses, *(profiles if len(compared) > 1 else []), *plots][:1]
    if effects.shown(result, 1):
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


def _profiles(result: Result) -> Iterator[Picture]:
    for point in profile.points(result):
        title = wording.titled(profile.TITLE, point)
        yield Picture(_named("profile", point), title, partial(profile.draw, result, point))


def _under_load(result: Result) -> Iterator[Picture]:
    """Latency, goodput, waiting and memory, of what was measured. Distributions are over the requests of all passes,
    and over the tokens of one, at the first claim's point if that is stored."""
    curve, rates = load.pareto_of(result), load.goodput_of(result)
    if curve is not None:
        yield Picture("pareto", "Throughput against latency", partial(load.pareto, *curve))
    if rates is not None:
        yield Picture("goodput", "What of an offered rate comes out in time", partial(load.goodput, rates))
    stored = {step.point for step in result.steps} | {request.point for request in result.requests}
    wanted = [effect.cell[1] for effect in effects.of_claims(result)]
    for point in [point for point in (*wanted, *result.info.points) if point in stored][:1]:
        own = replace(
            result,
            requests=tuple(r for r in result.requests if r.point == point),
            steps=tuple(s for s in result.steps if s.point == point),
        )
        waited = waits.of(own)
        if waited:
            yield Picture("waits", waits.title(waited, point), partial(waits.draw, waited, own, point))
    if stacks.memory_of(result):
        yield Picture("memory-map", "Where the memory goes", partial(stacks.memory, result))
    if result.experts:
        yield Picture("experts", experts.TITLE, partial(experts.draw, result))


def _named(kind: str, point: str) -> str:
    return f"{kind}-{store.slug(point)}" if point else kind
