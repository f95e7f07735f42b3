"""A recorded trace, read and checked to its last line: what is measured must not depend on which lines were skipped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from experiments.lab.workloads import azure, mooncake
from experiments.lab.workloads.records import BrokenLine, Record
from mini_infer.core.errors import ConfigError


class TraceFormat(str, Enum):
    auto = "auto"  # by the file's first line
    azure = "azure"  # CSV: TIMESTAMP,ContextTokens,GeneratedTokens
    mooncake = "mooncake"  # JSON lines: timestamp, input_length, output_length, hash_ids


MOST_TOKENS = 10**9  # beyond any model: a slip of the pen
PARSERS = {TraceFormat.azure: azure.parse, TraceFormat.mooncake: mooncake.parse}
WHERE = "docs/workloads.md says where to get a trace and what it must look like"


@dataclass(frozen=True)
class TraceFile:
    name: str  # of the file, without its folder
    format: TraceFormat
    sha256: str
    records: tuple[Record, ...]  # in order of time


def read(path: str, format: TraceFormat = TraceFormat.auto) -> TraceFile:
    """Raises ConfigError where the file is missing, empty or broken; a broken line is named by its number, from 1.

    Blank lines are passed over. A line that is earlier than the one before is refused rather than sorted: it is the
    mark of a file that was put together wrongly."""
    if not path:
        raise ConfigError(f"workload.path is empty: name a trace file, workload.path=<file>. {WHERE}")
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"workload.path={path} cannot be read: {error.strerror}. {WHERE}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: it is no UTF-8 text. Is the file still compressed? {WHERE}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"workload.path={path} is empty. {WHERE}")
    if format is TraceFormat.auto:
        format = _detect(path, lines[0][1])
    try:
        records = tuple(_checked(PARSERS[format](iter(lines))))
    except BrokenLine as broken:
        raise ConfigError(
            f"{path}, line {broken.line}: {broken.reason}. Mend the file; no line is passed over in silence"
        ) from broken
    if not records:
        raise ConfigError(f"workload.path={path} has a header and no requests. {WHERE}")
    return TraceFile(file.name, format, hashlib.sha256(data).hexdigest(), records)


def _detect(path: str, first: str) -> TraceFormat:
    if first.startswith("{"):
        return TraceFormat.mooncake
    if any(column in first for column in azure.COLUMNS):
        return TraceFormat.azure
    raise ConfigError(
        f"workload.path={path} is no trace that is known here. Its first line is {first[:80]!r}; an Azure trace begins "
        f"with the columns {','.join(azure.COLUMNS)}, a Mooncake trace is JSON lines with {', '.join(mooncake.FIELDS)}"
    )


def _checked(records: Iterable[tuple[int, Record]]) -> Iterator[Record]:
    before: float | None = None
    for number, record in records:
        for what, tokens in (("prompt", record.prompt_tokens), ("output", record.output_tokens)):
            if not 1 <= tokens <= MOST_TOKENS:
                raise BrokenLine(number, f"a request has 1 to {MOST_TOKENS:,} {what} tokens, this one has {tokens}")
        if before is not None and record.time_s < before:
            raise BrokenLine(
                number, f"it is {before - record.time_s:.3f} s earlier than the line before it: sort the file by time"
            )
        before = record.time_s
        yield record
