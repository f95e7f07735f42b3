"""What mechanisms are worth two by two: on the diagonal each alone, beside it every pair, and whether their gains
multiply."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, TwoSlopeNorm

from experiments.lab.judge import pairs
from experiments.lab.judge.stats import Estimate
from experiments.lab.store.result import Result

SHOWN = 0.3  # of the scale of colours: what is further from 1 is drawn no darker

NOISE = "#e0e0e0"  # of a pair whose interval holds 1: a colour would say more than is known


def draw(ax: Axes, metric: str, result: Result) -> bool:
    """Below the diagonal: a pair's gain. Above it: that gain over the product of both alone; below 1 they eat each
    other. Grey, and above it in brackets, is what cannot be told from 1. Points are taken together, by the geometric
    mean. False where there is nothing to show."""
    info, names = result.info, pairs.mechanisms(result)
    cells, noise = np.full((2, len(names), len(names)), np.nan)
    texts: dict[tuple[int, int], str] = {}

    def enter(row: int, column: int, found: Estimate, unit: str = "x") -> None:
        """Coloured by its value above the diagonal, and grey where nothing is told."""
        text = f"{found.median:.2f}{unit}"
        texts[row, column] = text if found.told or unit else f"({text})"
        if not found.told:
            noise[row, column] = 0
        elif row < column:
            cells[row, column] = found.median

    for i, name in enumerate(names):
        alone = pairs.gain(result, name, metric)
        if alone is not None:
            enter(i, i, alone)
    if not texts:
        return False
    for pair in pairs.of(result, metric):
        j, i = names.index(pair.first), names.index(pair.second)
        enter(i, j, pair.both)
        enter(j, i, pair.interaction, "")
    ax.imshow(noise, cmap=ListedColormap([NOISE]))
    ax.imshow(cells, cmap="PuOr", norm=TwoSlopeNorm(1.0, 1 - SHOWN, 1 + SHOWN), alpha=0.5)  # numbers stand on it
    for (row, column), text in texts.items():
        weight = "bold" if row == column else "normal"
        ax.annotate(text, (column, row), ha="center", va="center", fontsize=9, fontweight=weight)
    labels = [textwrap.fill(info.variants[name], 12) for name in names]
    ax.set_xticks(range(len(names)), labels, fontsize=8, rotation=45)
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    ax.grid(visible=False)
    ax.set_title(f"gain in {info.metrics[metric].label}", fontsize=9)
    words = ("bold: alone; below: the pair; above: the pair /", "the product of both; grey: may be 1")
    ax.set_xlabel("\n".join(words), fontsize=8)
    return True
