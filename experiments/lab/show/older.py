"""Words of stored results that have found better ones since. A result keeps what it was written with: labels, notes,
limits and its target; what is said here is said of all pages, until the last such result has been measured again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from experiments.lab.show import wording
from experiments.lab.store.result import Result

LABELS = {  # of metrics
    "share of a decode step that the GPU waits for the next":
        "share of a decode step that the GPU waits for the next, under the profiler",
    "memory bandwidth utilization": "useful share of the memory bandwidth",
    "bytes a second": "useful bytes a second",
    "generated tokens before the first difference": "share of generated tokens before the first difference",
    "those bytes / a row there and back for each rank with a token's experts": "bytes sent / the fewest that would do",
}  # fmt: skip
_LATE = re.compile(r"(Process [\d, ]+: )?(.*), repeat (\d+): (\d+) of (\d+) steps look too short.*")
_TEXTS = (  # in notes, limits and targets
    (r"Up to (\d+) other GPUs of this machine computed for somebody else meanwhile",
     r"Other GPUs of this machine, \1 at most, computed for somebody else when passes ended"),
    (r"changed by (\d+) to \1 % during", r"changed by \1 % during"),
    ("what is worth leaving in bf16, the first first: ", f"layers that gain most by staying in bf16{wording.RANKED}"),
    (r"\bmodel\.layers\.(\d+)\.\w+\.(\w+)", r"\2 of layer \1"),
    *((rf"(?<=[:;] ){label}(?=[:;]| is left out)", now) for label, now in LABELS.items()),
    ("^GPU idle between decode steps at", "GPU idle between decode steps, under the profiler, at"),
    ("; at 7B the same gap is a tenth of that share", ""),  # nobody has measured it
)  # fmt: skip


def in_todays_words(result: Result) -> Result:
    info = result.info
    return replace(
        result,
        info=replace(
            info,
            metrics={name: replace(m, label=LABELS.get(m.label, m.label)) for name, m in info.metrics.items()},
            notes=tuple(_notes(info.notes)),
            limits=tuple(map(_told, info.limits)),
            target=_told(info.target),
        ),
    )


def _told(text: str) -> str:
    for before, now in _TEXTS:
        text = re.sub(before, now, text)
    return text


def _notes(notes: Iterable[str]) -> Iterator[str]:
    """Passes with steps whose start was read late are one note, as they have been since."""
    late = list[tuple[int, int]]()
    for note in notes:
        if found := _LATE.fullmatch(note):
            late.append((int(found[4]), int(found[5])))
            continue
        yield _told(note)
    if late:
        most = max(count / of for count, of in late)
        yield (f"In {len(late)} passes steps look too short, since an end before them was read late: up to "
               f"{wording.number(100 * most)} % of a pass's.")  # fmt: skip
