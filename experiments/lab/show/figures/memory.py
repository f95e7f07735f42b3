"""Where the memory of the device goes: weights, KV blocks, captured graphs and the rest, as each engine says when it
starts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.style import COLOURS, HATCHES, ON_TOP
from experiments.lab.store.result import Result

PARTS = {"weights": ("weights",), "KV": ("KV",), "CUDA graphs": ("CUDA graphs", "CUDA graphs of steps with prompts")}
FREE = "free, or work space"
_SIZE = re.compile(r"([\d,.]+) (GiB|MiB)")
NARROW = 0.05  # of the axis: a smaller piece has no room for its number


def of(result: Result) -> dict[str, dict[str, float]]:
    """Variant -> GiB by part, of every variant that tells its weights and its KV; and what the device has beyond them,
    where its size is known."""
    found = {}
    for variant, starts in result.info.peers.items():
        sizes = {part: _gib(starts[-1], keys) for part, keys in PARTS.items()} if starts else {}
        if sizes.get("weights") and sizes.get("KV"):
            found[variant] = {part: size for part, size in sizes.items() if size}
    total = result.info.provenance.device.get("gpu_memory_gib")
    if total:
        for sizes in found.values():
            sizes[FREE] = max(0.0, total - sum(sizes.values()))
    return found


def draw(result: Result) -> Figure:
    found = of(result)
    with frame.default_style():
        figure = frame.new(frame.WIDTH, 1.2 + 0.5 * len(found))
        ax = figure.subplots()
        frame.tidy(ax, "x")
        widest = max(sum(sizes.values()) for sizes in found.values())
        for row, (variant, sizes) in enumerate(found.items()):
            left = 0.0
            for index, part in enumerate([*PARTS, FREE]):
                size = sizes.get(part, 0.0)
                style: dict[str, Any]
                style = {"color": "#eeeeee"} if part == FREE else {"color": COLOURS[index], "hatch": HATCHES[index]}
                (bar,) = ax.barh(row, size, 0.7, left=left, edgecolor="white", linewidth=0.6,
                                 label=part if row == 0 else None, **style)  # fmt: skip
                frame.says(bar, [f"{result.info.variants[variant]}: {part} {wording.number(size)} GiB"])
                if size > NARROW * widest:
                    middle = (left + size / 2, row)
                    ax.annotate(wording.number(size), middle, ha="center", va="center", fontsize=8, **ON_TOP)
                left += size
        ax.set_yticks(range(len(found)), [textwrap.fill(result.info.variants[v], 26) for v in found])
        ax.set_ylim(len(found) - 0.4, -0.6)
        frame.linear(ax.xaxis, 8)
        ax.set_xlabel("GiB on the device", fontsize=9)
        frame.legend(figure, [ax])
        return figure


def _gib(facts: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    total = 0.0
    for key in keys:
        for number, unit in _SIZE.findall(str(facts.get(key, ""))):
            total += float(number.replace(",", "")) / (1 if unit == "GiB" else 1024)
    return total
