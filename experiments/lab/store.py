"""The result store: `<run>.csv` with the numbers and `<run>.json` with all that is needed to understand them.

    results/<experiment>/<hardware>/<run>.csv    one row per (variant, point, repeat, metric)
                                    <run>.json   config, command, commit, versions, device, gates, claims, ...

The JSON names the CSV's row count and SHA-256, so a file that was cut short or edited is found out. Both are written
beside their place and renamed into it; numbers are rounded once, when written, so rewriting changes no byte.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from experiments.lab.claims import Claim
from experiments.lab.gate import Gate
from experiments.lab.metrics import Metric
from experiments.lab.rows import Row
from experiments.lab.spec import PlotSpec
from mini_infer.core.errors import MiniInferError

FORMAT = 1
COLUMNS = [f.name for f in fields(Row)]
DIGITS = 6  # significant; a clock's noise starts long before


class StoreError(MiniInferError, ValueError):
    """A result file that cannot be read or written."""


@dataclass(frozen=True)
class Sample:
    """A real prompt and the text that some variants, alike, generated for it."""

    variants: tuple[str, ...]
    prompt: str
    text: str


@dataclass(frozen=True)
class Provenance:
    """Where a result comes from."""

    command: str
    started: str  # ISO 8601, UTC
    seconds: float
    commit: str | None  # None outside a git repository, or before its first commit
    clean: bool | None  # whether the tree equalled the commit, results/ and reports/ aside
    versions: dict[str, str]
    device: dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """Everything about a run that is not a number in its CSV. Lists are in the order of the report."""

    experiment: str
    hardware: str
    run: str  # "default", or what was overridden
    title: str
    question: str
    method: str
    baseline: str | None
    variants: dict[str, str]  # name -> label
    points: dict[str, dict[str, Any]]  # name -> settings
    metrics: dict[str, Metric]
    claims: tuple[Claim, ...]
    gates: tuple[Gate, ...]
    samples: tuple[Sample, ...]
    plots: tuple[PlotSpec, ...]
    code: tuple[str, ...]
    limits: tuple[str, ...]
    provenance: Provenance
    config: dict[str, Any]


@dataclass(frozen=True)
class Result:
    info: RunInfo
    rows: tuple[Row, ...]


def run_name(overrides: Sequence[str]) -> str:
    """`default`, or the overrides made safe for a file name; different overrides never share a name."""
    if not overrides:
        return "default"
    text = ",".join(sorted(overrides))
    safe = re.sub(r"[^A-Za-z0-9_.=,+-]+", "_", text)
    if safe == text and len(safe) <= 120 and not safe.startswith("."):
        return safe
    return f"{safe[:100].lstrip('.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def write(root: Path, result: Result) -> Path:
    """Replaces the run's two files and returns the JSON's path."""
    info = result.info
    folder = root / info.experiment / info.hardware
    table = _csv(result.rows)
    document = {
        "format": FORMAT,
        "csv": {"rows": len(result.rows), "sha256": _sha256(table)},
        **_jsonable(info),
    }
    path = folder / f"{info.run}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path.with_suffix(".csv"), table)
        write_atomic(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise StoreError(f"the results of {info.experiment} cannot be written to {folder}: {error}") from error
    return path


def write_atomic(path: Path, data: str | bytes) -> None:
    """A reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Result:
    """Reads `<run>.json` and the CSV beside it. Raises StoreError where either is damaged or of another version."""
    again = "run the experiment again, or restore both files"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise StoreError(f"{path} is cut short or damaged ({error}): {again}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise StoreError(f"{path} has format {found!r}; this version reads format {FORMAT}. {again.capitalize()}")
    table = path.with_suffix(".csv")
    try:
        text = table.read_text(encoding="utf-8")  # universal newlines: a checkout may have changed them
    except OSError as error:
        raise StoreError(f"{table} cannot be read: {error}") from error
    try:
        stated = document.pop("csv")
        del document["format"]
        if _sha256(text) != stated["sha256"]:
            lines = max(text.count("\n") - 1, 0)
            raise StoreError(f"{table} is not the one that {path.name} was written with: it has {lines} of "
                             f"{stated['rows']} rows, or other ones; {again}")  # fmt: skip
        return Result(_from_json(RunInfo, document), _rows(text))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} is not a result file ({error!r}): {again}") from error


def read_all(root: Path) -> list[Result]:
    """Every result under `root`: experiments and hardware by name, each one's default run first."""
    results = [read(path) for path in root.glob("*/*/*.json")]
    key = lambda r: (r.info.experiment, r.info.hardware, r.info.run != "default", r.info.run)  # noqa: E731
    return sorted(results, key=key)


def _csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, column)) for column in COLUMNS])
    return buffer.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _rows(text: str) -> tuple[Row, ...]:
    reader = csv.reader(io.StringIO(text))
    if next(reader, None) != COLUMNS:
        raise ValueError(f"the CSV's columns must be {','.join(COLUMNS)}")
    return tuple(Row(v, p, int(r), m, float(x), u, valid == "true", why) for v, p, r, m, x, u, valid, why in reader)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _from_json(hint: Any, value: Any) -> Any:
    """`value` as the type `hint`: dataclasses, enums, tuples and dicts of them, optionals."""
    if is_dataclass(hint):
        cls = typing.cast(type, hint)
        hints = typing.get_type_hints(cls)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"unknown fields {unknown}")
        return cls(**{name: _from_json(hints[name], item) for name, item in value.items()})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(_from_json(arguments[0], item) for item in value)
    if typing.get_origin(hint) is dict:
        return {key: _from_json(arguments[1], item) for key, item in value.items()}
    if type(None) in arguments:
        return None if value is None else _from_json(arguments[0], value)
    return value
