"""Step by step, one pass of every engine variant, for the timeline and the trace; the requests of every pass; and where
tokens went, in one pass of each."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

from experiments.lab.measure.traces import Served


@dataclass(frozen=True)
class StepRow:
    """One step of the engine. Token counts and queues as in mini_infer.core.plan.StepRecord."""

    variant: str
    point: str
    step: int  # from the pass's first one on
    start_s: float  # from the pass's start
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    num_prefilling: int
    num_waiting: int
    num_swapped: int
    kv_total_blocks: int
    kv_used_blocks: int
    kv_cached_blocks: int
    kv_used_slots: int
    kv_reserved_slots: int
    prefix_hit_tokens: int
    evictions: int
    preempted: tuple[str, ...]  # request names
    finished: tuple[str, ...]
    # None in results that are older than these columns.
    verified_tokens: int | None = None
    decode_context: int | None = None
    prompt_reach: int | None = None
    prompt_pairs: int | None = None
    host_s: float | None = None  # to schedule it and to book it


@dataclass(frozen=True)
class RequestRow:
    """One request. Times in seconds from the pass's start; None for what never happened.

    Its latency is made of spans, one after the other: in the queue, until it was first scheduled; prefill, until its
    first token; decode, until its last token. Where another engine computed its prompt there are three between prefill
    and decode: the transfer of its KV as far as that was left then, the wait for a decode step, and that step. Beside
    them `transfer_s` is what the copies took in all, most of it within prefill. None: there was no such span, or nobody
    tells where it began.
    """

    variant: str
    point: str
    request: str  # as in StepRow.preempted and .finished
    name: str  # its class in the workload
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    process: int = 0
    repeat: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_s: float | None = None
    transfer_exposed_s: float | None = None
    decode_wait_s: float | None = None
    first_decode_step_s: float | None = None


@dataclass(frozen=True)
class ExpertRow:
    """A layer's experts in a pass, and the tokens that went to each."""

    variant: str
    point: str
    layer: int  # of those with experts, from the first on
    tokens: tuple[str, ...]  # whole numbers, by expert


_OF_RECORD = [f.name for f in fields(StepRow)][5:]  # what a row has as its record has it; `kv_...` of its kv


def step_rows(variant: str, point: str, served: Served) -> list[StepRow]:
    return [
        StepRow(
            variant,
            point,
            step,
            record.start_time - served.start,
            record.end_time - record.start_time,
            *(operator.attrgetter(name.replace("kv_", "kv.", 1))(record) for name in _OF_RECORD),
        )
        for step, record in enumerate(served.records)
    ]


def request_rows(variant: str, point: str, repeat: int, served: Served) -> list[RequestRow]:
    return [
        RequestRow(
            variant=variant,
            point=point,
            request=trace.request_id,
            name=trace.name,
            arrival_s=trace.arrival - served.start,
            first_scheduled_s=None if trace.first_scheduled is None else trace.first_scheduled - served.start,
            first_token_s=trace.token_times[0] - served.start if trace.token_times else None,
            end_s=trace.token_times[-1] - served.start if trace.token_times else None,
            prompt_tokens=trace.prompt_tokens,
            output_tokens=len(trace.token_times),
            cached_tokens=trace.cached_tokens,
            preemptions=trace.preemptions,
            repeat=repeat,
            queue_s=_between(trace.arrival, trace.first_scheduled),
            prefill_s=trace.spans.get("prefill", _between(trace.first_scheduled, next(iter(trace.token_times), None))),
            decode_s=trace.token_times[-1] - trace.token_times[0] if trace.token_times else None,
            transfer_s=trace.spans.get("transfer"),
            transfer_exposed_s=trace.spans.get("transfer_exposed"),
            decode_wait_s=trace.spans.get("decode_wait"),
            first_decode_step_s=trace.spans.get("first_decode_step"),
        )
        for trace in served.requests
    ]


def expert_rows(variant: str, point: str, served: Served) -> list[ExpertRow]:
    """No rows where nobody counts."""
    counted = [record.expert_tokens for record in served.records if record.expert_tokens]
    layers = (zip(*steps, strict=True) for steps in zip(*counted, strict=True))  # by layer: of each expert its steps
    return [
        ExpertRow(variant, point, layer, tuple(str(sum(steps)) for steps in experts))
        for layer, experts in enumerate(layers)
    ]


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
