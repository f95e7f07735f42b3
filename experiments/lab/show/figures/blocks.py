"""A map of the KV pool: whose each block is, step by step, variants side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lab.measure.block_map import CACHED, COPIED, MOST, SHARED, BlockRow
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.timeline import HEAD, LETTERS
from experiments.lab.store.result import Result

TITLE = "Whose KV blocks are which"
DESCRIBED = (
    "The map of KV blocks is of a pass of its own in which nothing was timed: after each step it was noted whose each "
    "block is, and what lies behind its request's last token. It shows blocks that requests of that pass had, "
    f"{MOST} at most; white is free."
)
OF_REQUESTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#661100", "#F0E442")  # in turns
LOOKS = {SHARED: ("of several requests", frame.INK), CACHED: ("kept for prompts that begin alike", "#C9C9C9"),
         COPIED: ("nobody's, and being copied", frame.BOUND)}  # fmt: skip
PALE = 0.72  # of white in the colour of what is empty


def draw(result: Result) -> Figure:
    own = {v: rows for v in result.info.variants if (rows := [row for row in result.blocks if row.variant == v])}
    figure = frame.new(frame.WIDTH, 4.4)
    axes = figure.subplots(1, len(own), squeeze=False)[0]
    for ax, (variant, rows) in zip(axes, own.items(), strict=True):
        steps = 1 + max(row.last for row in rows)
        line = {block: n for n, block in enumerate(sorted({row.block for row in rows}))}
        image = np.ones((len(line), steps, 3))
        for row, colour in zip(rows, _colours(rows), strict=True):
            image[line[row.block], row.first : row.last + 1] = colour
        ax.imshow(image, aspect="auto", interpolation="nearest", extent=(0, steps, len(line), 0))
        total = result.steps_of(variant, rows[0].point)[-1].kv_total_blocks
        title = f"{result.info.variants[variant]}: {len(line):,} of {total:,} KV blocks"
        ax.set_title(textwrap.fill(title, LETTERS), **HEAD)
        ax.set_xlabel("engine steps")
        ax.grid(visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        _legend(ax, rows)
    axes[0].set_ylabel("KV blocks, one a line")
    frame.legend(figure, axes, least=1)
    return figure


def _colours(rows: Sequence[BlockRow]) -> Iterator[np.ndarray]:
    """Requests have theirs in turns, in the order of their first blocks, but for those of requests beside these."""
    of_owner = {owner: colour for owner, (_, colour) in LOOKS.items()}
    on_map = dict[int, str]()  # block -> its colour so far
    turns = cycle(OF_REQUESTS)
    for row in sorted(rows, key=lambda row: (row.first, row.block)):
        if row.owner not in of_owner:
            beside = {on_map.get(row.block + step) for step in (-1, 0, 1)}
            of_owner[row.owner] = next(colour for colour in turns if colour not in beside)
        on_map[row.block] = of_owner[row.owner]
    for row in rows:
        colour = np.array(to_rgb(of_owner[row.owner]))
        yield colour + (1 - colour) * PALE if row.empty else colour


def _legend(ax: Axes, rows: Sequence[BlockRow]) -> None:
    pale = tuple(np.array(to_rgb(OF_REQUESTS[0])) * (1 - PALE) + PALE)
    there = {(row.owner if row.owner in LOOKS else "", row.empty) for row in rows}
    of_one = {("", False): ("a request's (colours come again)", OF_REQUESTS[0]), ("", True): ("reserved, empty", pale)}
    for key, (label, colour) in (of_one | {(owner, False): look for owner, look in LOOKS.items()}).items():
        if key in there:
            ax.fill_between([], [], color=colour, label=label)
