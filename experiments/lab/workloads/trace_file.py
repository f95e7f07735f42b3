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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

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


@dataclass(frozen=True)
class Record:
    time_s: float  # when the request arrived; only differences matter
    prompt_tokens: int
    output_tokens: int
    # One id for each HASH_BLOCK tokens of the prompt, the last block partly filled. Prompts share their beginning as
    # far as their ids are the same. Empty: nothing is known to be shared.
    prefix_ids: tuple[int, ...] = ()


class BrokenLine(Exception):
    """What is wrong with it."""


@dataclass(frozen=True)
class TraceFile:
    name: str  # of the file, without its folder
    format: str  # azure, or mooncake
    sha256: str
    records: tuple[Record, ...]  # in order of time
    lines: tuple[int, ...]  # of the file, that they stand on, from 1 on


def read(path: str) -> TraceFile:
    """Raises ConfigError where no file is named, or it is missing, empty or broken; a broken line is named by its
    number, from 1.

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
    first, header = lines[0]
    format, records, numbers = _detect(path, header), list[Record](), list[int]()
    try:
        parse, body = (_mooncake, lines) if format == "mooncake" else (_azure(header), lines[1:])
        for number, told in body:
            numbers.append(number)
            records.append(parse(told))
            _check(*records[-2:])
    except BrokenLine as broken:
        at = numbers[-1] if numbers else first
        raise ConfigError(f"{path}, line {at}: {broken}. Mend the file; no line is passed over in silence") from broken
    if not records:
        raise ConfigError(f"workload.path={path} has a header and no requests. {WHERE}")
    return TraceFile(file.name, format, hashlib.sha256(data).hexdigest(), tuple(records), tuple(numbers))


def _detect(path: str, first: str) -> str:
    if first.startswith("{"):
        return "mooncake"
    if any(column in first for column in COLUMNS):
        return "azure"
    raise ConfigError(
        f"workload.path={path} is no trace that is known here. Its first line is {first[:80]!r}; an Azure trace begins "
        f"with the columns {','.join(COLUMNS)}, a Mooncake trace is JSON lines with {', '.join(FIELDS)}"
    )


def _check(*last: Record) -> None:
    """The newest record, behind the one before it."""
    newest = last[-1]
    for what, tokens in (("prompt", newest.prompt_tokens), ("output", newest.output_tokens)):
        if not 1 <= tokens <= MOST_TOKENS:
            raise BrokenLine(f"a request has 1 to {MOST_TOKENS:,} {what} tokens, this one has {tokens}")
    if (earlier := last[0].time_s - newest.time_s) > 0:
        raise BrokenLine(f"it is {earlier:.3f} s earlier than the line before it: sort the file by time")


def _azure(header: str) -> Callable[[str], Record]:
    """Columns may stand in any order, and others beside them."""
    columns = [cell.strip() for cell in header.split(",")]
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise BrokenLine(f"the columns are {','.join(columns)}; {', '.join(missing)} missing")

    def parse(line: str) -> Record:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(columns):
            raise BrokenLine(f"it has {len(cells)} of {len(columns)} columns: {line[:60]!r}")
        row = dict(zip(columns, cells, strict=True))
        time_s = _time(row[TIME])
        for column in (PROMPT, OUTPUT):
            if not INTEGER.fullmatch(row[column]):
                raise BrokenLine(f"{column} must be a whole number, got {row[column]!r}")
        return Record(time_s, int(row[PROMPT]), int(row[OUTPUT]))

    return parse


def _time(text: str) -> float:
    match = MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        seconds, fraction, offset = match.groups()
        zone = "+00:00" if offset in (None, "Z") else offset
        moment = datetime.strptime(seconds.replace("T", " ") + zone, "%Y-%m-%d %H:%M:%S%z")
    except ValueError:
        raise BrokenLine(f"{TIME} must look like 2023-11-16 18:15:46.6805900, got {text!r}") from None
    epoch = datetime(2000, 1, 1, tzinfo=timezone.utc)  # near enough for a float to keep all seven digits
    return (moment - epoch).total_seconds() + float(fraction or 0)


def _mooncake(line: str) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise BrokenLine(f"it is no JSON, or cut short: ...{line[-60:]!r}") from None
    if not isinstance(row, dict):
        raise BrokenLine(f"it must be an object with {', '.join(FIELDS)}, got {line[:60]!r}")
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise BrokenLine(f"{', '.join(missing)} missing; it has {', '.join(row)}")
    timestamp, prompt, output, ids = (row[name] for name in FIELDS)
    if type(timestamp) not in (int, float) or not abs(timestamp) < LATEST_MS:
        raise BrokenLine(f"timestamp must be milliseconds, got {timestamp!r}")
    for name, value in (("input_length", prompt), ("output_length", output)):
        if type(value) is not int:
            raise BrokenLine(f"{name} must be a whole number, got {value!r}")
    if not isinstance(ids, list) or any(type(value) is not int for value in ids):
        raise BrokenLine(f"hash_ids must be a list of whole numbers, got {str(ids)[:60]}")
    blocks = -(-prompt // HASH_BLOCK)
    if prompt > 0 and len(ids) != blocks:
        raise BrokenLine(
            f"input_length={prompt} makes {blocks} blocks of {HASH_BLOCK} tokens, but hash_ids holds {len(ids)}"
        )
    return Record(timestamp / 1e3, prompt, output, tuple(ids))
