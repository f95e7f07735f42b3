"""Rows of one dataclass as CSV text, and back."""

from __future__ import annotations

import csv
import io
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

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
    """Raises ValueError where the columns, or a cell, are not those of `cls`."""
    hints = typing.get_type_hints(cls)
    parsers = [_parser(hint) for hint in hints.values()]
    reader = csv.reader(io.StringIO(text))
    if next(reader, None) != list(hints):
        raise ValueError(f"the columns must be {','.join(hints)}")
    return tuple(cls(*(parse(cell) for parse, cell in zip(parsers, row, strict=True))) for row in reader)


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
