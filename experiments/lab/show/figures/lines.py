"""Lines over a setting, curves of one metric over another, a formula beside what was measured, fronts of cost against
latency; and what panels of points share: names on the x axis, medians with their 95 % intervals, bounds of claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from experiments.lab.config.spec import NOT_MEASURED, SHAPE, PanelSpec
from experiments.lab.judge import stats
from experiments.lab.judge.knees import PASS
from experiments.lab.judge.metrics import Metric
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, labels
from experiments.lab.show.figures.frame import BOUND, COLOURS, INK, MARKERS, line_style, plain
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Turn

FAR = 3  # a bound this many times above everything measured would only press the data flat
Repeats = Mapping[Turn, float]
Estimator = Callable[[Repeats], stats.Estimate]
WILD = 1000.0  # times its median: no axis shows as much of an interval
ENOUGH = 3  # values that were drawn apart: of two an interval is wide by chance, so that their range is drawn, thin


class Intervals(NamedTuple):
    """Of one series: medians, and distances to their ends below and above; NaN, which is not drawn, for none."""

    medians: list[float]
    errors: tuple[list[float], list[float]]
    caps: dict[str, Any]  # what their style has of them


def intervals(values: Iterable[Repeats], of: Estimator = stats.absolute) -> Intervals:
    """Of each place's repeats. What is a ratio already is estimated by `stats.factors`."""
    found = [(of(repeats), repeats.values()) for repeats in values]
    thin = any(e.low is not None and (e.processes if e.processes > 1 else e.n) < ENOUGH for e, _ in found)
    ends = [(e.median, *((min(own), max(own)) if thin else (e.low, e.high))) for e, own in found]
    below = [math.nan if low is None else max(0.0, middle - low) for middle, low, _ in ends]
    above = [math.nan if high is None else max(0.0, min(high - middle, WILD * abs(middle))) for middle, _, high in ends]
    return Intervals([e.median for e, _ in found], (below, above), {"capsize": 0, "elinewidth": 0.8} if thin else {})


def of_metric(metric: Metric | None) -> Estimator:
    """Its repeats' estimate, which of a share stays between 0 and 1."""
    return partial(stats.absolute, share=metric is not None and metric.share)


def tip(name: str, where: str, repeats: Repeats, of: Estimator) -> str:
    return f"{', '.join(filter(None, (name, where)))}: {wording.interval(of(repeats))}, {len(repeats)} repeats"


def draw(ax: Axes, panel: PanelSpec, result: Result) -> dict[str, float]:
    """One line a variant; where points differ in more than x, one line a variant and combination of the others. Where
    each point stands on the x axis; empty where nothing is drawn."""
    info, key, values = result.info, str(panel.x), partial(result.values, metric=panel.metric)
    at_x = {p: at[key] for p, at in info.points.items() if key in at and any(values(v, p) for v in info.variants)}
    numeric = all(map(wording.is_number, at_x.values()))
    place_of = {x: float(x if numeric else index) for index, x in enumerate(dict.fromkeys(at_x.values()))}
    alone = len(place_of) == len(at_x)  # whatever else changes does so with x
    rests = {p: "" if alone else wording.point(wording.others(info.points[p], key)) for p in at_x}
    estimate = of_metric(info.metrics[panel.metric])
    for row, (variant, label) in enumerate(info.variants.items()):
        for kind, rest in enumerate(dict.fromkeys(rests.values())):
            found = [(place_of[x], own) for p, x in at_x.items() if rests[p] == rest and (own := values(variant, p))]
            if not found:
                continue
            x, repeats = zip(*sorted(found, key=itemgetter(0)), strict=True)
            y = intervals(repeats, estimate)
            text = ", ".join(filter(None, (label if len(info.variants) > 1 else "", rest)))
            line, *_ = ax.errorbar(x, y.medians, yerr=y.errors, label=text or label, **line_style(row, kind) | y.caps)
            frame.says(line, [tip(text, plain(place), own, estimate) for place, own in zip(x, repeats, strict=True)])
    if numeric:
        frame.spread(ax, list(place_of.values()), panel.log_x and min(place_of.values(), default=1) > 0)
    else:
        frame.ticks(ax.xaxis, list(place_of.values()), list(map(str, place_of)))
    ax.set_xlabel(panel.x_label or wording.setting(key))
    return {p: place_of[x] for p, x in at_x.items()}


def curve(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """One curve a variant through its points: one metric over another, such as latency over the rate reached. Passes
    of a search are no such points: what comes out there is what was offered."""
    result = _without_searches(result, panel.metric)
    info, metrics = result.info, (str(panel.x), panel.metric)
    of_x, of_y = (of_metric(info.metrics[name]) for name in metrics)
    named = False
    for row, (variant, label) in enumerate(info.variants.items()):
        measured = [(p, *(result.values(variant, p, name) for name in metrics)) for p in info.points]
        measured = [each for each in measured if all(each[1:])]
        if not measured:
            continue
        names, all_x, all_y = zip(*measured, strict=True)
        x, y = intervals(all_x, of_x), intervals(all_y, of_y)
        style = line_style(row, 0) | y.caps
        line, *_ = ax.errorbar(x.medians, y.medians, xerr=x.errors, yerr=y.errors, label=label, **style)
        frame.says(line, [tip(label, wording.point(point), ys, of_y) for point, ys in zip(names, all_y, strict=True)])
        # Several points that all say something of one setting: a curve goes along it.
        if len(names) > 1 and set.intersection(*(set(info.points[point]) for point in names)):
            key, short = _by_setting(result, names)
            for name, *at in zip(short or names, x.medians, y.medians, strict=True):
                labels.add(ax, name, (at[0], at[1]), style["color"])
            if short and not named:
                ax.set_title(f"{ax.get_title()} (small numbers: {wording.setting(key)})")
            named = True
    if ax.lines:
        frame.scale(ax.xaxis, panel.log_x)
    ax.set_xlabel(panel.x_label or frame.axis_label(info.metrics[metrics[0]], 44))
    return bool(ax.lines)


def _without_searches(result: Result, metric: str) -> Result:
    """Where a search has made points: the others that have the metric, with the settings that tell them apart."""
    info = result.info
    others = {name: at for name, at in info.points.items() if not name.startswith(PASS)}
    if len(others) == len(info.points):
        return result
    kept = {name: at for name, at in others.items() if any(result.values(v, name, metric) for v in info.variants)}
    own = {name: {k: v for k, v in at.items() if any(v != other.get(k) for other in kept.values())}
           for name, at in kept.items()}  # fmt: skip
    return replace(result, info=replace(info, points=own))


def bounds(ax: Axes, panel: PanelSpec, result: Result, places: Mapping[str, float]) -> None:
    """The bounds of absolute claims about the panel's metric, without their aims: marks at their points, in the colours
    of their variants where they are of several. A single one is a line where there is one point, or no axis of them."""
    found, known = [], places or result.info.points
    for claim in result.info.claims:
        here = claim.metric == panel.metric and not claim.bound.is_ratio and claim.point in known
        for value in filter(math.isfinite, claim.limits if here else ()):
            top = ax.get_ylim()[1]
            if value <= FAR * top:
                ax.set_ylim(top=max(top, 1.12 * value) if value > top else top)
                found.append((claim, value))
    if found and len(places) > 1:
        variants = list(result.info.variants)
        alone = len({claim.variant for claim, _ in found}) == 1
        label = "bound of a claim" if alone else "bound of a claim, coloured by its variant"
        ax.plot([], [], color=BOUND if alone else INK, linewidth=1.6, label=label)
        for claim, value in found:
            x, colour = places[claim.point], BOUND if alone else line_style(variants.index(claim.variant), 0)["color"]
            ax.plot([x], [value], "_", color=colour, markersize=17, markeredgewidth=1.8, zorder=5)
    elif len(found) == 1:  # of several, a curve does not tell which is whose
        ((claim, value),) = found
        least = "at least" if value == claim.limits[0] else "at most"
        text = f"claim: {least} {wording.value(value, claim.metric, result.info, unit=False)}{wording.at(claim.point)}"
        ax.axhline(value, color=BOUND, linewidth=1, linestyle="--", label=text)


def names_of(points: Sequence[str], panel: PanelSpec, result: Result) -> tuple[list[str], str]:
    """Values alone, and what they are of, where points differ in one setting; else all but what the title has."""
    key, short = _by_setting(result, points)
    if short:
        numbers = all(wording.is_number(value) for point in points for value in result.info.points[point].values())
        return short, panel.x_label or (wording.setting(key) if numbers else "")
    told = {f"{name.rpartition('.')[2]}={value}" for name, value in panel.where.items()} | {panel.where.get("case")}
    shown = (" ".join(word for word in point.split(" ") if word not in told) for point in points)
    return [wording.point(name) for name in shown], panel.x_label


def plain_setting(value: Any) -> str:
    return f"{value:,}" if wording.is_number(value) else str(value)


def _by_setting(result: Result, points: Sequence[str]) -> tuple[str, list[str]]:
    """What all points differ in, where it is one thing, and its values, which are names enough; else nothing."""
    settings = [result.info.points[point] for point in points]
    keys = {tuple(at) for at in settings}
    if len(keys) != 1 or len(settings[0]) != 1:
        return "", []
    return next(iter(settings[0])).rpartition(".")[2], [plain_setting(*at.values()) for at in settings]


FORMULA = "formula_tokens_per_s"


def formula(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """Speed-up over the baseline, measured, as points with intervals, and by Leviathan's formula, as lines. Everywhere
    that is its tokens per second, for the rows and the acceptance that the pass's steps had and the costs measured
    before it, over those measured of the baseline: over a setting a series a variant, over a metric (acceptance) a
    series a point. False where there is nothing to show."""
    info, key, places = result.info, str(panel.x), list[float]()
    metric, setting = info.metrics.get(key), sorted((at[key], name) for name, at in info.points.items() if key in at)
    base = partial(result.values, str(info.baseline), metric=panel.metric)
    if metric:
        series = [(wording.point(p) or "measured", [(v, p) for v in info.variants]) for p in info.points]
    else:
        series = [(label, [(v, p) for _, p in setting]) for v, label in info.variants.items()]
    for row, (label, cells) in enumerate(series):  # a variant's colour is the same in all panels
        measured, told = list[tuple[float, Repeats]](), list[tuple[float, Repeats]]()
        for v, p in (cell for cell in cells if cell[0] != info.baseline):
            at = [*result.values(v, p, key).values()] if metric else [info.points[p][key]]
            for found, name in ((measured, panel.metric), (told, FORMULA)):
                if at and (ratios := stats.paired(result.values(v, p, name), base(p))):
                    found.append((median(at), ratios))
        if not measured:
            continue
        x, speedups = zip(*measured, strict=True)
        y = intervals(speedups, stats.factors)
        style = line_style(row, 0) | y.caps | {"linestyle": "none"}
        dots, *_ = ax.errorbar(x, y.medians, yerr=y.errors, label=label, **style)
        frame.says(dots, [tip(label, plain(place), repeats, stats.factors) for place, repeats in measured])
        line = sorted((place, median(ratios.values())) for place, ratios in told)
        ax.plot([place for place, _ in line], [ratio for _, ratio in line], color=style["color"], linewidth=1.1)
        places += x
    ax.plot([], [], color=INK, linewidth=1.1, label="by the formula")
    ax.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    if panel.mark is not None:
        ax.axvline(panel.mark, color=BOUND, linewidth=1, linestyle="--", label=panel.mark_label or plain(panel.mark))
    if panel.log_x:
        frame.spread(ax, places, min(places, default=0) > 0)
    frame.scale(ax.yaxis)
    ax.set_xlabel(panel.x_label or (metric.label if metric else wording.setting(key)))
    ax.set_ylabel(f"speed-up over {info.variants[str(info.baseline)]}")
    return bool(places)


UNNAMED = (1, 0, "none", None)  # values of SHAPE that need not be named


def front(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """Cost against latency: every layout that a planner simulated, and as a line those that no other beats in both. A
    colour a shape of layout; hollow, and not on the line, where nobody has measured what steps take."""
    info, key = result.info, str(panel.x)
    (variant,) = info.variants
    every = {p: [result.values(variant, p, metric) for metric in (key, panel.metric)] for p in info.points}
    found = {p: (next(iter(x.values())), next(iter(y.values()))) for p, (x, y) in every.items() if x and y}
    best = stats.front([at for point, at in found.items() if NOT_MEASURED not in point], lambda at: at)
    if best:
        places = [*(a for a, _ in best), max(a for a, _ in found.values())]
        ax.step(places, [*(b for _, b in best), best[-1][1]], where="post", color=INK, linewidth=1,
                label="nothing is better in both")  # fmt: skip
    shapes = {}
    for point in reversed(found):  # the winner is the last, and has the first colour
        values = {key.removesuffix(".method").rpartition(".")[2]: info.points[point].get(key) for key in SHAPE}
        named = " ".join(f"{key}={value}" for key, value in values.items() if value not in UNNAMED)
        shapes[point] = wording.point(named) or "replicas"
    order = list(dict.fromkeys(shapes.values()))
    for point, shape in shapes.items():
        (x, y), index, guess = found[point], order.index(shape), NOT_MEASURED in point
        colour, label = COLOURS[index % len(COLOURS)], shape + (", not measured" if guess else "")
        (mark,) = ax.plot([x], [y], MARKERS[index % len(MARKERS)], color=colour, markersize=5.5, label=label,
                          markerfacecolor="white" if guess else colour,
                          alpha=1 if guess or (x, y) in best else 0.45)  # fmt: skip
        frame.says(mark, [f"{wording.point(point)}: {plain(x)}, {wording.number(y)}"])
    if found:
        frame.scale(ax.xaxis, log=True)
        frame.scale(ax.yaxis)
        ax.set_xlabel(panel.x_label or frame.axis_label(info.metrics[key], 44))
        ax.set_ylabel(frame.axis_label(info.metrics[panel.metric], 36))
    return bool(found)
