"""Findings of several processes as those of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from experiments.lab.experiment import Findings
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.points import Point
from experiments.lab.store.result import COMPLETE

T = TypeVar("T")


def merged(found: Sequence[Findings], planned: int, notes: Sequence[str]) -> Findings:
    """Numbers, gates and requests of all; what stands for one process (steps, profiles, samples) is the first one's
    that has it.

    Args:
        found: in the order of the processes.
        planned: so many processes there should be.
        notes: of the run as a whole.
    """
    numbers = [about.index for findings in found for about in findings.processes]
    status, error = _status(found, planned)
    return replace(
        found[0],
        rows=[replace(row, process=n) for n, f in zip(numbers, found, strict=True) for row in f.rows],
        requests=[replace(row, process=n) for n, f in zip(numbers, found, strict=True) for row in f.requests],
        gates=_gates(found),
        error_gates=_error_gates(found),
        samples=_first(f.samples for f in found),
        status=status,
        error=error,
        steps=_first(f.steps for f in found),
        notes=[*notes, *_notes(found)],
        profiles=_first(f.profiles for f in found),
        kernels=_first(f.kernels for f in found),
        peers={name: about for f in reversed(found) for name, about in f.peers.items()},
        points=_points(found),
        processes=[about for f in found for about in f.processes],
    )


def _status(found: Sequence[Findings], planned: int) -> tuple[str, BaseException | None]:
    """Of one process as it says it; of several which ones are incomplete, and why."""
    if planned == 1:
        return found[0].status, found[0].error
    wrong = [(f.processes[0].index, f) for f in found if f.status != COMPLETE]
    if not wrong:
        return COMPLETE, None
    told = "; ".join(f"process {n + 1} of {planned}: {f.status.removeprefix('incomplete: ')}" for n, f in wrong)
    return f"incomplete: {told}; {len(found) - len(wrong)} of {planned} processes are complete", wrong[0][1].error


def _gates(found: Sequence[Findings]) -> list[Gate]:
    gates: dict[tuple[str, str, str], Gate] = {}
    for gate in (gate for f in found for gate in f.gates):
        key = (gate.variant, gate.point, gate.against)
        gates[key] = gates[key].joined(gate) if key in gates else gate
    return list(gates.values())


def _error_gates(found: Sequence[Findings]) -> list[ErrorGate]:
    """The worst of each; an error that is no number is worse than any."""
    gates: dict[tuple[str, str | None], list[ErrorGate]] = {}
    for gate in (gate for f in found for gate in f.error_gates):
        gates.setdefault((gate.variant, gate.point), []).append(gate)
    return [max(own, key=lambda gate: (math.isnan(gate.error), gate.error)) for own in gates.values()]


def _notes(found: Sequence[Findings]) -> list[str]:
    """What all processes say is said once; else it stands with its process."""
    said: dict[str, list[int]] = {}
    for f in found:
        for note in dict.fromkeys(f.notes):
            said.setdefault(note, []).append(f.processes[0].index)
    alone = len(found) == 1
    return [
        note if alone or len(who) == len(found) else f"Process {', '.join(str(n + 1) for n in who)}: {note}"
        for note, who in said.items()
    ]


def _points(found: Sequence[Findings]) -> list[Point] | None:
    """Those that any process has measured; a search visits others in each."""
    known = {point.name: point for f in found for point in f.points or ()}
    return list(known.values()) or None


def _first(parts: Iterable[Sequence[T]]) -> Sequence[T]:
    return next((part for part in parts if part), ())
