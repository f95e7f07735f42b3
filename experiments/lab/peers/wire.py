"""Requests and traces as JSON, for the way into a peer's process and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item


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
