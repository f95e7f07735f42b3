"""Checks of settings. None was not given, and passes. Of a list each value is checked, and there must be one."""

from __future__ import annotations

import math
from collections.abc import Callable

from mini_infer.core.errors import ConfigError


def at_least(section: str, settings: object, bound: float, *names: str) -> None:
    _each(section, settings, names, lambda value: bound <= value < math.inf, f"at least {bound}")


def above_zero(section: str, settings: object, *names: str) -> None:
    _each(section, settings, names, lambda value: 0 < value < math.inf, "above 0")


def share(section: str, settings: object, *names: str) -> None:
    _each(section, settings, names, lambda value: 0 <= value <= 1, "a share, from 0 to 1")


def ordered(section: str, settings: object, low: str, high: str) -> None:
    least, most = getattr(settings, low), getattr(settings, high)
    if most < least:
        raise ConfigError(f"{section}.{high}={most} is below {section}.{low}={least}")


def _each(section: str, settings: object, names: tuple[str, ...], fits: Callable[[float], bool], rule: str) -> None:
    for name in names:
        value = getattr(settings, name)
        several = isinstance(value, (list, tuple))
        values = value if several else [] if value is None else [value]
        if (several and not values) or not all(map(fits, values)):
            each = "a list of numbers, each " if several else ""
            raise ConfigError(f"{section}.{name} must be {each}{rule}, got {list(value) if several else value}")
