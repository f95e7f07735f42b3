"""A run's steps and requests as a trace in Chrome's JSON format, which Perfetto and chrome://tracing open.

A process is a variant. It has one track of engine steps, one asynchronous track a request (queued, prefill, decode),
counters of KV blocks and queue lengths, and an instant where somebody was preempted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.lab.measure.steps import RequestRow, StepRow
from experiments.lab.show.figures.timeline import first_pass, phases
from experiments.lab.store import result as store
from experiments.lab.store.result import Result, StoreError

Event = dict[str, Any]
ENGINE = 1  # the thread of the steps


def write(result: Result, path: Path) -> int:
    """Writes the trace and returns how many events it has. Raises StoreError where the run stored no steps."""
    info = result.info
    if not result.steps:
        raise StoreError(
            f"the run {info.experiment}/{info.hardware}/{info.run} stored no steps: name the point to keep in "
            "experiment.timeline of its YAML ({} for the only point), and run it again"
        )
    found = events(result)
    document = {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {
            "experiment": info.experiment,
            "hardware": info.hardware,
            "run": info.run,
            "commit": info.provenance.commit or "none",
            "started": info.provenance.started,
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_atomic(path, json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except OSError as error:
        raise StoreError(f"the trace cannot be written to {path}: {error}") from error
    return len(found)


def events(result: Result) -> list[Event]:
    """Names first, then everything in the order of time."""
    names: list[Event] = []
    timed: list[Event] = []
    cells = dict.fromkeys((step.variant, step.point) for step in result.steps)
    for pid, (variant, point) in enumerate(cells, start=1):
        title = f"{result.info.variants[variant]} {point}".strip()
        names += [_name("process_name", pid, title), _name("thread_name", pid, "engine steps")]
        steps = [s for s in result.steps if (s.variant, s.point) == (variant, point)]
        requests = first_pass(result, variant, point)
        for step in steps:
            timed += _step(step, pid)
        for number, request in enumerate(requests):
            timed += _request(request, pid, f"{pid}.{number}")
    timed.sort(key=lambda event: event["ts"])  # stable: what ends goes before what begins at the same moment
    return [*names, *timed]


def _name(kind: str, pid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": ENGINE, "ts": 0, "args": {"name": name}}


def _step(step: StepRow, pid: int) -> Iterator[Event]:
    here = {"pid": pid, "tid": ENGINE}
    start, end = _us(step.start_s), _us(step.start_s + step.duration_s)
    kind = "mixed" if step.prefill_tokens and step.decode_tokens else "prefill" if step.prefill_tokens else "decode"
    told = ("step", "prefill_tokens", "decode_tokens", "prefix_hit_tokens", "evictions", "kv_used_slots")
    args = {name: getattr(step, name) for name in told}
    args |= {"preempted": ", ".join(step.preempted), "finished": ", ".join(step.finished)}
    yield {"ph": "X", "cat": "step", "name": kind, "ts": start, "dur": round(end - start, 3), **here, "args": args}
    for name in step.preempted:
        yield {"ph": "i", "s": "p", "cat": "preemption", "name": f"preempted {name}", "ts": start, **here, "args": {}}
    blocks = {"in use": step.kv_used_blocks, "cached": step.kv_cached_blocks}
    yield {"ph": "C", "name": "KV blocks", "ts": end, **here, "args": blocks}
    queues = ("running", "prefilling", "waiting", "swapped")
    lengths = {queue: getattr(step, f"num_{queue}") for queue in queues}
    yield {"ph": "C", "name": "requests", "ts": end, **here, "args": lengths}


def _request(request: RequestRow, pid: int, identity: str) -> Iterator[Event]:
    """Phases up to the last moment that is known."""
    moments = [request.arrival_s, request.first_scheduled_s, request.first_token_s, request.end_s]
    known = [moment for moment in moments if moment is not None]
    here = {"cat": "request", "id": identity, "pid": pid, "tid": ENGINE}
    told = ("name", "prompt_tokens", "output_tokens", "cached_tokens", "preemptions")
    args = {name: getattr(request, name) for name in told}
    yield {"ph": "b", "name": request.request, "ts": _us(known[0]), **here, "args": args}
    for phase, start, end in phases(request):
        yield {"ph": "b", "name": phase, "ts": _us(start), **here, "args": {}}
        yield {"ph": "e", "name": phase, "ts": _us(end), **here, "args": {}}
    yield {"ph": "e", "name": request.request, "ts": _us(known[-1]), **here, "args": {}}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond; a clock that was read a moment before the pass began counts as 0."""
    return round(max(seconds, 0.0) * 1e6, 3)
