"""Words of stored results that have found better ones since. A result keeps what it was written with: labels, notes,
limits and its target; what is said here is said of all pages, until the last such result has been measured again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from experiments.lab.show import wording
from experiments.lab.store.result import Result
from experiments.lab.store.rows import LATE

LABELS = {  # of metrics
    "share of a decode step that the GPU waits for the next":
        "share of a decode step that the GPU waits for the next, under the profiler",
    "memory bandwidth utilization": "useful share of the memory bandwidth",
    "bytes a second": "useful bytes a second",
    "those bytes / a row there and back for each rank with a token's experts": "bytes sent / the fewest that would do",
}  # fmt: skip
_LATE = re.compile(r".*, repeat \d+: (\d+) of (\d+) steps look too short.*")
_TEXTS = (  # in notes, limits and targets
    (r"Up to (\d+) other GPUs of this machine computed for somebody else meanwhile",
     r"Other GPUs of this machine, \1 at most, computed for somebody else when passes ended"),
    *((rf"(?<=[:;] ){label}(?=[:;]| is left out)", now) for label, now in LABELS.items()),
    (r"\bIn (\d+(?: of \d+)?) passes steps look too short, since .*: up to ([\d.]+) % of a pass's\.",
     LATE.format(r"\1", r"\2")),
    ("beside a GPU that counts against a pass from", "where a GPU computes, a pass is INVALID only from"),
    ("^GPU idle between decode steps at", "GPU idle between decode steps, under the profiler, at"),
    ("; at 7B the same gap is a tenth of that share", ""),  # nobody has measured it
)  # fmt: skip


def in_todays_words(result: Result) -> Result:
    info = result.info
    own = replace(
        info,
        metrics={name: replace(m, label=LABELS.get(m.label, m.label)) for name, m in info.metrics.items()},
        notes=tuple(_notes(info.notes)),
        limits=tuple(map(_told, info.limits)),
        target=_told(info.target),
    )
    return replace(result, info=own)


def _told(text: str) -> str:
    for before, now in _TEXTS:
        text = re.sub(before, now, text)
    return text


def _notes(notes: Iterable[str]) -> list[str]:
    """Passes with steps whose start was read late are one note, as they have been since."""
    late = {note: found for note in notes if (found := _LATE.fullmatch(note))}
    told = [_told(note) for note in notes if note not in late]
    if late:
        most = wording.number(max(100 * int(found[1]) / int(found[2]) for found in late.values()))
        told.append(LATE.format(len(late), most))
    return told
