"""Medians as bars that lie, so that names and numbers can be read: a group a point, with intervals and every repeat as
a dot. Where bars would say nothing, because a group has too many or one dwarfs the others, markers without bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.lab.judge import stats
from experiments.lab.judge.metrics import Better
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, lines
from experiments.lab.show.figures.frame import COLOURS, HATCHES, INK, SPARE, line_style
from experiments.lab.show.figures.lines import Estimator, Intervals, intervals, of_metric, tip
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Turn

MANY = 4  # bars in a group that can still be told apart,
MANY_DOTS = 6  # and dots in the colours of their variants
ROWS = 12  # of a panel: where there are more, the best
DWARFED = 30  # a bar this many times another leaves nothing of it to be seen
ALIKE = 1.02  # times the least of many bars: then they show nothing
GREYS = ("#202020", "#9a9a9a", "#5c5c5c", "#c8c8c8")
BAR, DOT, GROUP = 0.22, 0.15, 0.5  # inches: of a bar and of a dot, and of a group at least


@dataclass(frozen=True)
class Groups:
    """What stands below each other."""

    names: list[str]  # of the groups
    label: str  # what they are, beside their axis
    series: dict[str, list[dict[Turn, float]]]  # label -> the repeats in each group (none: nothing valid)
    colours: list[int]  # of the series, or of the groups, whichever are variants: their places among all of the result
    tried: list[list[bool]]  # of each series and group, whether there are values that do not count
    by_point: bool  # the series are points, and the groups variants; else the other way round
    dots: bool  # instead of bars
    log: bool  # the axis
    estimate: Estimator  # of repeats
    higher: bool  # is better
    out_of: int = 0  # so many groups; 0: these are all

    @property
    def height(self) -> float:
        """In inches."""
        return len(self.names) * max(GROUP, (DOT if self.dots else BAR) * len(self.series))

    @property
    def medians(self) -> list[list[float]]:
        """Of each group, of what was measured in it."""
        return [[self.estimate(own[group]).median for own in self.series.values() if own[group]]
                for group in range(len(self.names))]  # fmt: skip

    @property
    def alike(self) -> str:
        """What is to be said of many single bars that are all as long; else empty."""
        every = [median for group in self.medians for median in group]
        if len(self.series) > 1 or len(every) <= MANY or not 0 < max(every) <= ALIKE * min(every):
            return ""
        return f"all from {wording.number(min(every))} to {wording.number(max(every))}"

    @property
    def best(self) -> list[int]:
        """The groups that there is room for, in their order."""
        sign = -1 if self.higher else 1
        order = sorted(range(len(self.names)), key=lambda group: sign * (self.medians[group] or [sign * inf])[0])
        return sorted(order[:ROWS])

    def only(self, kept: Sequence[int]) -> Groups:
        def pick(given: Sequence[Any]) -> list[Any]:
            return [given[group] for group in kept]

        series = {label: pick(measured) for label, measured in self.series.items()}
        colours = pick(self.colours) if self.by_point else self.colours
        return replace(self, names=pick(self.names), series=series, tried=[*map(pick, self.tried)], colours=colours,
                       out_of=len(self.names))  # fmt: skip


def few(panels: Sequence[Groups | None]) -> list[Groups | None]:
    """Of panels with the same groups, where these are too many, the best by the first of them."""
    kept: dict[tuple[str, ...], list[int]] = {}
    for groups in panels:
        if groups is not None and len(groups.names) > ROWS:
            kept.setdefault(tuple(groups.names), groups.best)
    return [groups and groups.only(kept[names]) if (names := tuple(groups.names if groups else ())) in kept else groups
            for groups in panels]  # fmt: skip


def of(panel: PanelSpec, result: Result) -> Groups:
    """Groups are points; of one point, or of more variants than there are colours to tell apart, these are."""
    info, metric, values = result.info, panel.metric, result.table.values
    at = [p for p in info.points if any(values(v, p, metric) for v in info.variants)]
    known = {(row.variant, row.point) for row in result.rows if row.metric == metric}
    by_point = len(at) == 1 or len(info.variants) > MANY_DOTS
    variants = [v for v in info.variants if by_point or any((v, p) in known for p in at)]
    every = [stats.absolute(found).median for v in variants for p in at if (found := values(v, p, metric))]
    log = len(variants) > 1 and bool(every) and min(every) > 0 and max(every) > DWARFED * min(every)
    estimate = of_metric(info.metrics.get(metric))
    if by_point:
        names, label = [info.variants[v] for v in variants], ""
        series = {wording.point(p): [values(v, p, metric) for v in variants] for p in at}
        tried = [[(v, p) in known for v in variants] for p in at]
    else:
        names, label = lines.names_of(at, panel, result)
        series = {info.variants[v]: [values(v, p, metric) for p in at] for v in variants}
        tried = [[(v, p) in known for p in at] for v in variants]
    colours = [list(info.variants).index(v) for v in variants]
    higher = metric in info.metrics and info.metrics[metric].better is Better.higher
    dots = log or (len(at) > 1 and len(variants) > MANY)
    return Groups(names, label, series, colours, tried, by_point, dots, log, estimate, higher)


def draw(ax: Axes, groups: Groups, named: bool) -> bool:
    """False where there is nothing to draw."""
    count = len(groups.series)
    if not groups.names or not count:
        return False
    room = (0.65 if groups.dots else 0.8) / count
    most = SPARE * max((x for each in groups.series.values() for found in each for x in found.values()), default=0.0)
    for index, (label, measured) in enumerate(groups.series.items()):
        aside = (index - (count - 1) / 2) * room
        kept = [(group, repeats) for group, repeats in enumerate(measured) if repeats]
        drawn = intervals([repeats for _, repeats in kept], groups.estimate)
        legend = label if count > 1 else None
        told = [tip(groups.names[group].replace("\n", " "), label if count > 1 else "", repeats, groups.estimate)
                for group, repeats in kept]  # fmt: skip
        if groups.dots and kept:
            style = line_style(index if groups.by_point else groups.colours[index], 0) | {"linestyle": "none"}
            if groups.by_point and count > 1:  # colours are the variants'
                style |= dict.fromkeys(("color", "markerfacecolor"), GREYS[index % len(GREYS)])
            places = [group + aside for group, _ in kept]
            points, *_ = ax.errorbar(drawn.medians, places, xerr=drawn.errors, label=legend, **style)
            frame.says(points, told)
        for one, (group, repeats) in enumerate(kept):
            if not groups.dots:
                style = _bar_style(groups.colours[group if groups.by_point else index])
                errors = [[side[one]] for side in drawn.errors]
                (bar,) = ax.barh(group + aside, drawn.medians[one], 0.9 * room, xerr=errors,
                                 label=None if one else legend, **style)  # fmt: skip
                frame.says(bar, [told[one]])
            ax.plot([*repeats.values()], [group + aside] * len(repeats), ".", color=INK, markersize=3, alpha=0.6,
                    zorder=4)  # fmt: skip
            if not groups.dots or count == 1:
                _number(ax, drawn, one, [*repeats.values()], group + aside, most)
    for group in range(len(groups.names)):
        _missing(ax, groups, group, room)
    frame.name_rows(ax, [textwrap.fill(name, 26) for name in groups.names] if named else [""] * len(groups.names))
    if named:
        ax.set_ylabel(groups.label, fontsize=9)
    else:
        ax.set_yticks([])
    ax.margins(x=0.16)
    if groups.log:
        frame.log(ax.xaxis, ax, True)
    else:
        frame.from_zero(ax.xaxis, ax, True, 5)
    return True


def _number(ax: Axes, drawn: Intervals, one: int, repeats: Sequence[float], place: float, most: float) -> None:
    """The median behind what is seen of a bar, up to `most`."""
    end = min(float(np.nanmax([*repeats, drawn.medians[one] + drawn.errors[1][one]])), most)
    ax.annotate(wording.number(drawn.medians[one]), (end, place), (4, 0), textcoords="offset points", fontsize=8,
                va="center")  # fmt: skip


def _missing(ax: Axes, groups: Groups, group: int, room: float) -> None:
    """Why there is no bar: of a group with none at all once."""
    lacking = [(index, tried[group]) for index, (tried, measured) in
               enumerate(zip(groups.tried, groups.series.values(), strict=True)) if not measured[group]]  # fmt: skip
    if len(lacking) == len(groups.series):
        told = [(0.0, "INVALID" if any(tried for _, tried in lacking) else "not measured")]
    else:
        told = [((index - (len(groups.series) - 1) / 2) * room, "INVALID") for index, tried in lacking if tried]
    for aside, why in told:
        ax.annotate(why, (0, group + aside), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                    va="center", fontsize=8)  # fmt: skip


def _bar_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0,
        "error_kw": {"ecolor": INK, "capsize": 3, "elinewidth": 1.4},
    }
