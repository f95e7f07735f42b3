"""What settings may be, said by the types of their fields: `count: Count = 16`."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    words: str
    fits: Callable[[float], bool]


def _at_least(bound: int) -> Rule:
    return Rule(f"at least {bound}", lambda value: bound <= value < math.inf)


_ABOVE_ZERO = Rule("above 0", lambda value: 0 < value < math.inf)
Natural = Annotated[int, _at_least(0)]
Count = Annotated[int, _at_least(1)]
Several = Annotated[int, _at_least(2)]
FromZero = Annotated[float, _at_least(0)]
FromOne = Annotated[float, _at_least(1)]
Positive = Annotated[float, _ABOVE_ZERO]
Share = Annotated[float, Rule("a share, from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[Share, _ABOVE_ZERO]


@dataclass(frozen=True)
class Checked:
    """A section of the config. None was not given, and passes. Of a list each value is checked, and there must be one.
    Where a field is called max_x, and another one min_x, that one must not be larger."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        for name, rule in ((name, rule) for name, hint in _hints(type(self)).items() for rule in _within(hint)):
            value = getattr(self, name)
            several = isinstance(value, (list, tuple))
            values = value if several else [] if value is None else [value]
            if (several and not values) or not all(map(rule.fits, values)):
                each = "a list of numbers, each " if several else ""
                got = list(value) if several else value
                raise ConfigError(f"{self.section}.{name} must be {each}{rule.words}, got {got}")
            low = "min_" + name.removeprefix("max_") if name.startswith("max_") else ""
            least = getattr(self, low, None) if value is not None else None
            if least is not None and value < least:
                raise ConfigError(f"{self.section}.{name}={value} is below {self.section}.{low}={least}")


_hints: Callable[[Any], dict[str, Any]] = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def _within(hint: Any) -> Iterator[Rule]:
    if isinstance(hint, Rule):
        yield hint
    for part in typing.get_args(hint):
        yield from _within(part)
