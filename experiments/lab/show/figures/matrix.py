"""What mechanisms are worth alone and two by two, and whether their gains multiply; and the load of experts."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lab.judge import pairs
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result

SHOWN = 0.3  # of the scale of colours: what is further from 1 is drawn no darker
NOISE = "#e0e0e0"  # of a pair whose interval holds 1: a colour would say more than is known


def draw(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """Below the diagonal: a pair's gain. Above it: that gain over the product of both alone; below 1 they eat each
    other. Grey, and above it in brackets, is what cannot be told from 1. Points are taken together, by the geometric
    mean. False where there is nothing to show."""
    info, metric, names = result.info, panel.metric, pairs.mechanisms(result)
    told = {(n, n): alone for n, name in enumerate(names) if (alone := pairs.gain(result, name, metric))}
    if not told:
        return False
    for pair in pairs.of(result, metric):
        j, i = names.index(pair.first), names.index(pair.second)
        told |= {(i, j): pair.both, (j, i): pair.interaction}
    cells, noise = np.full((2, len(names), len(names)), np.nan)
    tips = []
    for (row, column), found in told.items():
        unit = "x" if row >= column else ""
        if not found.told:
            noise[row, column] = 0
        elif not unit:
            cells[row, column] = found.median
        text, weight = f"{found.median:.2f}{unit}", "bold" if row == column else "normal"
        text = text if found.told or unit else f"({text})"
        ax.annotate(text, (column, row), ha="center", va="center", fontsize=9, fontweight=weight)
        both = " and ".join(dict.fromkeys(info.variants[names[place]] for place in (column, row)))
        tips.append(f"{both}: {wording.interval(found, unit)}{'' if unit else ' of the product of both'}")
    ax.imshow(noise, cmap=ListedColormap([NOISE]))
    ax.imshow(cells, cmap="PuOr", norm=TwoSlopeNorm(1.0, 1 - SHOWN, 1 + SHOWN), alpha=0.5)  # numbers stand on it
    rows, columns = zip(*told, strict=True)
    (unseen,) = ax.plot(columns, rows, "s", alpha=0, markersize=20)
    frame.says(unseen, tips)
    labels = [textwrap.fill(info.variants[name], 12) for name in names]
    ax.set_xticks(range(len(names)), labels, fontsize=8, rotation=45)
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    ax.grid(visible=False)
    ax.set_title(f"gain in {info.metrics[metric].label}", fontsize=9)
    ax.set_xlabel("bold: alone; below: the pair; above: the pair /\nthe product of both; grey: may be 1", fontsize=8)
    return True


EXPERTS = "The load of experts"
MOST = 4.0  # times the average: what is above is drawn no darker


def experts(result: Result) -> Figure:
    """A panel a point, of the first variant that has it: variants differ in how tokens travel, not in where they go."""
    points = list(dict.fromkeys(row.point for row in result.experts))
    figure = frame.new(frame.WIDTH, 3.6)
    axes = figure.subplots(1, len(points), squeeze=False, sharey=True)
    for ax, point in zip(axes[0], points, strict=True):
        own = [row for row in result.experts if row.point == point]
        layers = [row for row in own if row.variant == own[0].variant]
        tokens = np.array([[int(count) for count in row.tokens] for row in layers], dtype=float)
        load = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
        image = ax.imshow(load, cmap="cividis", vmin=0, vmax=MOST, aspect="auto", interpolation="nearest")
        ax.grid(visible=False)
        lines = ax.hlines(range(len(load)), -0.5, load.shape[1] - 0.5, alpha=0)
        told = [f"layer {n}: {row.max():.2f}x the average at expert {row.argmax()}, {row.min():.2f}x at least"
                for n, row in enumerate(load)]  # fmt: skip
        frame.says(lines, told)
        ax.set_title(f"{point or result.info.variants[own[0].variant]}: busiest {load.max():.1f}x", fontsize=9)
        ax.set_xlabel("expert", fontsize=9)
    axes[0][0].set_ylabel("layer with experts", fontsize=9)
    axes[0][0].yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=list(axes[0]), label="tokens, by the average expert's", extend="max")
    return figure
