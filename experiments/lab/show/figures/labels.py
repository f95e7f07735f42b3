"""Labels of points on curves. Each gets its place once the rest of a figure has one: beside its point, where it covers
no marker and no other label, and of lines as little as can be."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from experiments.lab.show.figures.frame import ON_TOP

AWAY = (5.5, 10.0)  # points from a point to the edge of its label; the nearer one is tried first
DIRECTIONS = ((-1, 1), (1, -1), (-1, -1), (1, 1), (0, 1), (0, -1), (-1, 0), (1, 0))  # above a curve, then below it
MARKER, PAD = 3.0, 1.0  # points: its radius, and what is kept free around a text
ALIKE = 9.0  # points between two places that share a label
FARTHER, STRANGER = 6, 12  # what a place costs that is farther away, or nearer to another point; a pixel of line is 1
DARKER = 0.7  # times its curve's colour, in which a text could hardly be read


class PointLabel(Annotation):
    """The text of a point, whose place is still to be found."""


def add(ax: Axes, text: str, at: tuple[float, float], colour: str) -> None:
    looks: dict[str, Any] = {"color": [DARKER * part for part in to_rgb(colour)], **ON_TOP}
    place: Any = {"xytext": (0, 0), "textcoords": "offset points", "ha": "center", "va": "center"}
    ax.add_artist(PointLabel(text, at, fontsize=7.5, **place, **looks))


def settle(figure: Figure) -> None:
    """Gives the labels their places; where there is none, or the same text stands there for another curve, a label
    goes."""
    found = {ax: own for ax in figure.axes if (own := [text for text in ax.texts if isinstance(text, PointLabel)])}
    if found:
        figure.draw_without_rendering()  # which finds out where on the figure axes and points are
    for ax, own in found.items():
        _settle(ax, own, ax.figure.dpi / 72)


def _settle(ax: Axes, every: list[PointLabel], point: float) -> None:
    """`point`: in pixels."""
    marks, ink = _drawn(ax)
    taken = np.empty((0, 4))  # left, bottom, right, top
    told: list[tuple[str, np.ndarray]] = []
    for label in every:
        text, at, half = (
            label.get_text(),
            ax.transData.transform(label.xy),
            np.array(label.get_window_extent().size) / 2,
        )
        if any(text == other and np.hypot(*(at - place)) < ALIKE * point for other, place in told):
            label.remove()
            continue
        strangers = marks[np.hypot(*(marks - at).T) > 1]  # pixel
        best, least = np.zeros(2), np.inf
        for away, direction in product(AWAY, DIRECTIONS):
            middle = at + np.array(direction) * (half + away * point * (0.7 if all(direction) else 1))
            box = np.concatenate([middle - half - PAD * point, middle + half + PAD * point])
            inside = (ax.bbox.min < box[:2]).all() and (box[2:] < ax.bbox.max).all()
            apart = (taken[:, :2] > box[2:]).any(axis=1) | (taken[:, 2:] < box[:2]).any(axis=1)
            if not inside or not apart.all() or _within(marks, middle, half + MARKER * point).any():
                continue
            nearer = np.hypot(*(strangers - middle).T) < np.hypot(*(at - middle))
            cost = _within(ink, middle, half).sum() + FARTHER * (away != AWAY[0]) + STRANGER * nearer.any()
            if cost < least:
                best, least = middle, cost
        if least == np.inf:
            label.remove()
            continue
        label.xyann = tuple((best - at) / point)
        taken = np.vstack([taken, [*(best - half), *(best + half)]])
        told.append((text, at))


def _within(places: np.ndarray, middle: np.ndarray, half: np.ndarray) -> np.ndarray:
    return (abs(places - middle) < half).all(axis=1)


def _drawn(ax: Axes) -> tuple[np.ndarray, np.ndarray]:
    """The points of curves, and places along all lines and intervals, a pixel apart: (n, 2), in pixels."""
    curves = [each.lines[0] for each in ax.containers if isinstance(each, ErrorbarContainer)]
    paths = [line.get_transform().transform(line.get_xydata()) for line in ax.lines if line.get_linestyle() != "None"]
    for bars in ax.collections:
        if isinstance(bars, LineCollection):
            paths += [bars.get_transform().transform(segment) for segment in bars.get_segments()]
    ink = [np.linspace(a, b, 1 + int(np.hypot(*(b - a)))) for path in paths for a, b in pairwise(path)
           if np.isfinite([a, b]).all()]  # fmt: skip
    marks = [ax.transData.transform(line.get_xydata()) for line in curves]
    return np.concatenate([np.empty((0, 2)), *marks]), np.concatenate([np.empty((0, 2)), *ink])
