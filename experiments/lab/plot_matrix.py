"""What mechanisms are worth two by two: on the diagonal each alone, beside it every pair, and whether their gains
multiply."""

from __future__ import annotations

import textwrap
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from experiments.lab.metrics import Better
from experiments.lab.rows import Table
from experiments.lab.store import Result

JOINED = "+"
SHOWN = 0.3  # of the scale of colours: what is further from 1 is drawn no darker


def draw(ax: Axes, metric: str, result: Result) -> bool:
    """Below the diagonal: a pair's gain. Above it: that gain over the product of both alone; below 1 they eat each
    other. Points are taken together, by the geometric mean. False where there is nothing to show."""
    info = result.info
    names = [variant for variant in info.variants if variant != info.baseline and JOINED not in variant]
    alone = {name: _gain(result, name, metric) for name in names}
    cells = np.full((len(names), len(names)), np.nan)
    texts: dict[tuple[int, int], str] = {}
    for i, a in enumerate(names):
        own = alone[a]
        if own is None:
            continue
        texts[i, i] = f"{own:.2f}x"
        for j, b in enumerate(names[:i]):
            other = alone[b]
            both = _gain(result, f"{b}{JOINED}{a}", metric) or _gain(result, f"{a}{JOINED}{b}", metric)
            if both is None or other is None:
                continue
            cells[j, i] = both / (own * other)
            texts[i, j], texts[j, i] = f"{both:.2f}x", f"{cells[j, i]:.2f}"
    if not texts:
        return False
    ax.imshow(cells, cmap="PuOr", norm=TwoSlopeNorm(1.0, 1 - SHOWN, 1 + SHOWN), alpha=0.5)  # numbers stand on it
    for (row, column), text in texts.items():
        weight = "bold" if row == column else "normal"
        ax.annotate(text, (column, row), ha="center", va="center", fontsize=9, fontweight=weight)
    labels = [textwrap.fill(info.variants[name], 12) for name in names]
    ax.set_xticks(range(len(names)), labels, fontsize=8, rotation=45)
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    ax.grid(visible=False)
    ax.set_title(f"gain in {info.metrics[metric].label}", fontsize=9)
    ax.set_xlabel("bold: alone; below it: the pair;\nabove it: the pair / the product of both", fontsize=8)
    return True


def _gain(result: Result, variant: str, metric: str) -> float | None:
    """Over the baseline, above 1 where it is better; the geometric mean over points."""
    table, baseline = Table(result.rows), result.info.baseline
    logs = []
    for point in result.info.points:
        own, base = (list(table.values(name, point, metric).values()) for name in (variant, baseline or ""))
        if own and base and median(base) > 0 and median(own) > 0:
            logs.append(np.log(median(own) / median(base)))
    if not logs:
        return None
    gain = float(np.exp(np.mean(logs)))
    return gain if result.info.metrics[metric].better is Better.higher else 1 / gain
