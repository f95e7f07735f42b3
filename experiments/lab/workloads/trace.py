"""A recorded trace: real lengths, arrival times and shared prefixes, where it tells them. It is read and checked to its
last line: what is measured must not depend on which lines were skipped.

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
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from experiments.lab.config.spec import Count, FromOne, Natural, Positive
from experiments.lab.workloads.base import Arrivals, Arriving, Inputs, Item, Vocabulary, generator
from experiments.lab.workloads.random import RandomTokens
from mini_infer.core.errors import ConfigError

MOST_TOKENS = 10**9  # beyond any model: a slip of the pen
WHERE = "docs/workloads.md says where to get a trace and what it must look like"
HASH_BLOCK = 512  # tokens
EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)  # near enough for a float to keep all seven digits
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Milliseconds = Annotated[float, msgspec.Meta(gt=-1e15, lt=1e15)]  # what a float holds to the tenth of one
# A hole is a pause of so many times the mean of all but the few longest, of enough; real traces have up to 50 times it.
# The median would not do, where whole batches of requests have one time.
HOLE, FEW, ENOUGH = 100, 3, 20
SMALLEST_BLOCK = 4  # tokens: enough ids of any vocabulary for the blocks of a trace to stay different


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


@dataclass(frozen=True)
class Trace(Arriving, kind="trace"):
    """Requests `start` .. `start + limit` of a trace file. Token ids are random; equal block ids give equal tokens."""

    recorded_arrivals: ClassVar[bool] = True

    arrivals: Arrivals = Arrivals.trace  # `trace` for the recorded times; the others take the lengths alone
    path: str = ""
    start: Natural = 0
    limit: Count = 256
    rate_scale: Positive = 1.0  # 2 makes requests arrive twice as fast as recorded
    shrink: FromOne = 1.0  # lengths of prompts and outputs are divided by this, and shared prefixes with them
    max_prompt_tokens: Count | None = None  # longer prompts, once shrunk, are cut off at their end; likewise outputs
    max_output_tokens: Count | None = None
    max_pause_s: Positive | None = None  # recorded, between two requests; longer ones are shortened to it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_scale != 1 and self.arrivals is not Arrivals.trace:
            how = f"needs workload.arrivals=trace; it is {self.arrivals.value}"
            raise ConfigError(f"workload.rate_scale={self.rate_scale} {how}")

    @property
    def num_requests(self) -> int:
        return self.limit

    @property
    def shares(self) -> bool:
        return any(record.prefix_ids for record in self._cut(read(self.path)))

    def require_files(self) -> None:
        file = read(self.path)
        self._times(file, self._cut(file))

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        file = read(self.path)
        records = self._cut(file)
        lengths = [self._lengths(record) for record in records]
        way_out = "raise workload.shrink, or set workload.max_prompt_tokens and workload.max_output_tokens"
        self._require_room(vocabulary, *max(lengths, key=sum), way_out=way_out)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        blocks = HashBlocks(tokens, self.shrink)
        measured = []
        times = self._times(file, records)
        for record, time_s, (prompt_tokens, output_tokens) in zip(records, times, lengths, strict=True):
            if record.prefix_ids:
                prompt, shared = blocks.prompt(record.prefix_ids, prompt_tokens)
                tokens.claim(prompt)  # for the warm-up to begin differently, whatever is left of a block
            else:
                prompt, shared = tokens.draw(prompt_tokens), 0
            due = time_s / self.rate_scale if self.arrivals is Arrivals.trace else None
            measured.append(Item(prompt, output_tokens, due, shared_tokens=shared))
        others = (lengths[index % self.limit] for index in range(self.num_warmup))
        warmup = tuple(Item(tokens.draw(prompt), output) for prompt, output in others)
        return Inputs(tuple(measured), warmup, notes=self._notes(file, records))

    def _cut(self, file: TraceFile) -> Sequence[Record]:
        records = file.records[self.start : self.start + self.limit]
        if len(records) < self.limit:
            there = f"{file.name}, which has {len(file.records)} requests: lower them"
            raise ConfigError(f"workload.start={self.start} and workload.limit={self.limit} reach beyond {there}")
        coarsest = HASH_BLOCK / SMALLEST_BLOCK
        if self.shrink > coarsest and any(record.prefix_ids for record in records):
            few = f"less than {SMALLEST_BLOCK} tokens of a hashed block of {HASH_BLOCK}, too few to tell blocks apart"
            way = f"{coarsest:.0f} is the most. To get shorter prompts, set workload.max_prompt_tokens"
            raise ConfigError(f"workload.shrink={self.shrink} leaves {few}: {way}")
        return records

    def _times(self, file: TraceFile, records: Sequence[Record]) -> Sequence[float]:
        """Recorded seconds from the first request on. Raises ConfigError for a hole: across it no load went on."""
        pauses = [after.time_s - before.time_s for before, after in pairwise(records)]
        if self.max_pause_s is not None:
            return list(accumulate((min(pause, self.max_pause_s) for pause in pauses), initial=0.0))
        rest = sorted(pauses)[:-FEW]
        mean = sum(rest) / len(rest) if len(rest) >= ENOUGH else 0.0
        for index, pause in enumerate(pauses if self.arrivals is Arrivals.trace else (), 1):
            if pause > HOLE * mean > 0:
                at = f"line {file.lines[self.start + index]} is {pause:,.0f} s later than the one before it"
                sides = f"Take one side of it, workload.limit={index} or workload.start={self.start + index}"
                keeps = f"60, say, shortens longer pauses to a minute, and {math.ceil(pause)} keeps this one"
                usual = f"requests are {mean:.2g} s apart on average. {sides}; or set workload.max_pause_s: {keeps}"
                raise ConfigError(f"{file.name} has a hole: {at}, and {usual}")
        return [record.time_s - records[0].time_s for record in records]

    def _lengths(self, record: Record) -> tuple[int, int]:
        """Prompt and output tokens, shrunk and cut off."""
        prompt = max(1, shrunk(record.prompt_tokens, self.shrink))
        output = max(1, shrunk(record.output_tokens, self.shrink))
        return min(prompt, self.max_prompt_tokens or prompt), min(output, self.max_output_tokens or output)

    def _notes(self, file: TraceFile, records: Sequence[Record]) -> dict[str, Any]:
        cut = [(record, self._lengths(record)) for record in records]
        return {
            "file": file.name,
            "sha256": file.sha256,
            "format": file.format,
            "requests_in_file": len(file.records),
            **{name: getattr(self, name) for name in ("start", "limit", "rate_scale", "shrink")},
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_output_tokens": self.max_output_tokens,
            "prompts_cut_off": sum(got < shrunk(r.prompt_tokens, self.shrink) for r, (got, _) in cut),
            "outputs_cut_off": sum(got < shrunk(r.output_tokens, self.shrink) for r, (_, got) in cut),
            "recorded_s": records[-1].time_s - records[0].time_s,
            "longest_pause_s": max([b.time_s - a.time_s for a, b in pairwise(records)], default=0.0),
            **({} if self.max_pause_s is None else {"max_pause_s": self.max_pause_s}),
            "recorded_prompt_tokens": sum(record.prompt_tokens for record in records),
            "recorded_output_tokens": sum(record.output_tokens for record in records),
        }


class HashBlocks:
    """Prompts made from block ids: the same id gives the same tokens, so that prompts share what they shared.

    Shrinking divides every position by one factor. A block of 512 tokens then covers the same shrunk positions in every
    prompt, and a shared beginning keeps its share of the prompt:

        shrink = 4    [    id 7, 128 tokens    |    id 9, 128    |  id 12, 37 of 128 ]
                      [    id 7, 128 tokens    |    id 9, 128    |  id 31, 128   | ...
                       <--------- shared, 256 of 293 --------->
    """

    def __init__(self, tokens: RandomTokens, shrink: float) -> None:
        self._tokens = tokens
        self._shrink = shrink
        self._block_tokens: dict[int, tuple[int, ...]] = {}
        # Prompts so far, as a tree: (parent, id) -> node, and how many tokens of a node's block some prompt had.
        self._nodes: dict[tuple[int | None, int], int] = {}
        self._had: list[int] = []

    def prompt(self, ids: Sequence[int], length: int) -> tuple[tuple[int, ...], int]:
        """The prompt of `length` shrunk tokens, and how many of them, from the start on, an earlier prompt had too."""
        prompt: list[int] = []
        shared, sharing = 0, True
        parent: int | None = None
        for index, block_id in enumerate(ids):
            start, end = shrunk(index * HASH_BLOCK, self._shrink), shrunk((index + 1) * HASH_BLOCK, self._shrink)
            taken = min(end, length) - start
            if taken <= 0:
                break
            if block_id not in self._block_tokens:
                # Rounding makes some shrunk blocks a token longer: what tells blocks apart stands in the part that all
                # of them have.
                surely = shrunk(HASH_BLOCK, self._shrink)
                self._block_tokens[block_id] = self._tokens.draw(surely) + self._tokens.any(2)
            prompt += self._block_tokens[block_id][:taken]
            node = self._nodes.setdefault((parent, block_id), len(self._had))
            if node == len(self._had):
                self._had.append(0)
            if sharing:
                common = min(taken, self._had[node])
                shared += common
                sharing = common == end - start
            self._had[node] = max(self._had[node], taken)
            parent = node
        return tuple(prompt), shared


def shrunk(tokens: int, shrink: float) -> int:
    """Where position `tokens` of a recorded prompt comes to lie. The order of positions stays."""
    return int(tokens / shrink)
