"""The Azure LLM inference traces: CSV with one request a line, times and lengths only.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone

from experiments.lab.workloads.records import BrokenLine, Record

TIME, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Seven digits of a second, which Python 3.10 does not read by itself; later traces add an offset from UTC.
MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def parse(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Record]]:
    """Numbered lines to numbered records. Columns may stand in any order, and others beside them.

    Raises BrokenLine."""
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
