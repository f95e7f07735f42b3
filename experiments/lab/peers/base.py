"""What is measured is to who measures it, how a peer fails, and requests and traces as JSON on the way to a peer's
process and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer.core.errors import MiniInferError


class PeerAbsent(MiniInferError):
    """A peer cannot be measured on this machine. The message says why: it stands in the report, and is no error."""


class PeerError(MiniInferError):
    """A peer's process has failed. The message holds the last lines of its log."""


class Subject(Protocol):
    """What can be measured: the engine, or a peer that serves the same requests."""

    @property
    def about(self) -> Mapping[str, Any]:
        """A peer's version and settings, in plain values, which are stored with the results; of an engine on a GPU what
        it chose, fell back to, and took to start."""
        ...

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Greedy tokens for every item, in the items' order. Requests of the closed loop: at most `concurrency` in
        flight. A token's time is when the process that asks could read it."""
        ...

    def forget(self) -> None:
        """What comes finds nothing of what came before: no cached prefix, and no text to draft from."""
        ...

    def close(self) -> None: ...


class LivingPeer(Subject, Protocol):
    """One that has processes of its own, and stays for later passes."""

    name: str  # for people

    @property
    def alive(self) -> bool: ...


def pack_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    return [asdict(item) for item in items]


def unpack_items(packed: Sequence[Mapping[str, Any]]) -> list[Item]:
    return [Item(**_tuples(values)) for values in packed]


def pack_served(served: Served) -> dict[str, Any]:
    """All but the engine's step records, which no peer has."""
    return {
        "requests": [asdict(request) for request in served.requests],
        "start": served.start,
        "end": served.end,
        "peak_memory": served.peak_memory,
        "in_flight_s": served.in_flight_s,
        "outside_s": served.outside_s,
    }


def unpack_served(packed: Mapping[str, Any]) -> Served:
    requests = tuple(RequestTrace(**_tuples(values)) for values in packed["requests"])
    return Served(requests, **{key: value for key, value in packed.items() if key != "requests"})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
