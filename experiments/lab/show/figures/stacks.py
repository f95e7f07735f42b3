"""Bars of pieces: what a time is made of, and where the memory of a device goes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.judge import stats
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import COLOURS, HATCHES, ON_TOP
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result

NARROW = 0.045  # of the axis: a smaller piece of a bar has no room for its number
MEMORY = ("weights", "adapters", "draft model", "KV", "CUDA graphs")  # begin what an engine says of its sizes
_SIZE = re.compile(r"([\d,.]+) (GiB|MiB)")
Rows = dict[str, dict[str, float]]  # the sizes of each row's pieces


def draw(
    rows: Rows, unit: str, axis: str, looks: Mapping[str, Mapping[str, Any]] | None = None, most: float = 0.0
) -> Figure:
    """Bars from the left, a row of pieces each, whose sizes in `unit` stand in them and their sum behind.

    Args:
        axis: what stands below it.
        looks: of each piece by its name, in the order of the legend.
        most: what a sum can be, if that is to stand beside it.
    """
    names = list(dict.fromkeys(name for pieces in rows.values() for name in pieces))
    looks = looks or {name: {"color": COLOURS[i], "hatch": HATCHES[i]} for i, name in enumerate(names)}
    figure, ax = frame.one(0.9 + 0.55 * len(rows) + 0.25 * -(-len(looks) // 3), grid="x")
    longest = max(sum(pieces.values()) for pieces in rows.values())
    for row, (who, pieces) in enumerate(rows.items()):
        left = 0.0
        for name, size in ((name, size) for name, size in pieces.items() if size > 0):
            seen = name in ax.get_legend_handles_labels()[1]
            (bar,) = ax.barh(row, size, 0.68, left=left, linewidth=0.6, label=None if seen else name,
                             **{"edgecolor": "white", **looks[name]})  # fmt: skip
            frame.says(bar, [f"{who}: {name} {wording.number(size)} {unit}"])
            if size > NARROW * longest:
                ax.annotate(wording.number(size), (left + size / 2, row), ha="center", va="center", fontsize=7.5,
                            **ON_TOP)  # fmt: skip
            left += size
        text = wording.number(left) + (f" of {wording.number(most)}" if most else "")
        ax.annotate(text, (left, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    frame.name_rows(ax, [textwrap.fill(who, 26) for who in rows])
    ax.set_xlim(0, 1.15 * longest)
    ax.set_xlabel(axis, fontsize=9)
    frame.linear(ax.xaxis, 8)
    frame.legend(figure, [ax])
    return figure


def of_metrics(panel: PanelSpec, result: Result) -> Figure | None:
    """Metrics as the pieces of a bar for each variant and point; None where no variant has all of them anywhere."""
    info = result.info
    known = [part for part in panel.parts if part in info.metrics]
    rows: Rows = {}
    for point in info.points:
        for variant, label in info.variants.items():
            found = {part: list(result.table.values(variant, point, part).values()) for part in known}
            if found and all(found.values()):
                pieces = {info.metrics[part].label: max(0.0, stats.median(values)) for part, values in found.items()}
                rows[f"{label}, {wording.point(point)}"] = pieces
    metric = info.metrics[panel.metric]
    return draw(rows, metric.unit, frame.axis_label(metric, 60)) if rows else None


def memory_of(result: Result) -> Rows:
    """GiB by part, of every variant whose engine told its weights and its KV when it started."""
    found: Rows = {}
    for variant, label in result.info.variants.items():
        said = result.info.peers.get(variant, ({},))[-1]
        sizes = {part: sum(_gib(str(said[key])) for key in said if key.startswith(part)) for part in MEMORY}
        if sizes["weights"] and sizes["KV"]:
            found[label] = {part: size for part, size in sizes.items() if size}
    return found


def memory(result: Result) -> Figure:
    """What is left of the device is free, or work space: drawn, it would often dwarf the rest."""
    whole = result.info.provenance.device.get("gpu_memory_gib", 0.0)
    return draw(memory_of(result), "GiB", "GiB, of those that the device has", most=whole)


def _gib(told: str) -> float:
    found = _SIZE.findall(told)
    return sum(float(number.replace(",", "")) / (1 if unit == "GiB" else 1024) for number, unit in found)
