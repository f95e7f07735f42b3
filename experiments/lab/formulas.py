"""Every metric of a timed pass: its formula, its unit, and which way is better. docs/metrics.md says the same in words,
and what each leaves out; a test holds that list and this one together.

arrival      first token            last token
   |------------|----|----|----|----|
   <--- TTFT --->
                <ITL>                        gap between neighbouring tokens
                <------ (n - 1) x TPOT ----->
   <------------------ e2e ----------------->
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from experiments.lab import stats
from experiments.lab.roofline import Utilization
from experiments.lab.slo import SLO
from experiments.lab.traces import HostUse, Served
from mini_infer.core.plan import StepRecord
from mini_infer.speculative.costs import expected_tokens

PLACES = 8  # behind a request's last token, of which acceptance is told one by one
PERCENTILES = (50, 90, 95, 99)


class Better(Enum):
    higher = "higher"
    lower = "lower"


@dataclass(frozen=True)
class Metric:
    """What a report needs to know about a column of numbers."""

    label: str
    unit: str
    better: Better


@dataclass(frozen=True)
class Context:
    """What a pass is measured against."""

    slo: SLO = field(default_factory=SLO)
    utilization: Callable[[Sequence[StepRecord]], Utilization | None] | None = None  # against this machine's ceilings
    no_utilization: str = "no ceilings are known for this machine"  # why there is none


@dataclass(frozen=True)
class Missing:
    """No value, and why. `applies`: there should have been one, so the row is kept and marked invalid."""

    reason: str
    applies: bool = True


NOT_A_PEERS = Missing("a peer has no engine steps to look at", applies=False)
NOT_PROFILED = Missing("it is taken of profiled decode steps, and these were not", applies=False)
NOT_SEARCHED = Missing("it is what a search finds, and this was none", applies=False)
NOT_OVER_HTTP = Missing("there is no client and no server beside the engine", applies=False)
NOT_TOLD = Missing("only the processes of our own server can be asked", applies=False)
UNKNOWN_MEMORY = Missing("its memory is not known", applies=False)
NO_DRAFTS = Missing("there were no drafts", applies=False)
NOTHING = Missing("no request gave a sample of it")
Compute = Callable[[Served, Context], "float | Missing"]
Samples = Callable[[Served], Sequence["float | None"]]


@dataclass(frozen=True)
class Formula:
    metric: Metric
    compute: Compute
    of_requests: bool = True  # and so can be taken of one class of them


def _times(key: str, what: str, one: str, samples: Samples) -> dict[str, Formula]:
    """Mean and percentiles of a time, `samples` in seconds."""

    def known(served: Served) -> list[float]:
        return [1e3 * sample for sample in samples(served) if sample is not None]

    def mean(served: Served, context: Context) -> float | Missing:
        found = known(served)
        return sum(found) / len(found) if found else NOTHING

    def percentile(q: int) -> Compute:
        def compute(served: Served, context: Context) -> float | Missing:
            found = known(served)
            value = stats.percentile(found, q)
            if value is None:
                return Missing(f"{len(found)} samples do not show a P{q}, which takes {stats.samples_needed(q)}")
            return value

        return compute

    formulas = {f"{key}_ms": Formula(Metric(f"{what}, mean {one}", "ms", Better.lower), mean)}
    for q in PERCENTILES:
        label = f"{what}, median {one}" if q == 50 else f"{what}, P{q}"
        formulas[f"{key}_p{q}_ms"] = Formula(Metric(label, "ms", Better.lower), percentile(q))
    return formulas


def _gaps(served: Served) -> list[float]:
    return [gap for request in served.requests for gap in request.gaps]


def _longest_gap(served: Served, context: Context) -> float | Missing:
    return max((1e3 * gap for gap in _gaps(served)), default=NOTHING)


def _rate(count: Callable[[Served, Context], float]) -> Compute:
    return lambda served, context: count(served, context) / served.seconds if served.seconds > 0 else NOTHING


def _output_tokens(served: Served, context: Context) -> float:
    return sum(served.in_window(request.token_times) for request in served.requests)


def _input_tokens(served: Served, context: Context) -> float:
    return sum(r.prompt_tokens for r in served.requests if served.in_window(r.token_times[:1]))


def _completed(served: Served, context: Context) -> float:
    return sum(1 for request in served.requests if not request.error)


def _good(served: Served, context: Context) -> float:
    return sum(1 for request in served.requests if context.slo.met_by(request))


def _kept_share(served: Served, context: Context) -> float | Missing:
    return _good(served, context) / len(served.requests) if served.requests else NOTHING


def _of_engine(compute: Callable[[Served], float | Missing]) -> Compute:
    return lambda served, context: compute(served) if served.records else NOT_A_PEERS


def _hit_rate(served: Served, context: Context) -> float | Missing:
    if not served.records and not (served.host is not None and served.host.tells_cached):
        return NOT_A_PEERS
    asked = sum(request.prompt_tokens for request in served.requests)
    return sum(request.cached_tokens for request in served.requests) / asked if asked else NOTHING


def _mean_over_time(value: Callable[[StepRecord], float], per: Callable[[StepRecord], float]) -> Compute:
    """Ratio of two sums over the steps, each weighted by how long it took. Idle time between steps counts nothing."""

    def compute(served: Served) -> float | Missing:
        lasted = [record.end_time - record.start_time for record in served.records]
        below = sum(t * per(record) for t, record in zip(lasted, served.records, strict=True))
        above = sum(t * value(record) for t, record in zip(lasted, served.records, strict=True))
        return above / below if below > 0 else NOTHING

    return _of_engine(compute)


def _total(value: Callable[[StepRecord], float]) -> Compute:
    return _of_engine(lambda served: float(sum(value(record) for record in served.records)))


def _mean(value: Callable[[StepRecord], float]) -> Compute:
    return _of_engine(lambda served: sum(value(record) for record in served.records) / len(served.records))


def _batch_size(served: Served) -> float | Missing:
    decoding = [record.decode_tokens for record in served.records if record.decode_tokens]
    return sum(decoding) / len(decoding) if decoding else NOTHING


def _accepted(served: Served) -> int:
    return sum(sum(record.accepted) for record in served.records)


def _drafted(served: Served) -> int:
    return sum(sum(record.drafted) for record in served.records)


def _at(place: int, counts: Callable[[StepRecord], tuple[int, ...]]) -> Callable[[StepRecord], int]:
    return lambda record: counts(record)[place] if place < len(counts(record)) else 0


def _of_drafts(compute: Callable[[Served], tuple[float, float]]) -> Compute:
    """A ratio, where there were drafts at all."""

    def ratio(served: Served) -> float | Missing:
        above, below = compute(served)
        return above / below if below else NO_DRAFTS

    return _of_engine(ratio)


def _tried(served: Served) -> int:
    """Drafts before which all were accepted. Those behind a rejected one were never tried."""
    total = 0
    for record in served.records:
        before = (*record.drafted[:1], *record.accepted)
        total += sum(map(min, before, record.drafted))
    return total


def _acceptance_at(place: int) -> Compute:
    def ratio(served: Served) -> tuple[float, float]:
        accepted, drafted = _at(place, lambda r: r.accepted), _at(place, lambda r: r.drafted)
        return sum(map(accepted, served.records)), sum(map(drafted, served.records))

    return _of_drafts(ratio)


def _verified_rows(served: Served) -> int:
    return sum(map(_at(0, lambda r: r.drafted), served.records))


def _by_formula(served: Served) -> float | Missing:
    """Tokens a second of a batch that decodes: Leviathan et al. 2023, from what the pass's own steps say."""
    steps = [r for r in served.records if r.decode_tokens and not r.prefill_tokens]
    rows, seconds = sum(r.decode_tokens for r in steps), sum(r.end_time - r.start_time for r in steps)
    if not seconds:
        return NOTHING
    decoding = replace(served, records=tuple(steps))
    tried = _tried(decoding)
    whole, part = divmod(_drafted(decoding) / rows, 1)
    acceptance = _accepted(decoding) / tried if tried else 0.0
    tokens = expected_tokens(acceptance, int(whole)) + part * acceptance ** (whole + 1)
    return rows * tokens / seconds


def _share_of_formula(served: Served, context: Context) -> float | Missing:
    if not served.records:
        return NOT_A_PEERS
    formula = _by_formula(served)
    return formula if isinstance(formula, Missing) else _rate(_output_tokens)(served, context) / formula  # type: ignore[operator]


def _draft_time_share(served: Served) -> tuple[float, float]:
    drafting = [record for record in served.records if record.draft_s or record.drafted]
    return sum(r.draft_s for r in drafting), sum(r.end_time - r.start_time for r in drafting)


def _cpu_us(seconds: Callable[[HostUse], float | None]) -> Compute:
    """A streamed token."""

    def compute(served: Served, context: Context) -> float | Missing:
        if served.host is None:
            return NOT_OVER_HTTP
        used = seconds(served.host)
        if used is None:
            return NOT_TOLD
        tokens = _output_tokens(served, context)
        return 1e6 * used / tokens if tokens else NOTHING

    return compute


def _tokens_per_read(served: Served, context: Context) -> float | Missing:
    if served.host is None:
        return NOT_OVER_HTTP
    reads = sum(len(set(request.token_times)) for request in served.requests)
    return sum(len(request.token_times) for request in served.requests) / reads if reads else NOTHING


def _roofline(part: Callable[[Utilization], float]) -> Compute:
    def compute(served: Served, context: Context) -> float | Missing:
        if not served.records:
            return NOT_A_PEERS
        if context.utilization is None:
            return Missing(context.no_utilization, applies=False)
        found = context.utilization(served.records)
        return NOTHING if found is None else part(found)

    return compute


def _request(label: str, unit: str, better: Better, compute: Compute) -> Formula:
    return Formula(Metric(label, unit, better), compute)


def _pass(label: str, unit: str, better: Better, compute: Compute) -> Formula:
    return Formula(Metric(label, unit, better), compute, of_requests=False)


_HIGH, _LOW = Better.higher, Better.lower

SERVING: dict[str, Formula] = {
    **_times("ttft", "time to first token", "request", lambda s: [r.ttft for r in s.requests]),
    **_times("itl", "inter-token latency", "gap", _gaps),
    "itl_max_ms": _request("inter-token latency, longest gap", "ms", _LOW, _longest_gap),
    **_times("tpot", "time per output token after the first", "request", lambda s: [r.tpot for r in s.requests]),
    **_times("e2e", "end-to-end latency", "request", lambda s: [r.e2e for r in s.requests]),
    "output_tokens_per_s": _request("output tokens per second", "tokens/s", _HIGH, _rate(_output_tokens)),
    "input_tokens_per_s": _request("prompt tokens per second", "tokens/s", _HIGH, _rate(_input_tokens)),
    "requests_per_s": _request("requests per second", "requests/s", _HIGH, _rate(_completed)),
    "goodput_rps": _request("requests per second that met every SLO", "requests/s", _HIGH, _rate(_good)),
    "slo_share": _request("share of the requests that met every SLO", "", _HIGH, _kept_share),
    "slo_rate_rps": _pass(
        "highest rate of arrivals at which requests met the SLO", "requests/s", _HIGH, lambda s, c: NOT_SEARCHED
    ),
    "total_s": _pass("time for the whole workload", "s", _LOW, lambda s, c: s.seconds),
    "prefix_hit_rate": _request("share of prompt tokens found in the prefix cache", "", _HIGH, _hit_rate),
    "preemptions": _request(
        "preemptions", "", _LOW, _of_engine(lambda s: float(sum(r.preemptions for r in s.requests)))
    ),
    "kv_utilization": _pass(
        "KV slots in use / reserved",
        "",
        _HIGH,
        _mean_over_time(lambda r: r.kv.used_slots, lambda r: r.kv.reserved_slots),
    ),
    "kv_used_share": _pass(
        "share of the KV blocks in use",
        "",
        _LOW,
        _mean_over_time(lambda r: r.kv.used_blocks, lambda r: r.kv.total_blocks),
    ),
    "kv_cached_blocks": _pass(
        "free KV blocks that hold a cached prefix",
        "blocks",
        _HIGH,
        _mean_over_time(lambda r: r.kv.cached_blocks, lambda r: 1),
    ),
    "evictions": _pass("cached KV blocks overwritten", "blocks", _LOW, _total(lambda r: r.evictions)),
    "swapped_blocks": _pass(
        "KV blocks moved to host memory or back",
        "blocks",
        _LOW,
        _total(lambda r: r.swapped_out_blocks + r.swapped_in_blocks),
    ),
    "steps": _pass("engine steps", "steps", _LOW, _total(lambda r: 1)),
    "step_ms": _pass("time of an engine step, mean", "ms", _LOW, _mean(lambda r: 1e3 * (r.end_time - r.start_time))),
    "schedule_ms": _pass("time to schedule a step, mean", "ms", _LOW, _mean(lambda r: 1e3 * r.schedule_s)),
    "tokens_per_step": _pass(
        "tokens computed in a step, mean", "tokens", _HIGH, _mean(lambda r: r.prefill_tokens + r.verified_tokens)
    ),
    "batch_size": _pass("requests that decode together, mean", "requests", _HIGH, _of_engine(_batch_size)),
    "acceptance": _pass(
        "share of the tried drafts that were accepted", "", _HIGH, _of_drafts(lambda s: (_accepted(s), _tried(s)))
    ),
    **{
        f"acceptance_{place + 1}": _pass(
            f"share of the drafts in place {place + 1} that were accepted", "", _HIGH, _acceptance_at(place)
        )
        for place in range(PLACES)
    },
    "accepted_length": _pass(
        "tokens that a request with drafts gets in a step, mean",
        "tokens",
        _HIGH,
        _of_drafts(lambda s: (_verified_rows(s) + _accepted(s), _verified_rows(s))),
    ),
    "tokens_per_decode": _pass(
        "tokens that a running request gets in a step, mean",
        "tokens",
        _HIGH,
        _of_engine(lambda s: 1 + _accepted(s) / max(1, sum(r.decode_tokens for r in s.records))),
    ),
    "drafts_per_decode": _pass(
        "drafts of a running request in a step, mean",
        "tokens",
        _LOW,
        _of_engine(lambda s: _drafted(s) / max(1, sum(r.decode_tokens for r in s.records))),
    ),
    "formula_tokens_per_s": _pass(
        "output tokens per second by Leviathan's formula", "tokens/s", _HIGH, _of_engine(_by_formula)
    ),
    "formula_share": _pass("output tokens per second, measured / by Leviathan's formula", "", _HIGH, _share_of_formula),
    "draft_time_share": _pass(
        "share of the time of steps with drafts that the draft model takes", "", _LOW, _of_drafts(_draft_time_share)
    ),
    "wasted_tokens": _pass(
        "drafts that were rejected", "tokens", _LOW, _of_engine(lambda s: float(_drafted(s) - _accepted(s)))
    ),
    "peak_memory_mib": _pass(
        "peak memory", "MiB", _LOW, lambda s, c: UNKNOWN_MEMORY if s.peak_memory is None else s.peak_memory / 2**20
    ),
    "api_cpu_us": _pass("CPU of the API processes, a token", "us", _LOW, _cpu_us(lambda host: host.api_s)),
    "engine_cpu_us": _pass("CPU of the engine process, a token", "us", _LOW, _cpu_us(lambda host: host.engine_s)),
    "client_cpu_us": _pass("CPU of the load client, a token", "us", _LOW, _cpu_us(lambda host: host.client_s)),
    "client_busy": _pass(
        "share of the time that the busiest process of the load client computes",
        "",
        _LOW,
        lambda s, c: NOT_OVER_HTTP if s.host is None else s.host.client_busy,
    ),
    "tokens_per_read": _pass("tokens that a client reads at once, mean", "tokens", _LOW, _tokens_per_read),
    "mbu": _pass("memory bandwidth utilization", "", _HIGH, _roofline(lambda u: u.mbu)),
    "mfu": _pass("compute utilization", "", _HIGH, _roofline(lambda u: u.mfu)),
    "floor_ms": _pass(
        "least time that the hardware allows a step, mean", "ms", _LOW, _roofline(lambda u: 1e3 * u.floor_s)
    ),
    "gpu_idle_share": _pass(
        "share of a decode step that the GPU waits for the next", "", _LOW, lambda s, c: NOT_PROFILED
    ),
}

OF_SEARCHES = ("slo_rate_rps",)  # of several passes: see rate_search.py
OF_PROFILES = ("gpu_idle_share",)  # and of no timed pass: see profile.py
