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

from experiments.lab.measure.block_map import MAX_BLOCKS
from experiments.lab.measure.traces import CACHED, SHARED, BlockRow
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.timeline import HEAD, LETTERS
from experiments.lab.store.result import Result

TITLE = "Whose KV blocks are which"
DESCRIBED = (
    "The map of KV blocks is of a pass of its own in which nothing was timed: after each step it was noted whose each "
    "block is, and what lies behind its request's last token. It shows blocks that requests of that pass had, "
    f"{MAX_BLOCKS} at most; white is free."
)
OF_REQUESTS = [colour for colour in frame.COLOURS if colour not in (frame.BOUND, "#999999")]  # in turns
LOOKS = {SHARED: ("of several requests", frame.INK), CACHED: ("kept for prompts that begin alike", "#C9C9C9")}
PALE = 0.72  # of white in the colour of what is empty


def draw(result: Result) -> Figure:
    own = {v: rows for v in result.info.variants if (rows := [row for row in result.blocks if row.variant == v])}
    figure = frame.new(frame.WIDTH, 4.4)
    axes = figure.subplots(1, len(own), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (variant, rows) in zip(axes, own.items(), strict=True):
        steps = 1 + max(row.last for row in rows)
        line = {block: n for n, block in enumerate(sorted({row.block for row in rows}))}
        image = np.ones((len(line), steps, 3))
        for row, colour in zip(rows, _colours(rows), strict=True):
            image[line[row.block], row.first : row.last + 1] = colour
        ax.imshow(image, aspect="auto", interpolation="nearest", extent=(0, steps, len(line), 0))
        total = result.steps_of(variant, rows[0].point)[-1].kv_total_blocks
        first = "the first " if len(line) == MAX_BLOCKS < total else ""
        title = f"{result.info.variants[variant]}: {first}{len(line):,} blocks that requests had, of {total:,}"
        ax.set_title(textwrap.fill(title, LETTERS), **HEAD)
        ax.set_xlabel("engine steps")
        ax.grid(visible=False)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        ax.set_yticks([])
        _legend(ax, rows)
    axes[0].set(xlim=(0, None), ylabel="KV blocks, one a line")
    frame.legend(figure, axes, least=1)
    return figure


def _colours(rows: Sequence[BlockRow]) -> Iterator[np.ndarray]:
    """Requests have theirs in turns, but for those that blocks beside a request's first one have, or it had before."""
    of_owner = {owner: colour for owner, (_, colour) in LOOKS.items()}
    on_map, turns = dict[int, str](), cycle(OF_REQUESTS)  # block -> its colour so far
    for row in sorted(rows, key=lambda row: (row.first, row.block)):
        if row.owner not in of_owner:
            beside = {on_map.get(row.block + step) for step in (-1, 0, 1)}
            of_owner[row.owner] = next(colour for colour in turns if colour not in beside)
        on_map[row.block] = of_owner[row.owner]
    for row in rows:
        yield _rgb(of_owner[row.owner], row.empty)


def _rgb(colour: str, empty: bool) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return rgb + (1 - rgb) * PALE if empty else rgb


def _legend(ax: Axes, rows: Sequence[BlockRow]) -> None:
    there = {(row.owner if row.owner in LOOKS else "", row.empty) for row in rows}
    of_one = {False: "a request's (colours come again)", True: "reserved, empty"}
    looks = {("", empty): (label, OF_REQUESTS[0]) for empty, label in of_one.items()}
    looks |= {(owner, False): look for owner, look in LOOKS.items()}
    for (owner, empty), (label, colour) in looks.items():
        if (owner, empty) in there:
            ax.fill_between([], [], color=tuple(_rgb(colour, empty)), label=label)
