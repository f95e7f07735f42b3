"""Points: the settings at which all variants are measured inside one run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class Point:
    """`values` maps dotted config keys to settings; `name` is how tables and figures call the point."""

    name: str
    values: Mapping[str, Any]


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the axes' values, the last axis fastest. No axes: one point without a name."""
    for key, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"experiment.points[{key}] must be a list of values, got {_shown(values)}")
    names = short_names(list(axes))
    return [point(dict(zip(axes, values, strict=True)), names) for values in itertools.product(*axes.values())]


def point(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Point:
    names = names or short_names(list(values))
    return Point(" ".join(f"{names[key]}={value}" for key, value in values.items()), dict(values))


def _shown(values: Any) -> Any:
    return list(values) if isinstance(values, tuple) else values


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted key, or the whole key where two would look the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def find_point(points: Sequence[Point], at: Mapping[str, Any], where: str) -> Point:
    """The one point that has all values of `at`."""
    found = [p for p in points if all(key in p.values and p.values[key] == value for key, value in at.items())]
    if len(found) == 1:
        return found[0]
    names = ", ".join(p.name or "(the only point)" for p in points)
    problem = "names no measured point" if not found else f"fits {len(found)} points: give more keys"
    raise ConfigError(f"{where}={dict(at)} {problem}. Measured: {names}. Change the claim, or drop it from the list")
