"""Points of an experiment as names on an axis."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result

NAME_WIDTH = 12  # characters of a named point below its bars


def name_axis(ax: Axes, panel: PanelSpec, result: Result, points: Sequence[str], width: float) -> None:
    key = only_key(result, points)
    names = [_in_lines(p, panel) for p in points] if key is None else [setting(result, p) for p in points]
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    upright = longest * len(names) * 0.085 > width * 0.8  # about 0.085 inches a letter
    ax.set_xticks(range(len(points)), names)
    if upright:
        ax.tick_params(axis="x", labelrotation=90, labelsize=8)
    ax.set_xlabel(panel.x_label or key or "", fontsize=9)


def _in_lines(point: str, panel: PanelSpec) -> str:
    """A setting a line, without those that the panel's title has."""
    told = {f"{key.rpartition('.')[2]}={value}" for key, value in panel.where.items()} | {panel.where.get("case")}
    words = [word for word in point.split(" ") if word not in told]
    lines = re.sub(r" (?=\S+=)", "\n", " ".join(words)).split("\n")
    return "\n".join(textwrap.fill(line, NAME_WIDTH, break_long_words=False) for line in lines)


def only_key(result: Result, points: Sequence[str]) -> str | None:
    """What all points differ in, where it is one thing: then its values are names enough."""
    keys = {tuple(result.info.points[point]) for point in points}
    (only, *others) = keys or {()}
    return only[0].rpartition(".")[2] if not others and len(only) == 1 else None


def setting(result: Result, point: str) -> str:
    (value,) = result.info.points[point].values()
    return plain_setting(value)


def plain_setting(value: Any) -> str:
    return f"{value:,}" if is_number(value) else str(value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
