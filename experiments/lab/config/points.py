"""Points: the settings at which all variants are measured inside one run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class Point:
    """`values` maps dotted config keys to settings; `name` is how tables and figures call the point; `labels` are the
    names that it was given on axes of named settings."""

    name: str
    values: Mapping[str, Any]
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Point:
        names = short_names(list(values))
        return cls(" ".join(f"{names[key]}={value}" for key, value in values.items()), dict(values))


def grid(axes: Mapping[str, Any]) -> list[Point]:
    """Every combination of the axes' values, the last axis fastest. No axes: one point without a name.

    An axis is a dotted key with a list of its values. Where several settings change together it is any word, with a
    name for each bundle of settings:

        workload.count: [1, 8]
        load: {short: {workload.prompt_tokens: 128}, long: {workload.prompt_tokens: 4096, workload.output_tokens: 8}}
    """
    names, choices = short_names([key for key, values in axes.items() if not isinstance(values, Mapping)]), []
    for key, values in axes.items():
        if isinstance(values, Mapping) and values and all(isinstance(bundle, Mapping) for bundle in values.values()):
            choices.append([Point(name, bundle, {key: name}) for name, bundle in values.items()])
        elif isinstance(values, (str, Mapping)) or not isinstance(values, Sequence) or not values:
            got = f"got {list(values) if isinstance(values, tuple) else values} (or names with their settings)"
            raise ConfigError(f"experiment.points[{key}] must be a list of values, {got}")
        else:
            choices.append([Point(f"{names[key]}={value}", {key: value}) for value in values])
    return [
        Point(
            " ".join(part.name for part in parts),
            {key: value for part in parts for key, value in part.values.items()},
            {key: label for part in parts for key, label in part.labels.items()},
        )
        for parts in itertools.product(*choices)
    ]


def shown(values: Any) -> str:
    """As a command line would have it, without brackets."""
    return ",".join(map(str, values)) if isinstance(values, (list, tuple, Mapping)) else str(values)


def flat(values: Mapping[Any, Any], inside: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{inside}{key}.") if nested else {f"{inside}{key}": value}
    return found


def keys(section: str, names: str) -> tuple[str, ...]:
    """Dotted keys of settings in a section, by their names with spaces between."""
    return tuple(f"{section}.{name}" for name in names.split())


def within(key: str, parts: Sequence[str]) -> bool:
    """Whether a dotted key is one of these, or in such a section."""
    return any(key == part or key.startswith(f"{part}.") for part in parts)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key's last part, behind the variant or claim that has it; the whole key where two look the same."""
    last = [re.sub(r"^(experiment\.((?:variants|claims)\.[^.]+\.))?.*?([^.]+)$", r"\2\3", key) for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def fitting(points: Sequence[Point], at: Mapping[str, Any]) -> list[Point]:
    wanted = at.items()
    return [p for p in points if all(item in (*p.values.items(), *p.labels.items()) for item in wanted)]


def find_point(points: Sequence[Point], at: Mapping[str, Any], where: str) -> Point:
    """The one point that has all values of `at`."""
    found = fitting(points, at)
    if len(found) == 1:
        return found[0]
    names = ", ".join(p.name or "(the only point)" for p in points)
    problem = "names no measured point" if not found else f"fits {len(found)} points: give more keys"
    raise ConfigError(f"{where}={dict(at)} {problem}. Measured: {names}. Change the claim, or drop it from the list")
