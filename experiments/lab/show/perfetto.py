"""A run's steps and requests as a trace in Chrome's JSON format, which Perfetto and chrome://tracing open. A process is
a variant. It has one track of engine steps, one asynchronous track a request (queued, prefill, decode), counters of KV
blocks and queue lengths, and an instant where somebody was preempted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.lab.measure.traces import RequestRow, StepRow
from experiments.lab.show.figures.timeline import first_pass, phases
from experiments.lab.store.result import Result, StoreError, write_atomic

Event = dict[str, Any]
ENGINE = 1  # the thread of the steps


def write(result: Result, path: Path) -> int:
    """Writes the trace and returns how many events it has. Raises StoreError where the run stored no steps."""
    info = result.info
    if not result.steps:
        way = "name the point to keep in experiment.timeline of its YAML ({} for the only point), and run it again"
        raise StoreError(f"the run {info.experiment}/{info.hardware}/{info.run} stored no steps: {way}")
    told = {"experiment": info.experiment, "hardware": info.hardware, "run": info.run}
    told |= {"commit": info.provenance.commit or "none", "started": info.provenance.started}
    document = {"traceEvents": (found := events(result)), "displayTimeUnit": "ms", "otherData": told}
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic({path: text})
    except OSError as error:
        raise StoreError(f"the trace cannot be written to {path}: {error}") from error
    return len(found)


def events(result: Result) -> list[Event]:
    """Names first, then everything in the order of time."""
    found: list[Event] = []
    for pid, (variant, point) in enumerate(dict.fromkeys((s.variant, s.point) for s in result.steps), start=1):
        title = f"{result.info.variants.get(variant, variant)} {point}".strip()
        for kind, name in (("process_name", title), ("thread_name", "engine steps")):
            found.append({"ph": "M", "name": kind, "pid": pid, "tid": ENGINE, "ts": 0, "args": {"name": name}})
        for step in result.steps_of(variant, point):
            found += _step(step, pid)
        for number, request in enumerate(first_pass(result, variant, point)):
            found += _request(request, {"cat": "request", "id": f"{pid}.{number}", "pid": pid, "tid": ENGINE})
    # Stable: what ends goes before what begins at the same moment.
    return sorted(found, key=lambda event: (event["ph"] != "M", event["ts"]))


def _step(step: StepRow, pid: int) -> Iterator[Event]:
    here, start, end = {"pid": pid, "tid": ENGINE}, _us(step.start_s), _us(step.start_s + step.duration_s)
    kind = "mixed" if step.prefill_tokens and step.decode_tokens else "prefill" if step.prefill_tokens else "decode"
    told = ("step", "prefill_tokens", "decode_tokens", "prefix_hit_tokens", "evictions", "kv_used_slots")
    args = {name: getattr(step, name) for name in told}
    args |= {"preempted": ", ".join(step.preempted), "finished": ", ".join(step.finished)}
    yield {"ph": "X", "cat": "step", "name": kind, "ts": start, "dur": round(end - start, 3), **here, "args": args}
    for name in step.preempted:
        yield {"ph": "i", "s": "p", "cat": "preemption", "name": f"preempted {name}", "ts": start, **here, "args": {}}
    counters = {
        "KV blocks": {"in use": step.kv_used_blocks, "cached": step.kv_cached_blocks},
        "requests": {name: getattr(step, f"num_{name}") for name in ("running", "prefilling", "waiting", "swapped")},
    }
    for name, values in counters.items():
        yield {"ph": "C", "name": name, "ts": end, **here, "args": values}


def _request(request: RequestRow, here: Event) -> Iterator[Event]:
    told = ("name", "prompt_tokens", "output_tokens", "cached_tokens", "preemptions")
    args = {name: getattr(request, name) for name in told}
    end = request.arrival_s
    yield {"ph": "b", "name": request.request, "ts": _us(end), **here, "args": args}
    for name, start, end in phases(request):
        yield {"ph": "b", "name": name, "ts": _us(start), **here, "args": {}}
        yield {"ph": "e", "name": name, "ts": _us(end), **here, "args": {}}
    yield {"ph": "e", "name": request.request, "ts": _us(end), **here, "args": {}}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond; a clock that was read a moment before the pass began counts as 0."""
    return round(max(seconds, 0.0) * 1e6, 3)
