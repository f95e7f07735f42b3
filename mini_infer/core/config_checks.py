"""What every section of the config is checked by: its fields' types, and bounds."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

from mini_infer.core.errors import ConfigError

# Field of a dataclass -> its type. Annotations are evaluated once: for a whole tree that takes milliseconds.
field_types: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def coerce(config: Any) -> None:
    """Checks each field against its annotation, turning strings into enum members and ints into floats."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        options = list(typing.get_args(hint)) or [hint]
        if typing.get_origin(hint) is dict:
            options = [dict]
        if value is None and type(None) in options:
            continue
        target = next((t for t in options if t is not type(None)), hint)
        target = typing.get_origin(target) or target
        if issubclass(target, Enum):
            try:
                object.__setattr__(config, name, target(value))
            except ValueError:
                allowed = ", ".join(member.value for member in target)
                raise ConfigError(f"{setting_key(config, name)} must be one of {allowed}; got {value!r}") from None
        elif target is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, name, float(value))
        elif not isinstance(value, target) or (target is int and isinstance(value, bool)):
            raise ConfigError(f"{setting_key(config, name)} must be {target.__name__}, got {value!r}")


def setting_key(config: Any, name: str) -> str:
    """The dotted key as it is typed: CacheConfig, block_size -> cache.block_size."""
    section = type(config).__name__.removesuffix("Config").lower()
    if section == "draft":
        section = "speculation.draft"
    return name if section == "engine" else f"{section}.{name}"


def at_least(config: Any, minimum: float, *names: str) -> None:
    """Of settings that are given."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{setting_key(config, name)} must be at least {minimum}, got {value}")
