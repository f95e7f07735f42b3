"""One measured number, and the table of them; and rows of any dataclass as CSV text, and back."""

from __future__ import annotations

import csv
import io
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

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
    """`absent` is (variant, point) of what nobody tried to measure."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.absent = {(row.variant, row.point) for row in rows if row.is_absent}
        self._values: dict[tuple[str, str, str], dict[Turn, float]] = {}
        for row in rows:
            if row.valid:
                turns = self._values.setdefault((row.variant, row.point, row.metric), {})
                turns[row.process, row.repeat] = row.value

    def values(self, variant: str, point: str, metric: str) -> dict[Turn, float]:
        """Valid values by process and repeat; stats.absolute and stats.ratio take them."""
        return self._values.get((variant, point, metric), {})


R = TypeVar("R")

DIGITS = 6  # significant; a clock's noise starts long before
JOIN = ";"  # between the names of a tuple


def to_csv(cls: type, rows: Sequence[Any]) -> str:
    columns = [f.name for f in fields(cls)]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(getattr(row, column)) for column in columns])
    return buffer.getvalue()


def from_csv(cls: type[R], text: str) -> tuple[R, ...]:
    """Columns that have a default may be missing, as in files that are older than they are. Raises ValueError where
    the columns, or a cell, are not those of `cls`."""
    hints = field_types(cls)
    needed = {f.name for f in fields(typing.cast(Any, cls)) if f.default is MISSING}
    reader = csv.reader(io.StringIO(text))
    columns = next(reader, [])
    if columns != [name for name in hints if name in columns] or not needed <= set(columns):
        raise ValueError(f"the columns must be {','.join(hints)}")
    parsers = [(name, _parser(hints[name])) for name in columns]
    return tuple(cls(**{name: parse(cell) for (name, parse), cell in zip(parsers, row, strict=True)}) for row in reader)


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return JOIN.join(value)
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _parser(hint: Any) -> Callable[[str], Any]:
    if hint is bool:
        return lambda cell: {"true": True, "false": False}[cell]
    if hint in (int, float, str):
        return typing.cast("Callable[[str], Any]", hint)
    if typing.get_origin(hint) is tuple:
        return lambda cell: tuple(cell.split(JOIN)) if cell else ()
    (inner,) = (_parser(a) for a in typing.get_args(hint) if a is not type(None))  # an optional
    return lambda cell: inner(cell) if cell else None
