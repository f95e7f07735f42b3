"""Medians as bars that lie, so that names and numbers can be read: a group a point, with intervals and every repeat as
a dot. Where bars would say nothing, because a group has too many or one dwarfs the others, markers without bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.lab.config.spec import PanelSpec
from experiments.lab.judge import stats
from experiments.lab.judge.metrics import Better
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, lines
from experiments.lab.show.figures.frame import COLOURS, EDGE, HATCHES, INK, SPARE, line_style
from experiments.lab.store.result import Result

MANY = 4  # bars in a group that can still be told apart,
MANY_DOTS = 6  # and dots in the colours of their variants
ROWS = 15  # of a panel: where there are more, the best
DWARFED = 30  # a bar this many times another leaves nothing of it to be seen
ALIKE = 1.02  # times the least of many bars: then they show nothing
GREYS = ("#202020", "#9a9a9a", "#5c5c5c", "#c8c8c8")
WHISKERS = {"ecolor": INK, "capsize": 3, "elinewidth": 1.4}
BAR, DOT, GROUP = 0.22, 0.15, 0.5  # inches: of a bar and of a dot, and of a group at least
TOGETHER = 3.0  # inches: groups that would take more stand closer,
MOST, THIN = 4.5, 0.12  # and so do bars that would take more, down to so much


class Bar(NamedTuple):
    variant: int  # its place among all
    repeats: lines.Repeats  # that count
    tried: bool  # whether there are values, of which some may not count


@dataclass(frozen=True)
class Groups:
    names: list[str]  # of the groups
    label: str  # what they are, beside their axis
    series: list[str]
    cells: list[list[Bar]]  # of each group and series
    by_point: bool  # the series are points, and the groups variants; else the other way round
    dots: bool  # instead of bars
    log: bool  # the axis
    estimate: lines.Estimator  # of repeats
    higher: bool  # is better
    share: bool  # told in percent
    out_of: str = ""  # which these are of how many; empty: all

    @property
    def height(self) -> float:
        """In inches."""
        groups, series = max(1, len(self.names)), max(1, len(self.series))
        least = frame.pitch([_wrapped(name) for name in self.names], GROUP, TOGETHER)
        each = max(THIN, min(DOT if self.dots else BAR, MOST / (groups * series)))
        return len(self.names) * max(least, each * series)

    @property
    def alike(self) -> str:
        """What is to be said of many single bars that are all as long; else empty."""
        every = [self.estimate(bar.repeats).median for group in self.cells for bar in group if bar.repeats]
        if len(self.series) > 1 or len(every) <= MANY or not 0 < max(every) <= ALIKE * min(every):
            return ""
        return f"all from {wording.number(min(every))} to {wording.number(max(every))}"


def few(panels: Sequence[Groups | None]) -> list[Groups | None]:
    """Of panels with the same groups, where there is no room for all of these, the best by the first of them."""
    best: dict[tuple[str, ...], list[int]] = {}
    found: list[Groups | None] = []
    for groups in panels:
        if groups is not None and len(groups.names) > ROWS:
            sign, counted = -1 if groups.higher else 1, [[bar for bar in own if bar.repeats] for own in groups.cells]
            first = [sign * groups.estimate(own[0].repeats).median if own else inf for own in counted]
            which = "the same" if tuple(groups.names) in best else "the best"
            own = best.setdefault(tuple(groups.names), sorted(np.argsort(first, kind="stable")[:ROWS].tolist()))
            names, cells = [groups.names[n] for n in own], [groups.cells[n] for n in own]
            groups = replace(groups, names=names, cells=cells, out_of=f"{which} {ROWS} of {len(groups.names)}")
        found.append(groups)
    return found


def of(panel: PanelSpec, result: Result) -> Groups:
    """Groups are points; of one point, or of more variants than there are colours to tell apart, these are."""
    info, metric = result.info, panel.metric
    known = {(row.variant, row.point) for row in result.rows if row.metric == metric}
    values: dict[tuple[str, str], lines.Repeats] = {cell: result.values(*cell, metric) for cell in info.cells}
    at = [p for p in info.points if any(values[v, p] for v in info.variants)]
    by_point = len(at) == 1 or len(info.variants) > MANY_DOTS
    variants = [v for v in info.variants if by_point or any((v, p) in known for p in at)]
    every = [stats.absolute(own).median for v in variants for p in at if (own := values[v, p])]
    log = len(variants) > 1 and bool(every) and min(every) > 0 and max(every) > DWARFED * min(every)
    labels, (names, label) = [info.variants[v] for v in variants], lines.names_of(at, panel, result)
    cells = [[Bar(list(info.variants).index(v), values[v, p], (v, p) in known) for v in variants] for p in at]
    if by_point:
        names, label, labels = labels, "", [wording.point(p) for p in at]
        cells = [list(of_variant) for of_variant in zip(*cells, strict=True)]
    return Groups(
        names,
        label,
        series=labels,
        cells=cells,
        by_point=by_point,
        dots=log or (len(at) > 1 and len(variants) > MANY),
        log=log,
        estimate=lines.of_metric(info.metrics.get(metric)),
        higher=metric in info.metrics and info.metrics[metric].better is Better.higher,
        share=metric in info.metrics and info.metrics[metric].share,
    )


def draw(ax: Axes, groups: Groups, named: bool) -> bool:
    """False where there is nothing to draw."""
    count = len(groups.series)
    if not groups.names or not count:
        return False
    room = 0.8 / count
    every = [x for group in groups.cells for bar in group for x in bar.repeats.values()]
    most = SPARE * max(every, default=0.0)  # that is seen of a bar
    nothing = {group for group, own in enumerate(groups.cells) if not any(bar.repeats for bar in own)}
    for index, label in enumerate(groups.series):
        series = label if count > 1 else ""
        legend = series  # of its first bar
        for group, own in enumerate(groups.cells):
            (variant, repeats, tried), place = own[index], group + (index - (count - 1) / 2) * room
            if tried and not repeats and group not in nothing:
                frame.beside(ax, "INVALID", (0, place), 3, xycoords=EDGE)
            if not repeats:
                continue
            (middle,), errors, caps = lines.intervals([repeats], groups.estimate)
            if groups.dots:
                style = line_style(index if groups.by_point else variant, 0) | caps
                if groups.by_point and count > 1:  # colours are the variants'
                    style |= dict.fromkeys(("color", "markerfacecolor"), GREYS[index % len(GREYS)])
                mark, *_ = ax.errorbar(middle, place, xerr=errors, label=legend, **style | {"linestyle": "none"})
            else:
                style = bar_style(variant) | {"error_kw": WHISKERS | caps}
                (mark,) = ax.barh(place, middle, 0.9 * room, xerr=errors, label=legend, **style)
            legend = ""
            name = groups.names[group].replace("\n", " ")
            frame.says(mark, [lines.tip(name, series, repeats, groups.estimate)])
            ax.plot([*repeats.values()], [place] * len(repeats), ".", color=INK, markersize=3, alpha=0.6, zorder=4)
            end = min(float(np.nanmax([*repeats.values(), middle + errors[1][0]])), most)
            # As tables have it: two values instead of a median that says too little of them. Of three it is one.
            found = groups.estimate(repeats)
            told = wording.interval(replace(found, few=found.few if len(found.few) == 2 else ())).partition(" [")[0]
            text = wording.share(middle) if groups.share else told
            frame.beside(ax, text, (end, place), 4, fontsize=7 if groups.dots else 8)
    for group in sorted(nothing):  # said once
        tried = any(bar.tried for bar in groups.cells[group])
        frame.beside(ax, "INVALID" if tried else "not measured", (0, group), 3, xycoords=EDGE)
    frame.name_rows(ax, [_wrapped(name) for name in groups.names])
    ax.set_ylabel(groups.label if named else "")
    if not named:
        ax.set_yticks([])
    ax.margins(x=0.16)
    frame.scale(ax.xaxis, groups.log)
    if groups.share:
        frame.percent(ax.xaxis)
    return True


def _wrapped(name: str) -> str:
    return textwrap.fill(name, 26)


def bar_style(index: int) -> dict[str, Any]:
    colour, hatch = COLOURS[index % len(COLOURS)], HATCHES[index % len(HATCHES)]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
