"""Speed-up over the baseline: measured, as points with their intervals, and by Leviathan's formula, as lines through
them. The formula knows the measured costs of steps and the acceptance, and nothing of the times of passes with drafts:
over a setting it is its tokens per second for the rows that each step had, over those measured of the baseline; over a
metric it is that of a full batch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.lab.judge import stats
from experiments.lab.judge.draft_formulas import leviathan_speedup
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import BOUND, INK, line_style, plain, spread
from experiments.lab.show.figures.lines import intervals, tip
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Turn

FORMULA = "formula_tokens_per_s"
COSTS = ("draft_cost", "verify_cost", "drafts_per_decode")


class _Series(NamedTuple):
    label: str
    colour: int  # a variant's is the same in all panels
    x: list[float]
    speedups: list[dict[Turn, float]]  # of each place on the x axis
    line: tuple[Sequence[float], Sequence[float]]  # by the formula


def draw(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """Over a setting of the points: a series a variant. Over a metric (acceptance): a series a point, through its
    variants. False where there is nothing to show."""
    assert panel.x is not None
    info = result.info
    found = (_over_metric if panel.x in info.metrics else _over_setting)(panel, panel.x, result)
    for one in found:
        points = intervals(one.speedups, stats.factors)
        style = line_style(one.colour, 0) | points.caps | {"linestyle": "none"}
        dots, *_ = ax.errorbar(one.x, points.medians, yerr=points.errors, label=one.label, **style)
        told = zip(one.x, one.speedups, strict=True)
        frame.says(dots, [tip(one.label, plain(x), repeats, stats.factors) for x, repeats in told])
        ax.plot(*one.line, color=style["color"], linewidth=1.1)
    ax.plot([], [], color=INK, linewidth=1.1, label="by the formula")
    ax.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    if panel.mark is not None:
        ax.axvline(panel.mark, color=BOUND, linewidth=1, linestyle="--", label=panel.mark_label or plain(panel.mark))
    if panel.log_x:
        ax.set_xscale("log", base=10)
        frame.ticks(ax.xaxis, spread(sorted({x for one in found for x in one.x}), np.log))
    frame.from_zero(ax.yaxis, ax, False, 8)
    metric = info.metrics.get(panel.x)
    ax.set_xlabel(panel.x_label or (metric.label if metric else wording.setting(panel.x)), fontsize=9)
    ax.set_ylabel(f"speed-up over {info.variants[str(info.baseline)]}", fontsize=9)
    return bool(found)


def _over_setting(panel: PanelSpec, key: str, result: Result) -> list[_Series]:
    info = result.info
    places = sorted((s[key], name) for name, s in info.points.items() if key in s)
    found = []
    for row, (variant, label) in enumerate(info.variants.items()):
        measured, told = (
            [(x, ratios) for x, name in places if (ratios := _ratios(metric, panel, result, variant, name))]
            for metric in (panel.metric, FORMULA)
        )
        if measured:
            line = ([x for x, _ in told], [median(ratios.values()) for _, ratios in told])
            found.append(_Series(label, row, [x for x, _ in measured], [ratios for _, ratios in measured], line))
    return found


def _over_metric(panel: PanelSpec, key: str, result: Result) -> list[_Series]:
    """The line is the formula for any acceptance, at the point's median costs, from a little below the lowest
    acceptance measured to a little above the highest."""
    info, table, found = result.info, result.table, []
    for row, name in enumerate(info.points):
        measured = [
            (median(at.values()), ratios)
            for variant in info.variants
            if (at := table.values(variant, name, key))
            and (ratios := _ratios(panel.metric, panel, result, variant, name))
        ]
        if not measured:
            continue
        x = [place for place, _ in measured]
        costs = [[v for variant in info.variants for v in table.values(variant, name, cost).values() if v]
                 for cost in COSTS]  # fmt: skip
        line: tuple[list[float], list[float]] = ([], [])
        if all(costs):
            draft_cost, verify_cost, drafts = map(median, costs)
            rates = np.linspace(max(0.0, min(x) - 0.05), min(1.0, max(x) + 0.05), 60).tolist()
            line = (rates, [leviathan_speedup(a, round(drafts), draft_cost, verify_cost) for a in rates])
        found.append(_Series(wording.point(name) or "measured", row, x, [ratios for _, ratios in measured], line))
    return found


def _ratios(metric: str, panel: PanelSpec, result: Result, variant: str, point: str) -> dict[Turn, float]:
    """Over the panel's metric of the baseline, repeat by repeat."""
    baseline, table = result.info.baseline, result.table
    if variant == baseline:
        return {}
    base = table.values(str(baseline), point, panel.metric)
    own = table.values(variant, point, metric)
    return {turn: value / base[turn] for turn, value in own.items() if base.get(turn, 0) > 0}
