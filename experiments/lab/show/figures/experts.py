"""The load of experts: of each layer the tokens that went to each, by those that go to one on average."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lab.show.figures import frame
from experiments.lab.store.result import Result

TITLE = "The load of experts"
MOST = 4.0  # times the average: what is above is drawn no darker


def draw(result: Result) -> Figure:
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
        ax.set_title(f"{point or result.info.variants[own[0].variant]}: busiest {load.max():.1f}x", fontsize=9)
        ax.set_xlabel("expert", fontsize=9)
    axes[0][0].set_ylabel("layer with experts", fontsize=9)
    axes[0][0].yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=list(axes[0]), label="tokens, by the average expert's", extend="max")
    return figure
