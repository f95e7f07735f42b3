"""What two mechanisms bring together, beside the product of what each brings alone: do their gains multiply?

Variants are called a, b and a+b, beside a baseline without either. A gain is a ratio to the baseline, above 1 where it
is better. Interaction, (a+b) / (a b), is taken repeat by repeat, and over the points by the geometric mean: above 1 the
pair brings more than both alone would, below 1 they eat each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

from experiments.lab.config.spec import PanelKind
from experiments.lab.judge import marks, stats
from experiments.lab.judge.metrics import Better
from experiments.lab.show import wording
from experiments.lab.show.grids import Grid
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Turn

JOINED = "+"
# What the interval of an interaction shows.
TOLD = {1: "more than the product", -1: "less than the product", 0: "no difference shown"}


@dataclass(frozen=True)
class Pair:
    first: str  # variants
    second: str
    alone: tuple[stats.Estimate, stats.Estimate]  # gains
    both: stats.Estimate
    interaction: stats.Estimate


def mechanisms(result: Result) -> list[str]:
    """The variants that stand for one mechanism alone."""
    without = (result.info.baseline, result.info.aa)
    return [name for name in result.info.variants if name not in without and JOINED not in name]


def gain(result: Result, variant: str, metric: str) -> stats.Estimate | None:
    """Over the baseline; None where it was not measured."""
    found = _by_repeat(result, variant, metric)
    return stats.factors(found) if found else None


def of(result: Result, metric: str) -> list[Pair]:
    """Every pair that was measured, and both of it alone."""
    names, found = mechanisms(result), []
    for first, second in sorted(combinations(names, 2), key=lambda pair: names.index(pair[1])):
        called = (f"{first}{JOINED}{second}", f"{second}{JOINED}{first}")
        joined = next((name for name in called if name in result.info.variants), "")
        both, a, b = (_by_repeat(result, variant, metric) for variant in (joined, first, second))
        if repeats := [r for r in both if r in a and r in b]:
            interaction = stats.factors({r: both[r] / (a[r] * b[r]) for r in repeats})
            found.append(Pair(first, second, (stats.factors(a), stats.factors(b)), stats.factors(both), interaction))
    return found


def metrics(result: Result) -> list[str]:
    """Those that the figures show pair by pair."""
    shown = [p.metric for plot in result.info.plots for p in plot.panels if p.kind is PanelKind.matrix]
    return [name for name in dict.fromkeys(shown) if name in result.info.metrics]


def grids(result: Result) -> list[Grid]:
    found, header = [], ("pair", "alone", "product", "together [95 %]", "together / product", "so the pair brings")
    for metric in metrics(result):
        rows = []
        for pair in of(result, metric):
            alone = [gain.median for gain in pair.alone]
            medians = ", ".join(f"{wording.number(gain)}x" for gain in alone), f"{wording.number(math.prod(alone))}x"
            shown = (wording.interval(own, "x") for own in (pair.both, pair.interaction))
            rows.append((f"{pair.first}{JOINED}{pair.second}", *medians, *shown, TOLD[pair.interaction.told]))
        title = f"Pairs, by their gain in {result.info.metrics[metric].label}"
        found += [Grid(title, header, tuple(rows))] if rows else []
    return found


def sentence(result: Result) -> str:
    """Which gains multiply, by the first of `metrics`; empty where there are no pairs."""
    names = metrics(result)
    pairs = of(result, names[0]) if names else []
    if not pairs:
        return ""
    told, once = [], [pair for pair in pairs if pair.interaction.low is None]
    for way in (1, -1):
        if own := [pair for pair in pairs if pair.interaction.told == way]:
            each = ", ".join(f"{p.first}{JOINED}{p.second} {wording.number(p.interaction.median)}x" for p in own)
            told.append(f"{len(own)} bring{'s' * (len(own) == 1)} {TOLD[way]} ({each})")
    if alike := sum(pair.interaction.told == 0 for pair in pairs) - len(once):
        told.append(f"{alike} show{'s' * (alike == 1)} no difference from it")
    told += [f"{len(once)} {'has' if len(once) == 1 else 'have'} one valid repeat"] if once else []
    told += ["of pairs whose gains multiply 1 in 20 would differ by chance"] * any(p.interaction.told for p in pairs)
    metric = result.info.metrics[names[0]].label
    return f"Of {len(pairs)} pairs, beside the product of their gains in {metric}: {'; '.join(told)}."


def _by_repeat(result: Result, variant: str, metric: str) -> dict[Turn, float]:
    """Gains over the baseline by repeat, over the points that both have in it."""
    sign = 1 if result.info.metrics[metric].better is Better.higher else -1
    logs = marks.log_ratios(result, variant, metric)
    return {repeat: math.exp(sign * sum(own) / len(own)) for repeat, own in logs.items()}
