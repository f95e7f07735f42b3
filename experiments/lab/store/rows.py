"""One measured number, and the table of them; rows of any dataclass as CSV text, and dataclasses of plain values."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec

from mini_infer.core.config_checks import field_types

ABSENT = "absent: "  # begins the reason of a row whose peer is not there
NOT_SHOWN = "not shown: "  # begins the reason of a row whose sample does not support a value
BURST = "what counts of the requests has come within "  # goes on behind it, of a pass too short for a rate
LATE = (  # a note: in how many passes, and up to how much of one
    "In {} passes the host read the end of some steps late, so that the steps after them look shorter than they were: "
    "up to {} % of a pass's steps."
)
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
    def is_burst(self) -> bool:
        """Its pass was too short to show a rate."""
        return self.reason.startswith(NOT_SHOWN + BURST)

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
    the columns, or msgspec.ValidationError where a cell, are not those of `cls`."""
    hints = field_types(cls)
    needed = {f.name for f in fields(cast(Any, cls)) if f.default is MISSING}
    columns, *rows = list(csv.reader(io.StringIO(text))) or [[]]
    if columns != [name for name in hints if name in columns] or not needed <= set(columns):
        raise ValueError(f"the columns must be {','.join(hints)}")
    joined = {name for name in columns if get_origin(hints[name]) is tuple}
    optional = {name for name in columns if type(None) in get_args(hints[name])}  # numbers, whose cell may be empty

    def value(name: str, cell: str) -> Any:
        if name in joined:
            return cell.split(JOIN) if cell else ()
        return cell if cell or name not in optional else None

    found = [{name: value(name, cell) for name, cell in zip(columns, row, strict=True)} for row in rows]
    return msgspec.convert(found, tuple[cls, ...], strict=False)  # type: ignore[valid-type]


def from_plain(cls: type[R], document: Any) -> R:
    """A dataclass of what JSON or YAML holds. Raises ValueError where a value is of another type, or of no field, which
    msgspec passes over."""
    try:
        made = msgspec.convert(document, cls, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    _require_fields(made, document)
    return made


def _require_fields(made: Any, document: Any) -> None:
    if is_dataclass(made):
        if unknown := sorted(document.keys() - {f.name for f in fields(made)}):
            raise OtherFormat(f"unknown fields {unknown}")
        made = {key: getattr(made, key) for key in document}
    values = (made.values(), document.values()) if isinstance(made, dict) else (made, document)
    for pair in zip(*values, strict=True) if isinstance(made, (dict, tuple)) else ():
        _require_fields(*pair)
