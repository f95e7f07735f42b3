"""Rows of one dataclass as CSV text, and back."""

from __future__ import annotations

import csv
import io
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from mini_infer.core.config_checks import field_types

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
