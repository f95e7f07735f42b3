"""Lines over a setting, curves of one metric over another; and what panels of points share: names on the x axis,
medians with their 95 % intervals, and the bounds of claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from experiments.lab.judge import stats
from experiments.lab.judge.knees import PASS
from experiments.lab.judge.metrics import Metric
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import BOUND, INK, ON_TOP, line_style, plain, spread
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Turn

FAR = 3  # a bound this many times above everything measured would only press the data flat


def draw(ax: Axes, panel: PanelSpec, result: Result) -> dict[str, float]:
    """One line a variant; where points differ in more than x, one line a variant and combination of the others. Where
    each point stands on the x axis; empty where nothing is drawn."""
    assert panel.x is not None
    table, info, key = result.table, result.info, panel.x
    variants = info.variants
    at_x = {name: settings[key] for name, settings in info.points.items() if key in settings}
    at_x = {name: x for name, x in at_x.items() if any(table.values(v, name, panel.metric) for v in variants)}
    numeric = all(is_number(x) for x in at_x.values())
    place_of = {x: float(x) if numeric else float(index) for index, x in enumerate(dict.fromkeys(at_x.values()))}
    alone = len(place_of) == len(at_x)  # whatever else changes does so with x
    rests = {name: "" if alone else wording.point(_rest(info.points[name], key)) for name in at_x}
    estimate = of_metric(info.metrics[panel.metric])
    for row, (variant, label) in enumerate(variants.items()):
        for kind, rest in enumerate(dict.fromkeys(rests.values())):
            found = [(place_of[at_x[name]], values) for name in at_x
                     if rests[name] == rest and (values := table.values(variant, name, panel.metric))]  # fmt: skip
            if not found:
                continue
            found.sort(key=lambda item: item[0])
            x, repeats = [place for place, _ in found], [values for _, values in found]
            y = intervals(repeats, estimate)
            text = ", ".join(part for part in (label if len(variants) > 1 else "", rest) if part)
            style = line_style(row, kind)
            line, *_ = ax.errorbar(x, y.medians, yerr=y.errors, label=text or label, **style | y.caps)
            frame.says(line, [tip(text, plain(place), values, estimate) for place, values in found])
    if numeric:
        log = panel.log_x and min(place_of.values(), default=1) > 0
        if log:
            ax.set_xscale("log", base=10)
        frame.ticks(ax.xaxis, spread(list(place_of.values()), math.log if log else float))
    else:
        frame.ticks(ax.xaxis, list(place_of.values()), list(map(str, place_of)))
    ax.set_xlabel(panel.x_label or wording.setting(key), fontsize=9)
    return {name: place_of[x] for name, x in at_x.items()}


def curve(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """One curve a variant through its points: one metric over another, such as latency over the rate reached. Passes
    of a search are no such points: what comes out there is what was offered."""
    assert panel.x is not None
    result = _without_searches(result, panel.metric)
    table, info = result.table, result.info
    measured = {
        variant: [
            (point, xs, ys)
            for point in info.points
            if (xs := table.values(variant, point, panel.x)) and (ys := table.values(variant, point, panel.metric))
        ]
        for variant in info.variants
    }
    of_x, of_y = of_metric(info.metrics[panel.x]), of_metric(info.metrics[panel.metric])
    named = False
    for row, (variant, label) in enumerate(info.variants.items()):
        if not measured[variant]:
            continue
        names, all_x, all_y = zip(*measured[variant], strict=True)
        x, y = intervals(all_x, of_x), intervals(all_y, of_y)
        style = line_style(row, 0)
        line, *_ = ax.errorbar(x.medians, y.medians, xerr=x.errors, yerr=y.errors, label=label, **style | y.caps)
        frame.says(line, [tip(label, wording.point(point), ys, of_y) for point, ys in zip(names, all_y, strict=True)])
        if not named and _alike(result, names):
            key = _only_key(result, names)
            for point, at_x, at_y in zip(names, x.medians, y.medians, strict=True):
                name = point if key is None else _setting(result, point)
                ax.annotate(name, (at_x, at_y), (-6, 3), textcoords="offset points", fontsize=7.5, ha="right", **ON_TOP)
            if key is not None:
                ax.set_title(f"{ax.get_title()} (small numbers: {wording.setting(key)})", fontsize=8, color=INK)
            named = True
    drawn = any(measured.values())
    if panel.log_x and drawn:
        frame.log(ax.xaxis, ax, True)
    elif drawn:
        frame.from_zero(ax.xaxis, ax, True, 5)
    ax.set_xlabel(panel.x_label or frame.axis_label(info.metrics[panel.x], 44), fontsize=9)
    return drawn


def _without_searches(result: Result, metric: str) -> Result:
    """Where a search has made points: the others that have the metric, with the settings that tell them apart."""
    info = result.info
    others = {name: at for name, at in info.points.items() if not name.startswith(PASS)}
    if len(others) == len(info.points):
        return result
    kept = {name: at for name, at in others.items() if any(result.table.values(v, name, metric) for v in info.variants)}
    own = {name: {k: v for k, v in at.items() if any(v != other.get(k) for other in kept.values())}
           for name, at in kept.items()}  # fmt: skip
    return replace(result, info=replace(info, points=own))


def bounds(ax: Axes, panel: PanelSpec, result: Result, places: Mapping[str, float]) -> None:
    """The bounds of absolute claims about the panel's metric, without their aims. A single one is a line; several are
    marks at their points, in the colours of their variants where they are of several."""
    claims = []
    for claim in (side for both in result.info.claims for side in replace(both, aim=None).sides):
        if claim.metric == panel.metric and not claim.bound.is_ratio and claim.point in result.info.points:
            top = ax.get_ylim()[1]
            if claim.value <= FAR * top:
                ax.set_ylim(top=max(top, 1.12 * claim.value) if claim.value > top else top)
                claims.append(claim)
    if len(claims) > 1 and len(places) > 1:
        variants = list(result.info.variants)
        alone = len({claim.variant for claim in claims}) == 1
        label = "bound of a claim" if alone else "bound of a claim, coloured by its variant"
        ax.plot([], [], color=BOUND if alone else INK, linewidth=1.6, label=label)
        for claim in (claim for claim in claims if claim.point in places):
            x, colour = places[claim.point], BOUND if alone else line_style(variants.index(claim.variant), 0)["color"]
            ax.plot([x], [claim.value], "_", color=colour, markersize=17, markeredgewidth=1.8, zorder=5)
        return
    for claim in claims if len(claims) == 1 else ():  # of several, a curve does not tell which is whose
        at = f" at {wording.point(claim.point)}" if claim.point else ""
        text = f"claim: {'at least' if claim.bound.is_floor else 'at most'} {wording.number(claim.value)}{at}"
        ax.axhline(claim.value, color=BOUND, linewidth=1, linestyle="--", label=text)


def names_of(points: Sequence[str], panel: PanelSpec, result: Result) -> tuple[list[str], str]:
    """Values alone, and what they are of, where points differ in one setting; else all but what the title has."""
    key = _only_key(result, points)
    if key is not None:
        numbers = all(is_number(value) for point in points for value in result.info.points[point].values())
        label = panel.x_label or (wording.setting(key) if numbers else "")
        return [_setting(result, point) for point in points], label
    told = {f"{name.rpartition('.')[2]}={value}" for name, value in panel.where.items()} | {panel.where.get("case")}
    shown = (" ".join(word for word in point.split(" ") if word not in told) for point in points)
    return [wording.point(name) for name in shown], panel.x_label


def plain_setting(value: Any) -> str:
    return f"{value:,}" if is_number(value) else str(value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _only_key(result: Result, points: Sequence[str]) -> str | None:
    """What all points differ in, where it is one thing: then its values are names enough."""
    keys = {tuple(result.info.points[point]) for point in points}
    (only, *others) = keys or {()}
    return only[0].rpartition(".")[2] if not others and len(only) == 1 else None


def _alike(result: Result, points: Sequence[str]) -> bool:
    """Whether there are several, which all say something of one setting: then a curve goes along it."""
    return len(points) > 1 and bool(set.intersection(*(set(result.info.points[point]) for point in points)))


def _setting(result: Result, point: str) -> str:
    (value,) = result.info.points[point].values()
    return plain_setting(value)


def _rest(settings: Mapping[str, Any], x: str) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key != x)


Repeats = Mapping[Turn, float]
Estimator = Callable[[Repeats], Estimate]
WILD = 1000.0  # times its median: no axis shows as much of an interval
ENOUGH = 3  # values that were drawn apart: of two an interval is wide by chance, so that their range is drawn, thin


class Intervals(NamedTuple):
    """Of one series: medians, and distances to their ends below and above; NaN, which is not drawn, for none."""

    medians: list[float]
    errors: tuple[list[float], list[float]]
    caps: dict[str, Any]  # what their style has of them


def of_metric(metric: Metric | None) -> Estimator:
    """Its repeats' estimate, which of a share stays between 0 and 1."""
    return partial(stats.absolute, share=metric is not None and metric.share)


def intervals(values: Iterable[Repeats], of: Estimator = stats.absolute) -> Intervals:
    """Of each place's repeats. What is a ratio already is estimated by `stats.factors`."""
    every = list(values)
    found = [of(repeats) for repeats in every]
    if any(e.low is not None and (e.processes if e.processes > 1 else e.n) < ENOUGH for e in found):
        below = [max(0.0, e.median - min(repeats.values())) for e, repeats in zip(found, every, strict=True)]
        above = [max(0.0, max(repeats.values()) - e.median) for e, repeats in zip(found, every, strict=True)]
        return Intervals([e.median for e in found], (below, above), {"capsize": 0, "elinewidth": 0.8})
    below = [math.nan if e.low is None else e.median - e.low for e in found]
    above = [math.nan if e.high is None else min(e.high - e.median, WILD * abs(e.median)) for e in found]
    return Intervals([e.median for e in found], (below, above), {})


def tip(name: str, where: str, repeats: Repeats, of: Estimator) -> str:
    """What a point says to the pointer."""
    estimate = wording.interval(of(repeats))
    return f"{', '.join(part for part in (name, where) if part)}: {estimate}, {len(repeats)} repeats"
