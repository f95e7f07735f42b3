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

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from experiments.lab.explain import suggest
from experiments.lab.judge import stats
from experiments.lab.judge.draft_formulas import DRAFTS
from experiments.lab.judge.metrics import (
    NOT_A_PEERS,
    NOTHING,
    SLO,
    Better,
    Compute,
    Context,
    Formula,
    Metric,
    Missing,
    Samples,
    Value,
    mean,
    of_engine,
    of_pass,
    too_few,
    total,
)
from experiments.lab.judge.roofline import Floor
from experiments.lab.measure.traces import HostUse, RequestTrace, Served
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import ExpertTraffic, StepRecord

CLASS = "@"  # itl_p99_ms@stream: of the requests of class `stream`
PERCENTILES = (50, 90, 95, 99)
NOT_PROFILED = Missing("it is taken of profiled decode steps, and these were not", applies=False)
NOT_COUNTED = Missing("tokens are counted by expert where model.count_experts=true", applies=False)
NOT_EXCHANGED = Missing("it is measured with model.count_experts=true where ranks share experts", applies=False)
NOT_SEARCHED = Missing("it is what a search finds, and this was none", applies=False)
NOT_OVER_HTTP = Missing("there is no client and no server beside the engine", applies=False)
NOT_TOLD = Missing("only the processes of our own server can be asked", applies=False)
NO_COUNTER = Missing("no GPU has counted its energy", applies=False)
BURST = "what counts of the requests has come within "
UNKNOWN_MEMORY = Missing("its memory is not known", applies=False)


def _times(key: str, what: str, one: str, samples: Samples) -> dict[str, Formula]:
    """Mean and percentiles of a time in seconds, each sample with its request or, of gaps, the moment of its end."""

    def at(served: Served) -> list[tuple[Hashable, float]]:
        return [(moment, sample) for moment, sample in samples(served) if sample is not None]

    def average(served: Served, context: Context) -> float | Missing:
        return _mean([1e3 * sample for _, sample in at(served)])

    def percentile(q: int) -> Compute:
        def compute(served: Served, context: Context) -> float | Missing:
            found = at(served)
            value = stats.percentile([1e3 * sample for _, sample in found], q)
            if value is None:
                return too_few(f"{len(found)} samples do not show a P{q}, which takes {stats.samples_needed(q)}")
            beyond = {moment for moment, sample in found if 1e3 * sample >= value * (1 - 1e-9)}
            if q > 50 and len(beyond) < stats.SAMPLES_BEYOND:
                return too_few(
                    f"{len(beyond)} moments lie beyond the P{q}, which takes {stats.SAMPLES_BEYOND}: gaps of several "
                    "requests that end together are one"
                )
            return value

        return compute

    entries: dict[str, tuple[str, Compute]] = {f"{key}_ms": (f"{what}, mean {one}", average)}
    for q in PERCENTILES:
        entries[f"{key}_p{q}_ms"] = f"{what}, median {one}" if q == 50 else f"{what}, P{q}", percentile(q)
    return of_pass("ms", Better.lower, entries, of_requests=True)


def _mean(values: Sequence[float], count: int | None = None, missing: Missing = NOTHING) -> float | Missing:
    """Over their number, or another `count`; `missing` where that is 0."""
    count = len(values) if count is None else count
    return sum(values) / count if count else missing


def _gaps(served: Served) -> list[tuple[Hashable, float]]:
    """Those that end within the same millisecond have one cause."""
    found: list[tuple[Hashable, float]] = []
    for request in served.counted:
        gaps, times = request.gaps, request.token_times
        found += zip([round(1e3 * end) for end in times[len(times) - len(gaps) :]], gaps, strict=True)
    return found


def _of_requests(time: Callable[[RequestTrace], float | None]) -> Samples:
    return lambda served: [(index, time(request)) for index, request in enumerate(served.counted)]


def _rate(count: Callable[[Served], float]) -> Compute:
    def compute(served: Served, context: Context) -> float | Missing:
        if served.is_burst:
            return too_few(f"{BURST}{served.seconds:.3g} s, in which hardly one is answered: no rate could be kept up")
        return count(served) / served.seconds if served.seconds > 0 else NOTHING

    return compute


def _completed(served: Served) -> float:
    """Of an open loop without its ramps those that end meanwhile."""
    complete = [request for request in served.requests if not request.error]
    return len(complete) if served.window is None else sum(served.in_window(r.token_times[-1:]) for r in complete)


def _hit_rate(served: Served, context: Context) -> float | Missing:
    if not served.records and not (served.host and served.host.tells_cached):
        return NOT_A_PEERS
    asked = sum(request.prompt_tokens for request in served.requests)
    return sum(request.cached_tokens for request in served.requests) / asked if asked else NOTHING


def _mean_over_time(value: Callable[[StepRecord], float], per: Callable[[StepRecord], float]) -> Value:
    """Ratio of two sums over the steps, each weighted by how long it took. Idle time between steps counts nothing."""

    def compute(served: Served) -> float | Missing:
        lasted = [record.end_time - record.start_time for record in served.records]
        below = sum(t * per(record) for t, record in zip(lasted, served.records, strict=True))
        above = sum(t * value(record) for t, record in zip(lasted, served.records, strict=True))
        return above / below if below > 0 else NOTHING

    return compute


def _hits(tokens: Callable[[StepRecord], int]) -> Value:
    def compute(served: Served) -> float | Missing:
        asked = sum(request.prompt_tokens for request in served.requests)
        return sum(tokens(record) for record in served.records) / asked if asked else NOTHING

    return compute


def _of_exchanges(
    value: Callable[[ExpertTraffic], float], per: Callable[[ExpertTraffic], float] = lambda _: 1
) -> Value:
    """Mean over the steps in which tokens went to experts of other ranks, or the ratio of two sums."""

    def compute(served: Served) -> float | Missing:
        found = [record.expert_traffic for record in served.records if record.expert_traffic is not None]
        below = sum(map(per, found))
        return sum(map(value, found)) / below if below else NOT_EXCHANGED

    return compute


def _stage(name: str) -> Value:
    return _of_exchanges(lambda traffic: 1e3 * getattr(traffic, f"{name}_s"))


def _over_http(compute: Callable[[Served, HostUse], float | Missing]) -> Compute:
    return lambda served, context: NOT_OVER_HTTP if served.host is None else compute(served, served.host)


def _cpu_us(seconds: Callable[[HostUse], float | None]) -> Compute:
    """A streamed token."""

    def compute(served: Served, host: HostUse) -> float | Missing:
        used, tokens = seconds(host), _all_tokens(served)  # the time is that of the whole pass
        if used is None:
            return NOT_TOLD
        return 1e6 * used / tokens if tokens else NOTHING

    return _over_http(compute)


def _all_tokens(served: Served) -> int:
    return sum(len(request.token_times) for request in served.requests)


def _roofline(value: Callable[[Sequence[Floor], float], float]) -> Compute:
    """Of the steps' floors, and the seconds that they took: scheduling, which the host adds, is part of the gap."""

    def compute(served: Served, context: Context) -> float | Missing:
        if not served.records:
            return NOT_A_PEERS
        if context.floors is None:
            return Missing(context.no_floors, applies=False)
        seconds = sum(record.end_time - record.start_time for record in served.records)
        return value(context.floors(served.records), seconds) if seconds > 0 else NOTHING

    return compute


# Of bringing tokens to the experts of other ranks, and what they are called in a table.
STAGES = {
    "route": "time to choose experts",
    "dispatch": "time to send tokens to their experts",
    "experts": "time of the experts",
    "combine": "time to bring results back and add them up",
}

SERVING: dict[str, Formula] = {
    **_times("ttft", "time to first token", "request", _of_requests(lambda r: r.ttft)),
    **_times("itl", "inter-token latency", "gap", _gaps),
    **_times("tpot", "time per output token after the first", "request", _of_requests(lambda r: r.tpot)),
    **_times("e2e", "end-to-end latency", "request", _of_requests(lambda r: r.e2e)),
    **of_pass("ms", Better.lower, {
        "itl_max_ms": ("inter-token latency, longest gap",
                       lambda s, c: max((1e3 * gap for _, gap in _gaps(s)), default=NOTHING)),
    }, of_requests=True),
    **of_pass("tokens/s", Better.higher, {
        "output_tokens_per_s": ("output tokens per second", _rate(
            lambda s: sum(s.in_window(r.token_times) for r in s.requests))),
        "input_tokens_per_s": ("prompt tokens per second", _rate(
            lambda s: sum(r.prompt_tokens for r in s.requests if s.in_window(r.token_times[:1])))),
    }, of_requests=True),
    **of_pass("requests/s", Better.higher, {
        "requests_per_s": ("requests per second", _rate(_completed)),
        "goodput_rps": ("requests per second that met every SLO",
                        lambda s, c: _rate(lambda served: sum(map(c.slo.met_by, served.counted)))(s, c)),
    }, of_requests=True),
    **of_pass("requests/s", Better.higher, {
        "slo_rate_rps": ("highest rate of arrivals at which requests met the SLO", lambda s, c: NOT_SEARCHED),
    }),
    **of_pass("", Better.higher, {
        "slo_share": ("share of the requests that met every SLO",
                      lambda s, c: sum(map(c.slo.met_by, s.counted)) / len(s.counted) if s.counted else NOTHING),
        "prefix_hit_rate": ("share of prompt tokens found in the prefix cache", _hit_rate),
    }, share=True, of_requests=True),
    **of_pass("", Better.lower, {
        "preemptions": ("preemptions",
                        lambda s, c: float(sum(r.preemptions for r in s.requests)) if s.records else NOT_A_PEERS),
    }, of_requests=True),
    **of_pass("s", Better.lower, {"total_s": ("time for the whole workload", lambda s, c: s.took)}),
    **of_engine("", Better.higher, {
        "kv_utilization": ("KV slots in use / reserved",
                           _mean_over_time(lambda r: r.kv.used_slots, lambda r: r.kv.reserved_slots)),
        "host_hit_rate": ("share of prompt tokens that came back from host memory", _hits(lambda r: r.host_hit_tokens)),
        "disk_hit_rate": ("share of prompt tokens that came back from files", _hits(lambda r: r.disk_hit_tokens)),
    }, share=True),
    **of_engine("", Better.lower, {
        "kv_used_share": ("share of the KV blocks in use",
                          _mean_over_time(lambda r: r.kv.used_blocks, lambda r: r.kv.total_blocks)),
    }, share=True),
    **of_engine("blocks", Better.higher, {
        "kv_cached_blocks": ("free KV blocks that hold a cached prefix",
                             _mean_over_time(lambda r: r.kv.cached_blocks, lambda r: 1)),
    }),
    **of_engine("blocks", Better.lower, {
        "evictions": ("cached KV blocks overwritten", total(lambda r: r.evictions)),
        "swapped_blocks": ("KV blocks moved to host memory or back",
                           total(lambda r: r.swapped_out_blocks + r.swapped_in_blocks)),
        "tier_blocks": ("KV blocks of prefixes copied to host memory or back",
                        total(lambda r: r.saved_blocks + r.loaded_blocks)),
        "file_blocks": ("KV blocks of prefixes written to files or read",
                        total(lambda r: r.written_blocks + r.read_blocks)),
    }),
    **of_engine("steps", Better.lower, {"steps": ("engine steps", total(lambda r: 1))}),
    **of_engine("ms", Better.lower, {
        "step_ms": ("time of an engine step, mean", mean(lambda r: 1e3 * (r.end_time - r.start_time))),
        "schedule_ms": ("time to schedule a step, mean", mean(lambda r: 1e3 * r.schedule_s)),
        **{f"{stage}_ms": (f"{what}, mean step", _stage(stage)) for stage, what in STAGES.items()},
    }),
    **of_engine("tokens", Better.higher, {
        "tokens_per_step": ("tokens computed in a step, mean", mean(lambda r: r.prefill_tokens + r.verified_tokens)),
    }),
    **of_engine("requests", Better.higher, {
        "batch_size": ("requests that decode together, mean",
                       lambda s: _mean([r.decode_rows for r in s.records if r.decode_rows])),
    }),
    **of_engine("", Better.lower, {
        "expert_imbalance": ("tokens of a layer's busiest expert / of its average one, mean step",
                             lambda s: _mean([r.expert_imbalance for r in s.records if r.expert_imbalance is not None],
                                             missing=NOT_COUNTED)),
        "rank_imbalance": ("tokens of the experts of a layer's busiest rank / of its average one, mean step",
                           lambda s: _mean([r.rank_imbalance for r in s.records if r.rank_imbalance is not None],
                                           missing=NOT_EXCHANGED)),
        "exchange_excess": ("those bytes / a row there and back for each rank with a token's experts",
                            _of_exchanges(lambda t: t.sent_bytes, lambda t: t.ideal_bytes)),
    }),
    **of_engine("MB", Better.lower, {
        "exchange_mb": ("bytes of a step to experts of other ranks and back, mean",
                        _of_exchanges(lambda t: t.sent_bytes / 1e6)),
    }),
    **DRAFTS,
    **of_pass("bytes", Better.lower, {
        "kv_token_bytes": ("KV of a token",
                           lambda s, c: UNKNOWN_MEMORY if s.kv_token_bytes is None else float(s.kv_token_bytes)),
    }),
    **of_pass("MiB", Better.lower, {
        "peak_memory_mib": ("peak memory",
                            lambda s, c: UNKNOWN_MEMORY if s.peak_memory is None else s.peak_memory / 2**20),
    }),
    **of_pass("J", Better.lower, {
        "joules_per_token": ("energy of the GPU, a token",
                             lambda s, c: NO_COUNTER if s.joules is None else _mean([s.joules], _all_tokens(s))),
    }),
    **of_pass("us", Better.lower, {
        "api_cpu_us": ("CPU of the API processes, a token", _cpu_us(lambda host: host.api_s)),
        "engine_cpu_us": ("CPU of the engine process, a token", _cpu_us(lambda host: host.engine_s)),
        "client_cpu_us": ("CPU of the load client, a token", _cpu_us(lambda host: host.client_s)),
    }),
    **of_pass("tokens", Better.lower, {
        "tokens_per_read": ("tokens that a client reads at once, mean", _over_http(
            lambda s, _: _mean([_all_tokens(s)], sum(len(set(r.token_times)) for r in s.requests)))),
    }),
    **of_pass("", Better.lower, {
        "client_busy": ("share of the time that the busiest process of the load client computes",
                        _over_http(lambda served, host: host.client_busy)),
        "gpu_idle_share": ("share of a decode step that the GPU waits for the next", lambda s, c: NOT_PROFILED),
    }, share=True),
    **of_pass("", Better.higher, {
        "mbu": ("memory bandwidth utilization", _roofline(lambda floors, s: sum(f.memory_s for f in floors) / s)),
        "mfu": ("compute utilization", _roofline(lambda floors, s: sum(f.compute_s for f in floors) / s)),
    }),
    **of_pass("ms", Better.lower, {
        "floor_ms": ("least time that the hardware allows a step, mean",
                     _roofline(lambda floors, s: 1e3 * sum(f.seconds for f in floors) / len(floors))),
    }),
}  # fmt: skip

OF_SEARCHES = ("slo_rate_rps",)  # of several passes: see rate_search.py
OF_PROFILES = ("gpu_idle_share",)  # and of no timed pass: see profile.py


def describe(name: str) -> Metric:
    """`ttft_ms`, or of one class of requests `ttft_ms@stream`."""
    base, _, group = name.partition(CLASS)
    metric = SERVING[base].metric
    return replace(metric, label=f"{metric.label}, of {group}") if group else metric


def require_known(names: Sequence[str], slo: SLO) -> None:
    """Raises ConfigError with the closest match."""
    for name in names:
        base, at, group = name.partition(CLASS)
        if base not in SERVING:
            raise ConfigError(f"unknown metric {base!r}{suggest(base, SERVING)}")
        if at and not SERVING[base].of_requests:
            known = ", ".join(key for key, formula in SERVING.items() if formula.of_requests)
            raise ConfigError(f"metric {name!r}: {base} is taken of the whole pass. Of one class of requests: {known}")
        if at and not group:
            raise ConfigError(f"metric {name!r} names no class of requests: write {base}@<name>, or {base} for all")
        if base in ("goodput_rps", "slo_share", "slo_rate_rps") and not slo.bounds:
            raise ConfigError(f"the metric {base} needs experiment.slo, such as {{ttft_ms: 500, tpot_ms: 50}}")


def require_classes(names: Sequence[str], classes: Iterable[str], where: str) -> None:
    """Raises ConfigError where a metric is asked of a class that the workload does not have."""
    known = sorted({c for c in classes if c})
    for name in names:
        _, _, group = name.partition(CLASS)
        if group and group not in known:
            raise ConfigError(f"metric {name!r}: {where} has no requests called {group!r}{suggest(group, known)}")


def measure(served: Served, names: Sequence[str], context: Context | None = None) -> Mapping[str, float | Missing]:
    context, found = context or Context(), {}
    for name in names:
        base, _, group = name.partition(CLASS)
        own = tuple(request for request in served.requests if group in ("", request.name))  # in as long a pass
        found[name] = SERVING[base].compute(replace(served, requests=own), context)
    return found
