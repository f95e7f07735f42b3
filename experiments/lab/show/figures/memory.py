"""Where the memory of the device goes: weights, KV blocks, captured graphs and the rest, as each engine says when it
starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.show.figures.frame import COLOURS, HATCHES, stacks
from experiments.lab.store.result import Result

PARTS = {"weights": ("weights",), "KV": ("KV",), "CUDA graphs": ("CUDA graphs", "CUDA graphs of steps with prompts")}
FREE = "free, or work space"
_SIZE = re.compile(r"([\d,.]+) (GiB|MiB)")


def of(result: Result) -> dict[str, dict[str, float]]:
    """Variant -> GiB by part, of every variant that tells its weights and its KV; and what the device has beyond them,
    where its size is known."""
    found = {}
    for variant in result.info.variants:
        starts = result.info.peers.get(variant)
        sizes = {part: _gib(starts[-1], keys) for part, keys in PARTS.items()} if starts else {}
        if sizes.get("weights") and sizes.get("KV"):
            found[variant] = {part: size for part, size in sizes.items() if size}
    total = result.info.provenance.device.get("gpu_memory_gib")
    if total:
        for sizes in found.values():
            sizes[FREE] = max(0.0, total - sum(sizes.values()))
    return found


def draw(result: Result) -> Figure:
    looks = {part: {"color": COLOURS[i], "hatch": HATCHES[i]} for i, part in enumerate(PARTS)}
    looks[FREE] = {"color": "#eeeeee"}
    figure = stacks({result.info.variants[v]: sizes for v, sizes in of(result).items()}, looks, "GiB")
    figure.axes[0].set_xlabel("GiB on the device", fontsize=9)
    return figure


def _gib(facts: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    total = 0.0
    for key in keys:
        for number, unit in _SIZE.findall(str(facts.get(key, ""))):
            total += float(number.replace(",", "")) / (1 if unit == "GiB" else 1024)
    return total
