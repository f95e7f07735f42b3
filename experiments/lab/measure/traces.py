"""What a timed pass leaves behind: a trace of every request, the engine's step records, and how much memory it took;
and the rows of the result's tables that follow from them."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from mini_infer.core.plan import StepRecord
from mini_infer.speculative.policy.costs import StepCosts

RAMP = 0.1  # of the time in which an open loop's requests arrive, at either end
STEADY = 50  # requests, from which on an open loop is taken to have a steady state
BIN = 1.03  # times the one before: of gaps between tokens
FEW_ANSWERS = 2  # one after the other: an open loop that is no longer is a burst


@dataclass(frozen=True)
class RequestTrace:
    """What one request asked for and got. Times are seconds on one clock."""

    prompt_tokens: int
    asked_tokens: int  # output tokens it should have got
    arrival: float  # when it was due, whether or not the client managed to send it then
    token_times: tuple[float, ...]  # one an output token; tokens that appeared together share a time
    token_ids: tuple[int, ...]
    cached_tokens: int = 0  # prompt tokens found in a prefix cache
    request_id: str = ""  # as step records call it
    name: str = ""  # class of request, such as "stream"
    sent: float | None = None  # when the client handed it over; None where no schedule has to be kept
    could_send: float | None = None  # when the engine, which runs in the client's thread, had last returned
    first_scheduled: float | None = None
    preemptions: int = 0
    shared_tokens: int = 0  # leading prompt tokens that the workload means to be found in a prefix cache
    error: str = ""  # why it has no complete answer
    tells_tokens: bool = True  # false of a server that streams text alone: token_ids is empty then
    spans: Mapping[str, float] = field(default_factory=dict, hash=False)  # of RequestMetrics.spans, where told

    @property
    def ttft(self) -> float | None:
        """None where it got no token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def e2e(self) -> float | None:
        return self.token_times[-1] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean time a token after the first; None for a single token."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @cached_property  # several figures are made of them
    def gaps(self) -> list[float]:
        """Inter-token latencies: of a chunk of n tokens n of its n-th part, and none of the first (TTFT)."""
        times, sizes = np.unique(self.token_times, return_counts=True)
        gaps: list[float] = np.repeat(np.diff(times) / sizes[1:], sizes[1:]).tolist()
        return gaps

    @property
    def lag(self) -> float:
        """By how much the client sent it too late. While a step runs nothing can be sent, and that is the engine's
        time: lag counts from the later of the arrival and the moment the engine returned."""
        if self.sent is None:
            return 0.0
        ready = self.arrival if self.could_send is None else max(self.arrival, self.could_send)
        return max(0.0, self.sent - ready)


def first_scheduled(token_times: Sequence[float], spans: Mapping[str, float]) -> float | None:
    """So long before the first token as the engine says, by the clock of who asks. None where it does not say."""
    parts = [seconds for name, seconds in spans.items() if name not in ("queue", "transfer")]
    return token_times[0] - sum(parts) if parts and token_times else None


@dataclass(frozen=True)
class HostUse:
    """What a pass over HTTP cost the host, in seconds of CPU."""

    client_s: float  # of all processes of the load client
    client_busy: float  # of the busiest of them, over the time from the start to its last answer
    tells_cached: bool  # whether the server said how much of each prompt was in its prefix cache
    # Of the server's two processes; None of a server that is not ours.
    api_s: float | None = None
    engine_s: float | None = None


@dataclass(frozen=True)
class Served:
    """One timed pass over a workload."""

    requests: tuple[RequestTrace, ...]  # in the order of the workload's items
    # Of the pass: its first arrival and the end of its last request.
    start: float
    end: float
    records: tuple[StepRecord, ...] = ()  # the engine's steps between them; none of a peer
    # Bytes; see docs/metrics.md for what it holds on a CPU and on a GPU. None where nobody knows.
    peak_memory: int | None = None
    memory_growth: int = 0  # bytes of device memory that the pass itself reserved anew
    compiled: tuple[str, ...] = ()  # kernels that Triton compiled in this process meanwhile
    host: HostUse | None = None  # of a pass over HTTP
    # What the engine measured of its steps when it started; None where it drafts nothing.
    step_costs: StepCosts | None = None
    kv_token_bytes: int | None = None  # that the engine keeps of a token; None where nobody knows
    # Requests in flight, integrated over the pass by the client; None where nobody counts them.
    in_flight_s: float | None = None
    # What the whole call of `serve` took, less the time before its first arrival was due.
    outside_s: float | None = None
    joules: float | None = None  # that the GPU used meanwhile, by its own counter; None where it has none
    # The times between which requests and tokens count; None: all do. See `without_ramps`.
    window: tuple[float, float] | None = None
    # In which the requests of an open loop that count arrive; None of another, whose requests wait for each other.
    arriving_s: float | None = None

    @property
    def took(self) -> float:
        """The whole pass, in seconds."""
        return self.end - self.start

    @property
    def seconds(self) -> float:
        """Of what counts."""
        first, last = self.window or (self.start, self.end)
        return last - first

    @property
    def is_burst(self) -> bool:
        """The requests of an open loop have come in so short a time that hardly one had to end before the last came:
        whatever rate that was, nobody knows whether it could go on."""
        answers = sorted(e2e for request in self.requests if (e2e := request.e2e) is not None)
        few = FEW_ANSWERS * answers[len(answers) // 2] if answers else 0.0
        return self.arriving_s is not None and self.arriving_s < few

    @property
    def counted(self) -> tuple[RequestTrace, ...]:
        if self.window is None:
            return self.requests
        first, last = self.window
        return tuple(request for request in self.requests if first <= request.arrival <= last)

    def in_window(self, times: Sequence[float]) -> int:
        """How many of these moments count: a token does where it appeared."""
        first, last = self.window or (self.start, self.end)
        return sum(1 for time in times if first <= time <= last)

    def without_ramps(self) -> Served:
        """Of a pass whose requests arrive one after another, without the first and the last RAMP of the time in which
        they do, if there are enough of them to have a steady state between."""
        arrivals = [request.arrival for request in self.requests]
        first, last = min(arrivals), max(arrivals)
        if len(arrivals) < STEADY:
            return replace(self, arriving_s=last - first)
        ramp = RAMP * (last - first)
        return replace(self, window=(first + ramp, last - ramp), arriving_s=last - first - 2 * ramp)


def joined(parts: Sequence[Served], owned: Sequence[Sequence[int]]) -> Served:
    """One pass, of which several processes have each served the requests with the indices that it `owned`."""
    each = (zip(own, part.requests, strict=True) for own, part in zip(owned, parts, strict=True))
    requests = tuple(request for _, request in sorted(itertools.chain(*each)))
    flights = [part.in_flight_s for part in parts if part.in_flight_s is not None]
    in_flight_s = sum(flights) if len(flights) == len(parts) else None
    return Served(requests, min(p.start for p in parts), max(p.end for p in parts), in_flight_s=in_flight_s)


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
    prompt_context: int | None = None


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
    attempt: int = 0  # at the pass: how often it had been tried before
    valid: bool | None = None  # whether that counts; None in results older than this: the rows of the pass say


@dataclass(frozen=True)
class GapRow:
    """A pass that counts, and the gaps between its requests' tokens: a histogram whose bins are BIN wide."""

    variant: str
    point: str
    gaps: tuple[str, ...]  # `4.57x120`: 120 of 4.57 ms, the middle of a bin; from the shortest on
    process: int = 0
    repeat: int = 0

    @property
    def histogram(self) -> tuple[list[float], list[float]]:
        """Milliseconds, and how many gaps are so long."""
        times, counts = zip(*(bin_.split("x") for bin_ in self.gaps), strict=True)
        return list(map(float, times)), list(map(float, counts))


@dataclass(frozen=True)
class ExpertRow:
    variant: str
    point: str
    layer: int  # of those with experts, from the first on
    tokens: tuple[str, ...]  # whole numbers, by expert


SHARED, CACHED = "shared", "cached"  # of a block, instead of a request's name


@dataclass(frozen=True)
class BlockRow:
    """A KV block that does not change its owner from one step of a pass to another. Steps are counted from 0."""

    variant: str
    point: str
    block: int
    first: int
    last: int
    owner: str  # a request; SHARED by several; CACHED: nobody, and kept for prompts that begin alike
    empty: bool = False  # it lies behind its request's last token


TOLD_SPANS = ("prefill", "transfer", "transfer_exposed", "decode_wait", "first_decode_step")
_OF_RECORD = [f.name for f in fields(StepRow)][5:]  # what a row has as its record has it; `kv_...` of its kv


def step_rows(variant: str, point: str, served: Served) -> list[StepRow]:
    rows = []
    for step, record in enumerate(served.records):
        when = record.start_time - served.start, record.end_time - record.start_time
        of_record = (operator.attrgetter(name.replace("kv_", "kv.", 1))(record) for name in _OF_RECORD)
        rows.append(StepRow(variant, point, step, *when, *of_record))
    return rows


def request_rows(
    variant: str, point: str, repeat: int, served: Served, *, attempt: int = 0, valid: bool | None = None
) -> list[RequestRow]:
    rows = []
    for trace in served.requests:
        scheduled, times = trace.first_scheduled, trace.token_times
        first, last = (times[0], times[-1]) if times else (None, None)
        own: dict[str, Any] = {
            "arrival_s": trace.arrival - served.start,
            "first_scheduled_s": _between(served.start, scheduled),
            "first_token_s": _between(served.start, first),
            "end_s": _between(served.start, last),
            "output_tokens": len(trace.token_times),
            "queue_s": _between(trace.arrival, scheduled),
            "prefill_s": _between(scheduled, first),
            "decode_s": _between(first, last),
            **{name: getattr(trace, name) for name in ("name", "prompt_tokens", "cached_tokens", "preemptions")},
            **{f"{name}_s": trace.spans[name] for name in TOLD_SPANS if name in trace.spans},
        }
        rows.append(RequestRow(variant, point, trace.request_id, **own, repeat=repeat, attempt=attempt, valid=valid))
    return rows


def gap_rows(variant: str, point: str, repeat: int, served: Served) -> list[GapRow]:
    """One, of the requests whose latencies count; none where nobody has a second token."""
    bins = Counter(round(math.log(1e3 * gap, BIN)) for request in served.counted for gap in request.gaps)
    told = tuple(f"{BIN**place:.4g}x{count}" for place, count in sorted(bins.items()))
    return [GapRow(variant, point, told, repeat=repeat)] if told else []


def expert_rows(variant: str, point: str, served: Served) -> list[ExpertRow]:
    """No rows where nobody counts."""
    counted = [record.expert_tokens for record in served.records if record.expert_tokens]
    layers = np.sum(counted, axis=0).tolist() if counted else []  # [layers, experts]
    return [ExpertRow(variant, point, layer, tuple(map(str, tokens))) for layer, tokens in enumerate(layers)]


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
