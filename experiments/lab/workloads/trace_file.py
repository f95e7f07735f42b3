"""A recorded trace, read and checked to its last line: what is measured must not depend on which lines were skipped.

Azure's traces are CSV with one request a line, times and lengths only (Patel et al., "Splitwise: Efficient Generative
LLM Inference Using Phase Splitting", ISCA 2024):

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Mooncake's are JSON lines with times in milliseconds, lengths, and a hash for every 512 tokens of the prompt. A hash
covers its block and all before it: prompts are equal as far as their ids are (Qin et al., "Mooncake: Trading More
Storage for Less Computation", FAST 2025):

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ..., 2353, 2354]}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mini_infer.core.errors import ConfigError

MOST_TOKENS = 10**9  # beyond any model: a slip of the pen
WHERE = "docs/workloads.md says where to get a trace and what it must look like"
TIME, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # of Azure
# Seven digits of a second, which Python 3.10 does not read by itself; later traces add an offset from UTC.
MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")  # of Mooncake
HASH_BLOCK = 512  # tokens
LATEST_MS = 10**15  # what a float holds to the tenth of a millisecond
Numbered = Iterator[tuple[int, Any]]  # lines of a file, or records, from 1 on


@dataclass(frozen=True)
class Record:
    time_s: float  # when the request arrived; only differences matter
    prompt_tokens: int
    output_tokens: int
    # One id for each HASH_BLOCK tokens of the prompt, the last block partly filled. Prompts share their beginning as
    # far as their ids are the same. Empty: nothing is known to be shared.
    prefix_ids: tuple[int, ...] = ()


class BrokenLine(Exception):
    """Its number, and what is wrong with it."""


@dataclass(frozen=True)
class TraceFile:
    name: str  # of the file, without its folder
    format: str  # a key of PARSERS
    sha256: str
    records: tuple[Record, ...]  # in order of time
    lines: tuple[int, ...]  # of the file, that they stand on, from 1 on


def require(path: str) -> Path:
    """Raises ConfigError where none is named, or there is none."""
    if not path:
        raise ConfigError(f"workload.path is empty: name a trace file, workload.path=<file>. {WHERE}")
    file = Path(path).expanduser()
    if not file.exists():
        raise ConfigError(f"workload.path={path} cannot be read: No such file or directory. {WHERE}")
    return file


def read(path: str) -> TraceFile:
    """Raises ConfigError where the file is missing, empty or broken; a broken line is named by its number, from 1.

    Blank lines are passed over. A line that is earlier than the one before is refused rather than sorted: it is the
    mark of a file that was put together wrongly."""
    file = require(path)
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
    format = _detect(path, lines[0][1])
    try:
        numbered = tuple(_checked(PARSERS[format](iter(lines))))
    except BrokenLine as broken:
        line, reason = broken.args
        raise ConfigError(
            f"{path}, line {line}: {reason}. Mend the file; no line is passed over in silence"
        ) from broken
    if not numbered:
        raise ConfigError(f"workload.path={path} has a header and no requests. {WHERE}")
    numbers, records = zip(*numbered, strict=True)
    return TraceFile(file.name, format, hashlib.sha256(data).hexdigest(), records, numbers)


def _detect(path: str, first: str) -> str:
    if first.startswith("{"):
        return "mooncake"
    if any(column in first for column in COLUMNS):
        return "azure"
    raise ConfigError(
        f"workload.path={path} is no trace that is known here. Its first line is {first[:80]!r}; an Azure trace begins "
        f"with the columns {','.join(COLUMNS)}, a Mooncake trace is JSON lines with {', '.join(FIELDS)}"
    )


def _checked(records: Numbered) -> Numbered:
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
        yield number, record


def azure(lines: Numbered) -> Numbered:
    """Records. Columns may stand in any order, and others beside them. Raises BrokenLine."""
    number, line = next(lines)
    header = [cell.strip() for cell in line.split(",")]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise BrokenLine(number, f"the columns are {','.join(header)}; {', '.join(missing)} missing")
    for number, line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(header):
            raise BrokenLine(number, f"it has {len(cells)} of {len(header)} columns: {line[:60]!r}")
        row = dict(zip(header, cells, strict=True))
        yield number, Record(_time(number, row[TIME]), _int(number, PROMPT, row), _int(number, OUTPUT, row))


def _int(number: int, column: str, row: dict[str, str]) -> int:
    if not INTEGER.fullmatch(row[column]):
        raise BrokenLine(number, f"{column} must be a whole number, got {row[column]!r}")
    return int(row[column])


def _time(number: int, text: str) -> float:
    match = MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        seconds, fraction, offset = match.groups()
        zone = "+00:00" if offset in (None, "Z") else offset
        moment = datetime.strptime(seconds.replace("T", " ") + zone, "%Y-%m-%d %H:%M:%S%z")
    except ValueError:
        raise BrokenLine(number, f"{TIME} must look like 2023-11-16 18:15:46.6805900, got {text!r}") from None
    epoch = datetime(2000, 1, 1, tzinfo=timezone.utc)  # near enough for a float to keep all seven digits
    return (moment - epoch).total_seconds() + float(fraction or 0)


def mooncake(lines: Numbered) -> Numbered:
    """Records. Raises BrokenLine."""
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise BrokenLine(number, f"it is no JSON, or cut short: ...{line[-60:]!r}") from None
        if not isinstance(row, dict):
            raise BrokenLine(number, f"it must be an object with {', '.join(FIELDS)}, got {line[:60]!r}")
        missing = [name for name in FIELDS if name not in row]
        if missing:
            raise BrokenLine(number, f"{', '.join(missing)} missing; it has {', '.join(row)}")
        yield number, _record(number, *(row[name] for name in FIELDS))


def _record(number: int, timestamp: Any, prompt: Any, output: Any, ids: Any) -> Record:
    is_number = isinstance(timestamp, (int, float)) and not isinstance(timestamp, bool)
    if not is_number or not abs(timestamp) < LATEST_MS:
        raise BrokenLine(number, f"timestamp must be milliseconds, got {timestamp!r}")
    for name, value in (("input_length", prompt), ("output_length", output)):
        if not _is_int(value):
            raise BrokenLine(number, f"{name} must be a whole number, got {value!r}")
    if not isinstance(ids, list) or not all(_is_int(value) for value in ids):
        raise BrokenLine(number, f"hash_ids must be a list of whole numbers, got {str(ids)[:60]}")
    blocks = -(-prompt // HASH_BLOCK)
    if prompt > 0 and len(ids) != blocks:
        raise BrokenLine(
            number, f"input_length={prompt} makes {blocks} blocks of {HASH_BLOCK} tokens, but hash_ids holds {len(ids)}"
        )
    return Record(timestamp / 1e3, prompt, output, tuple(ids))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


PARSERS = {"azure": azure, "mooncake": mooncake}
