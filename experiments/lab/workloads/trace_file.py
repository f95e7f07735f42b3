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
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec

from mini_infer.core.errors import ConfigError

MOST_TOKENS = 10**9  # beyond any model: a slip of the pen
WHERE = "docs/workloads.md says where to get a trace and what it must look like"
HASH_BLOCK = 512  # tokens
EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)  # near enough for a float to keep all seven digits
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Milliseconds = Annotated[float, msgspec.Meta(gt=-1e15, lt=1e15)]  # what a float holds to the tenth of one


@dataclass(frozen=True)
class Record:
    time_s: float  # when the request arrived; only differences matter
    prompt_tokens: int
    output_tokens: int
    # One id for each HASH_BLOCK tokens of the prompt, the last block partly filled. Prompts share their beginning as
    # far as their ids are the same. Empty: nothing is known to be shared.
    prefix_ids: tuple[int, ...] = ()


class Azure(msgspec.Struct):
    """A line, by the names of its columns."""

    TIMESTAMP: str  # has seven digits of a second, which no datetime holds; later traces add an offset from UTC
    ContextTokens: Tokens
    GeneratedTokens: Tokens

    @property
    def record(self) -> Record:
        whole, fraction = re.sub(r"\.\d+", "", self.TIMESTAMP), re.search(r"\.\d+", self.TIMESTAMP)
        moment = msgspec.convert(whole, datetime)
        since = moment - (EPOCH if moment.tzinfo else EPOCH.replace(tzinfo=None))
        seconds = since.total_seconds() + float(fraction[0] if fraction else 0)
        return Record(seconds, self.ContextTokens, self.GeneratedTokens)


class Mooncake(msgspec.Struct):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...]

    @property
    def record(self) -> Record:
        blocks = -(-self.input_length // HASH_BLOCK)
        if len(self.hash_ids) != blocks:
            made = f"input_length={self.input_length} makes {blocks} blocks of {HASH_BLOCK} tokens"
            raise ValueError(f"{made}, but hash_ids holds {len(self.hash_ids)}")
        return Record(self.timestamp / 1e3, self.input_length, self.output_length, self.hash_ids)


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
        at = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {at}: it is no UTF-8 text. Is the file still compressed? {WHERE}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"workload.path={path} is empty. {WHERE}")
    header = lines[0][1]
    columns, azure = [cell.strip() for cell in header.split(",")], Azure.__struct_fields__
    if not header.startswith("{") and not set(azure) <= set(columns):
        looks = f"begins with the columns {','.join(azure)}, a Mooncake trace is JSON lines with "
        looks += ", ".join(Mooncake.__struct_fields__)
        known = f"is no trace that is known here. Its first line is {header[:80]!r}; an Azure trace {looks}"
        raise ConfigError(f"workload.path={path} {known}")
    records, numbers = list[Record](), list[int]()
    body = lines if header.startswith("{") else lines[1:]
    try:
        for number, line in body:
            numbers.append(number)
            records.append(_parsed(line, columns).record)
            if (earlier := records[-2:][0].time_s - records[-1].time_s) > 0:
                raise ValueError(f"it is {earlier:.3f} s earlier than the line before it: sort the file by time")
    except (ValueError, msgspec.DecodeError) as error:
        mend = "Mend the file; no line is passed over in silence"
        raise ConfigError(f"{path}, line {numbers[-1]}: {error}. {mend}") from error
    if not records:
        raise ConfigError(f"workload.path={path} has a header and no requests. {WHERE}")
    format = "mooncake" if body is lines else "azure"
    return TraceFile(file.name, format, hashlib.sha256(data).hexdigest(), tuple(records), tuple(numbers))


def _parsed(line: str, columns: Sequence[str]) -> Azure | Mooncake:
    """Columns of Azure may stand in any order, and others beside them. Raises ValueError or msgspec.DecodeError."""
    if columns[0].startswith("{"):
        return msgspec.json.decode(line, type=Mooncake)
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(columns):
        raise ValueError(f"it has {len(cells)} of {len(columns)} columns: {line[:60]!r}")
    return msgspec.convert(dict(zip(columns, cells, strict=True)), Azure, strict=False)
