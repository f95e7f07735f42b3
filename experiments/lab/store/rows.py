"""One measured number, and the table of them; rows of any dataclass as CSV text, and values as their types again."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from statistics import median
from typing import Any, TypeVar, cast, get_args, get_origin

from mini_infer.core.config_checks import field_types

ABSENT = "absent: "  # begins the reason of a row whose peer is not there
NOT_SHOWN = "not shown: "  # begins the reason of a row whose sample does not support a value
Turn = tuple[int, int]  # process, repeat


@dataclass(frozen=True)
class Row:
    """`metric` of `variant` at `point` in one repeat. An invalid row is kept with its reason, and never counted."""

    variant: str
    point: str
    repeat: int
    process: int = field(default=0, kw_only=True)
    metric: str
    value: float
    unit: str
    valid: bool = True
    reason: str = ""

    @property
    def is_absent(self) -> bool:
        """Nobody tried to measure it, so nothing is wrong with it."""
        return self.reason.startswith(ABSENT)

    @property
    def is_fault(self) -> bool:
        """Something went wrong; else an invalid row tells of what is absent, or of too few samples."""
        return not self.valid and not self.reason.startswith((ABSENT, NOT_SHOWN))


class Table:
    """`absent` is (variant, point) of what nobody tried to measure. A simulator's repeats in one process are alike, and
    so have no interval: what they differ by on one seed says nothing of another."""

    def __init__(self, rows: Sequence[Row], simulated: bool = False) -> None:
        self.absent = {(row.variant, row.point) for row in rows if row.is_absent}
        self._values: dict[tuple[str, str, str], dict[Turn, float]] = {}
        for row in rows:
            if row.valid:
                turns = self._values.setdefault((row.variant, row.point, row.metric), {})
                turns[row.process, row.repeat] = row.value
        for turns in self._values.values() if simulated else ():
            if len({process for process, _ in turns}) == 1:
                turns.update(dict.fromkeys(turns, median(turns.values())))

    def values(self, variant: str, point: str, metric: str) -> dict[Turn, float]:
        """Valid values by process and repeat; stats.absolute and stats.ratio take them."""
        return self._values.get((variant, point, metric), {})


R = TypeVar("R")
DIGITS = 6  # significant; a clock's noise starts long before
JOIN = ";"  # between the names of a tuple
_OF_TEXT: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}


class OtherFormat(ValueError):
    """What is whole, and has fields that this version does not know."""


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def to_csv(cls: type, rows: Sequence[Any]) -> str:
    columns = [f.name for f in fields(cls)]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([columns, *([_cell(getattr(row, column)) for column in columns] for row in rows)])
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, tuple):
        return JOIN.join(value)
    return str(value).lower() if isinstance(value, bool) else value


def from_csv(cls: type[R], text: str) -> tuple[R, ...]:
    """Columns that have a default may be missing, as in files that are older than they are. Raises ValueError where
    the columns, or a cell, are not those of `cls`."""
    hints = field_types(cls)
    needed = {f.name for f in fields(cast(Any, cls)) if f.default is MISSING}
    columns, *rows = list(csv.reader(io.StringIO(text))) or [[]]
    if columns != [name for name in hints if name in columns] or not needed <= set(columns):
        raise ValueError(f"the columns must be {','.join(hints)}")
    parse = [converter(hints[name]) for name in columns]
    cells = ([of(cell) for of, cell in zip(parse, row, strict=True)] for row in rows)
    return tuple(cls(**dict(zip(columns, row, strict=True))) for row in cells)


@functools.cache
def converter(hint: Any) -> Callable[[Any], Any]:
    """Makes what JSON, YAML or a cell of a CSV holds a value of the type `hint`: dataclasses, enums, tuples and dicts,
    optionals. It raises ValueError, KeyError or TypeError where it cannot."""
    if is_dataclass(hint):
        return functools.partial(_made, cast(type, hint))
    if hint in _OF_TEXT:
        return lambda value: _OF_TEXT[hint](value) if isinstance(value, str) else value
    parts = [each for each in get_args(hint) if each not in (type(None), ...)]
    of = converter(parts[-1]) if parts else None
    if of and type(None) in get_args(hint):
        absent = (None, "") if parts[0] in _OF_TEXT else (None,)  # an empty cell of numbers
        return lambda value: None if value in absent else of(value)
    if of and get_origin(hint) is tuple:
        return lambda value: tuple(map(of, value.split(JOIN) if value and isinstance(value, str) else value))
    if of and get_origin(hint) is dict:
        return lambda value: {key: of(item) for key, item in value.items()}
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else lambda value: value


def _made(cls: type, values: Mapping[str, Any]) -> Any:
    hints = field_types(cls)
    if unknown := sorted(set(values) - set(hints)):
        raise OtherFormat(f"unknown fields {unknown}")
    return cls(**{name: converter(hints[name])(value) for name, value in values.items()})
