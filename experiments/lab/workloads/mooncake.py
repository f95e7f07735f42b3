"""The Mooncake traces: JSON lines with times, lengths, and a hash for every 512 tokens of the prompt.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ..., 2353, 2354]}

Times are milliseconds. A hash covers its block and all before it, so prompts are equal as far as their ids are.
Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from experiments.lab.workloads.records import BrokenLine, Record

HASH_BLOCK = 512  # tokens
LATEST_MS = 10**15  # what a float holds to the tenth of a millisecond
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def parse(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Record]]:
    """Numbered lines to numbered records. Raises BrokenLine."""
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
            number,
            f"input_length={prompt} makes {blocks} blocks of {HASH_BLOCK} tokens, but hash_ids holds {len(ids)}",
        )
    return Record(timestamp / 1e3, prompt, output, tuple(ids))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
