"""All the pictures of a result, by the name of their files, and which of them stand where on its page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge import pairs
from experiments.lab.show import effects, wording
from experiments.lab.show.answer import at_most
from experiments.lab.show.figures import bars, blocks, frame, labels, lines, load, stacks, timeline, worth
from experiments.lab.store.result import Result, RunInfo, page_name, slug

FIGURES = "figures"  # their folder beside the pages


@dataclass(frozen=True)
class Picture:
    info: RunInfo
    name: str  # of the file, without what says which result it is of
    title: str
    make: Callable[[], Figure]

    @property
    def file(self) -> str:
        run = "" if self.info.run == "default" else f"-{self.info.run}"
        return f"{page_name(self.info)}-{self.info.hardware}{run}-{self.name}.png"

    @property
    def markdown(self) -> str:
        return f"![{self.title}]({FIGURES}/{self.file})"

    def draw(self) -> Figure:
        with frame.default_style():
            figure = self.make()
            figure.suptitle(textwrap.fill(self.title, 100), fontsize=12)
            labels.settle(figure)
            return figure


class Gallery(NamedTuple):
    first: list[Picture]  # the two that stand above the fold: how much, and how it comes about
    others: list[Picture]


def of(result: Result) -> Gallery:
    """The baseline's second arm stands in the tables alone. Where the question is about pairs, what each mechanism
    brings alone is no answer."""
    info = result.info
    result = replace(result, info=replace(info, variants={v: n for v, n in info.variants.items() if v != info.aa}))
    picture = partial(Picture, info)
    courses = list(_courses(result))
    profiles = [picture("profile", stacks.TITLE, partial(stacks.steps, result))] if info.profiles else []
    compared = len({profile.variant for profile in info.profiles}) > 1 and len(info.profiles) <= stacks.FIT
    own = [plot for plot in info.plots if _is_shown(plot, result)]
    if own and not courses and not compared:
        own[:1] = [part for part in above_the_fold(own[0], result) if _is_shown(part, result)]
    plots = [picture(plot.name, plot.title, partial(panels, plot, result)) for plot in own]
    first = [*courses, *(profiles if compared else []), *plots][:1]
    maps = []
    if result.blocks:
        title = wording.titled(blocks.TITLE, result.blocks[0].point)
        maps.append(picture("blocks", title, partial(blocks.draw, result)))
    others = [each for each in (*plots, *courses, *maps, *profiles, *_under_load(result)) if each not in first]
    if effects.shown(result, 1) and not at_most(result) and not pairs.sentence(result):
        first.insert(0, picture("effects", "How much better", partial(worth.forest, result)))
    return Gallery(first, others)


def _courses(result: Result) -> Iterator[Picture]:
    for point in result.info.points:
        for index, variants in enumerate(timeline.pairs(result, point)):
            labels = " and ".join(result.info.variants[v] for v in variants)
            title = wording.titled(f"Step by step: {labels}", point)
            name = f"steps-{slug(point)}".rstrip("-") + (f"-{index + 1}" if index else "")
            yield Picture(result.info, name, title, partial(timeline.draw, result, point, variants))


def _under_load(result: Result) -> Iterator[Picture]:
    curve, rates, picture = load.pareto_of(result), load.goodput_of(result), partial(Picture, result.info)
    if curve is not None:
        yield picture("pareto", "Throughput against latency", partial(load.pareto, *curve))
    if rates is not None:
        yield picture("goodput", "What of an offered rate comes out in time", partial(load.goodput, *rates))
    if waited := load.waits_of(result):
        what, many = " and ".join(each.what.split()[-1] for each in waited), len(result.info.variants)
        title = wording.titled(f"How long {what} waited", waited[0].point)
        title += f" ({load.MANY} of {many} variants)" if many > load.MANY else ""
        yield picture("waits", title, partial(load.waits, waited, result))
    if stacks.memory_of(result):
        yield picture("memory-map", "Where the memory goes", partial(stacks.memory, result))
    if result.experts:
        yield picture("experts", worth.EXPERTS, partial(worth.experts, result))


NO_VALUE = "no valid value"
PANELS_A_ROW = 3
PANEL_HEIGHT = 3.5
TITLE = 36  # characters above one of so many
WHOLE = {  # which are the only panel of a figure: what there is to draw, and how
    PanelKind.stack: (stacks.parts_of, stacks.parts),
    PanelKind.gantt: (timeline.first_of, timeline.gantt),
}
ALONE = {PanelKind.matrix: worth.matrix, PanelKind.formula: lines.formula, PanelKind.front: lines.front}


Drawn = tuple[PanelSpec, Result, bars.Groups | None]  # a panel, what it shows, and of bars their groups


def above_the_fold(plot: PlotSpec, result: Result) -> list[PlotSpec]:
    """The plot; in two where its rows of panels would reach below the fold: one row, of panels with the same groups as
    the first one where there are some, and all else."""
    every = [] if plot.panels[0].kind in WHOLE else _every(plot, result)
    if len(every) < 2 or _size([groups for *_, groups in every])[-1] <= frame.FOLD:
        return [plot]
    names = [groups and groups.names for *_, groups in every]
    order = sorted(range(len(every)), key=lambda index: names[index] != names[0])
    ordered = tuple(every[index][0] for index in order)
    row, more = ordered[:PANELS_A_ROW], ordered[PANELS_A_ROW:]
    others = [replace(plot, name=f"{plot.name}-more", title=f"{plot.title} (more)", panels=more)] if more else []
    return [replace(plot, panels=row), *others]


def _every(plot: PlotSpec, result: Result) -> list[Drawn]:
    """Its panels; a run at fewer points has no place for some."""
    every = [(panel, _shown(panel, result)) for panel in plot.panels]
    every = [each for each in every if each[1].info.points]
    groups = bars.few([bars.of(*each) if each[0].kind is PanelKind.bars else None for each in every])
    return [(*each, own) for each, own in zip(every, groups, strict=True)]


def _size(groups: Sequence[bars.Groups | None]) -> tuple[int, int, float]:
    """Columns and rows of so many panels, and the height of their figure in inches."""
    columns = 2 if len(groups) == 4 else min(len(groups), PANELS_A_ROW)
    rows = -(-len(groups) // columns)
    height = max([1.6 if all(groups) else PANEL_HEIGHT, *(1.1 + each.height for each in groups if each)])
    return columns, rows, rows * height + 0.6


def panels(plot: PlotSpec, result: Result) -> Figure:
    if plot.panels[0].kind in WHOLE:
        return WHOLE[plot.panels[0].kind][1](plot.panels[0], _shown(plot.panels[0], result))
    every = _every(plot, result)
    groups = [own for *_, own in every]
    columns, rows, height = _size(groups)
    figure = frame.new(frame.WIDTH if columns > 1 else 0.7 * frame.WIDTH, height)
    figure.set_layout_engine("constrained", wspace=0.06)  # a label at the side of a panel is not its neighbour's
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for index, (ax, (panel, own, here)) in enumerate(zip(axes, every, strict=False)):
        before = groups[index - 1] if index % columns else None
        named = here is None or before is None or before.names != here.names
        if why := _panel(ax, panel, own, here, named):
            ax.annotate(why, (0.5, 0.5), xycoords="axes fraction", ha="center", color=frame.INK, fontsize=9)
            ax.set(xticks=[], yticks=[])
        if columns == PANELS_A_ROW:
            ax.set_title(textwrap.fill(ax.get_title(), TITLE))
    for ax in axes[len(every) :]:
        ax.set_visible(False)
    frame.legend(figure, axes)
    return figure


def _panel(ax: Axes, panel: PanelSpec, result: Result, groups: bars.Groups | None, named: bool) -> str:
    """Why there is nothing to draw; else empty. `groups`: of bars; `named`: whether they are."""
    for name in _drawn(panel, result):
        if name not in result.info.metrics:
            return f"{name}: not measured in this run"  # which may have chosen other metrics
    metric = result.info.metrics[panel.metric]
    told = {key.rpartition(".")[2]: lines.plain_setting(value) for key, value in panel.where.items()}
    words = [value if key == "case" else wording.point(f"{key}={value}") for key, value in told.items()]
    if groups is not None and groups.out_of:
        words.append(groups.out_of)
    ax.set_title(", ".join([*words, f"{metric.better.value} is better"]))
    if panel.kind in ALONE:
        return "" if ALONE[panel.kind](ax, panel, result) else NO_VALUE
    if groups is not None:
        ax.set_xlabel(frame.axis_label(metric, 32))
        return (not named and groups.alike) or ("" if bars.draw(ax, groups, named) else NO_VALUE)
    is_curve = panel.kind is PanelKind.curve
    places = {} if is_curve else lines.draw(ax, panel, result)
    if not places and not (is_curve and lines.curve(ax, panel, result)):
        return NO_VALUE
    positive = all(row.value > 0 for row in result.rows if row.valid and row.metric == panel.metric)
    frame.scale(ax.yaxis, panel.log_y and positive, metric.share)
    if metric.share:
        frame.percent(ax.yaxis)
    ax.set_ylabel(frame.axis_label(metric, 36))
    lines.bounds(ax, panel, result, places)
    return ""


def _drawn(panel: PanelSpec, result: Result) -> list[str]:
    """Metrics: one, over a setting, or two."""
    over_metric = panel.kind is PanelKind.curve or panel.x in result.info.metrics
    return [panel.metric, *([str(panel.x)] if over_metric else [])]


def _is_shown(plot: PlotSpec, result: Result) -> bool:
    return any(_has_values(panel, result) for panel in plot.panels)


def _has_values(panel: PanelSpec, result: Result) -> bool:
    """Whether there is anything valid to draw, and of a front more than one cost."""
    shown = _shown(panel, result)
    if panel.kind in WHOLE:
        return bool(WHOLE[panel.kind][0](panel, shown))
    drawn = _drawn(panel, result)
    places = [p for p, settings in shown.info.points.items() if panel.x in (None, *drawn, *settings)]
    every = ([result.values(*cell, name) for name in drawn] for cell in product(shown.info.variants, places))
    if panel.kind is not PanelKind.front:
        return any(map(all, every))
    return len({cost for *values, costs in every if all(values) for cost in costs.values()}) > 1


def _shown(panel: PanelSpec, result: Result) -> Result:
    """The result with the panel's own points alone, whose names leave out what they have in common."""
    kept = {
        name: {key: value for key, value in settings.items() if key not in panel.where}
        for name, settings in result.info.points.items()
        if panel.where.items() <= settings.items()
    }
    return replace(result, info=replace(result.info, points=kept)) if panel.where else result
