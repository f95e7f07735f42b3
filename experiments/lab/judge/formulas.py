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
    mean,
    of_engine,
    of_pass,
    of_request,
    too_few,
    total,
)
from experiments.lab.judge.roofline import Utilization, utilization
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
UNKNOWN_MEMORY = Missing("its memory is not known", applies=False)


def _times(key: str, what: str, one: str, samples: Samples) -> dict[str, Formula]:
    """Mean and percentiles of a time, `samples` in seconds, each with what sets it apart from others: a request, or of
    gaps the moment at which they end."""

    def at(served: Served) -> list[tuple[Hashable, float]]:
        return [(moment, sample) for moment, sample in samples(served) if sample is not None]

    def known(served: Served) -> list[float]:
        return [1e3 * sample for _, sample in at(served)]

    def average(served: Served, context: Context) -> float | Missing:
        found = known(served)
        return sum(found) / len(found) if found else NOTHING

    def percentile(q: int) -> Compute:
        def compute(served: Served, context: Context) -> float | Missing:
            found = known(served)
            value = stats.percentile(found, q)
            if value is None:
                return too_few(f"{len(found)} samples do not show a P{q}, which takes {stats.samples_needed(q)}")
            beyond = {moment for moment, sample in at(served) if 1e3 * sample >= value * (1 - 1e-9)}
            if q > 50 and len(beyond) < stats.SAMPLES_BEYOND:
                return too_few(
                    f"{len(beyond)} moments lie beyond the P{q}, which takes {stats.SAMPLES_BEYOND}: gaps of several "
                    "requests that end together are one"
                )
            return value

        return compute

    formulas = {f"{key}_ms": Formula(Metric(f"{what}, mean {one}", "ms", Better.lower), average)}
    for q in PERCENTILES:
        label = f"{what}, median {one}" if q == 50 else f"{what}, P{q}"
        formulas[f"{key}_p{q}_ms"] = Formula(Metric(label, "ms", Better.lower), percentile(q))
    return formulas


def _gaps(served: Served) -> list[tuple[Hashable, float]]:
    """Those that end within the same millisecond have one cause."""
    found: list[tuple[Hashable, float]] = []
    for request in served.counted:
        gaps, times = request.gaps, request.token_times
        found += zip([round(1e3 * end) for end in times[len(times) - len(gaps) :]], gaps, strict=True)
    return found


def _of_requests(time: Callable[[RequestTrace], float | None]) -> Samples:
    return lambda served: [(index, time(request)) for index, request in enumerate(served.counted)]


def _longest_gap(served: Served, context: Context) -> float | Missing:
    return max((1e3 * gap for _, gap in _gaps(served)), default=NOTHING)


def _rate(count: Callable[[Served], float]) -> Compute:
    return lambda served, context: count(served) / served.seconds if served.seconds > 0 else NOTHING


def _output_tokens(served: Served) -> float:
    return sum(served.in_window(request.token_times) for request in served.requests)


def _input_tokens(served: Served) -> float:
    return sum(r.prompt_tokens for r in served.requests if served.in_window(r.token_times[:1]))


def _completed(served: Served) -> float:
    """Of an open loop without its ramps those that end meanwhile."""
    complete = [request for request in served.requests if not request.error]
    return len(complete) if served.window is None else sum(served.in_window(r.token_times[-1:]) for r in complete)


def _goodput(served: Served, context: Context) -> float | Missing:
    return sum(map(context.slo.met_by, served.counted)) / served.seconds if served.seconds > 0 else NOTHING


def _kept_share(served: Served, context: Context) -> float | Missing:
    return sum(map(context.slo.met_by, served.counted)) / len(served.counted) if served.counted else NOTHING


def _hit_rate(served: Served, context: Context) -> float | Missing:
    if not served.records and not (served.host and served.host.tells_cached):
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

    return of_engine(compute)


def _hits(tokens: Callable[[StepRecord], int]) -> Callable[[Served], float | Missing]:
    def compute(served: Served) -> float | Missing:
        asked = sum(request.prompt_tokens for request in served.requests)
        return sum(tokens(record) for record in served.records) / asked if asked else NOTHING

    return compute


def _batch_size(served: Served) -> float | Missing:
    decoding = [record.decode_rows for record in served.records if record.decode_rows]
    return sum(decoding) / len(decoding) if decoding else NOTHING


def _expert_imbalance(served: Served) -> float | Missing:
    found = [ratio for record in served.records if (ratio := record.expert_imbalance) is not None]
    return sum(found) / len(found) if found else NOT_COUNTED


def _of_exchanges(
    value: Callable[[ExpertTraffic], float], per: Callable[[ExpertTraffic], float] | None = None
) -> Compute:
    """Mean over the steps in which tokens went to experts of other ranks, or the ratio of two sums."""

    def compute(served: Served) -> float | Missing:
        found = [record.expert_traffic for record in served.records if record.expert_traffic is not None]
        below = len(found) if per is None else sum(map(per, found))
        return sum(map(value, found)) / below if below else NOT_EXCHANGED

    return of_engine(compute)


def _milliseconds(stage: str) -> Callable[[ExpertTraffic], float]:
    return lambda traffic: 1e3 * getattr(traffic, f"{stage}_s")


def _over_http(compute: Callable[[Served, HostUse], float | Missing]) -> Compute:
    return lambda served, context: NOT_OVER_HTTP if served.host is None else compute(served, served.host)


def _cpu_us(seconds: Callable[[HostUse], float | None]) -> Compute:
    """A streamed token."""

    def compute(served: Served, host: HostUse) -> float | Missing:
        used, tokens = seconds(host), _output_tokens(served)
        if used is None:
            return NOT_TOLD
        return 1e6 * used / tokens if tokens else NOTHING

    return _over_http(compute)


def _joules_per_token(served: Served, context: Context) -> float | Missing:
    tokens = sum(len(request.token_times) for request in served.requests)
    return NO_COUNTER if served.joules is None or not tokens else served.joules / tokens


def _tokens_per_read(served: Served, host: HostUse) -> float | Missing:
    reads = sum(len(set(request.token_times)) for request in served.requests)
    return sum(len(request.token_times) for request in served.requests) / reads if reads else NOTHING


def _roofline(part: Callable[[Utilization], float]) -> Compute:
    def compute(served: Served, context: Context) -> float | Missing:
        if not served.records:
            return NOT_A_PEERS
        if context.floors is None:
            return Missing(context.no_floors, applies=False)
        found = utilization(served.records, context.floors(served.records))
        return NOTHING if found is None else part(found)

    return compute


_HIGH, _LOW = Better.higher, Better.lower

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
    "itl_max_ms": of_request("inter-token latency, longest gap", "ms", _LOW, _longest_gap),
    **_times("tpot", "time per output token after the first", "request", _of_requests(lambda r: r.tpot)),
    **_times("e2e", "end-to-end latency", "request", _of_requests(lambda r: r.e2e)),
    "output_tokens_per_s": of_request("output tokens per second", "tokens/s", _HIGH, _rate(_output_tokens)),
    "input_tokens_per_s": of_request("prompt tokens per second", "tokens/s", _HIGH, _rate(_input_tokens)),
    "requests_per_s": of_request("requests per second", "requests/s", _HIGH, _rate(_completed)),
    "goodput_rps": of_request("requests per second that met every SLO", "requests/s", _HIGH, _goodput),
    "slo_share": of_request("share of the requests that met every SLO", "", _HIGH, _kept_share),
    "slo_rate_rps": of_pass(
        "highest rate of arrivals at which requests met the SLO", "requests/s", _HIGH, lambda s, c: NOT_SEARCHED
    ),
    "total_s": of_pass("time for the whole workload", "s", _LOW, lambda s, c: s.took),
    "prefix_hit_rate": of_request("share of prompt tokens found in the prefix cache", "", _HIGH, _hit_rate),
    "preemptions": of_request(
        "preemptions", "", _LOW, of_engine(lambda s: float(sum(r.preemptions for r in s.requests)))
    ),
    "kv_utilization": of_pass(
        "KV slots in use / reserved",
        "",
        _HIGH,
        _mean_over_time(lambda r: r.kv.used_slots, lambda r: r.kv.reserved_slots),
    ),
    "kv_used_share": of_pass(
        "share of the KV blocks in use",
        "",
        _LOW,
        _mean_over_time(lambda r: r.kv.used_blocks, lambda r: r.kv.total_blocks),
    ),
    "kv_cached_blocks": of_pass(
        "free KV blocks that hold a cached prefix",
        "blocks",
        _HIGH,
        _mean_over_time(lambda r: r.kv.cached_blocks, lambda r: 1),
    ),
    "evictions": of_pass("cached KV blocks overwritten", "blocks", _LOW, total(lambda r: r.evictions)),
    "swapped_blocks": of_pass(
        "KV blocks moved to host memory or back",
        "blocks",
        _LOW,
        total(lambda r: r.swapped_out_blocks + r.swapped_in_blocks),
    ),
    "host_hit_rate": of_pass(
        "share of prompt tokens that came back from host memory",
        "",
        _HIGH,
        of_engine(_hits(lambda r: r.host_hit_tokens)),
    ),
    "disk_hit_rate": of_pass(
        "share of prompt tokens that came back from files", "", _HIGH, of_engine(_hits(lambda r: r.disk_hit_tokens))
    ),
    "tier_blocks": of_pass(
        "KV blocks of prefixes copied to host memory or back",
        "blocks",
        _LOW,
        total(lambda r: r.saved_blocks + r.loaded_blocks),
    ),
    "file_blocks": of_pass(
        "KV blocks of prefixes written to files or read",
        "blocks",
        _LOW,
        total(lambda r: r.written_blocks + r.read_blocks),
    ),
    "steps": of_pass("engine steps", "steps", _LOW, total(lambda r: 1)),
    "step_ms": of_pass("time of an engine step, mean", "ms", _LOW, mean(lambda r: 1e3 * (r.end_time - r.start_time))),
    "schedule_ms": of_pass("time to schedule a step, mean", "ms", _LOW, mean(lambda r: 1e3 * r.schedule_s)),
    "tokens_per_step": of_pass(
        "tokens computed in a step, mean", "tokens", _HIGH, mean(lambda r: r.prefill_tokens + r.verified_tokens)
    ),
    "batch_size": of_pass("requests that decode together, mean", "requests", _HIGH, of_engine(_batch_size)),
    "expert_imbalance": of_pass(
        "tokens of a layer's busiest expert / of its average one, mean step", "", _LOW, of_engine(_expert_imbalance)
    ),
    "exchange_mb": of_pass(
        "bytes of a step to experts of other ranks and back, mean",
        "MB",
        _LOW,
        _of_exchanges(lambda t: t.sent_bytes / 1e6),
    ),
    "exchange_excess": of_pass(
        "those bytes / a row there and back for each rank with a token's experts",
        "",
        _LOW,
        _of_exchanges(lambda t: t.sent_bytes, lambda t: t.ideal_bytes),
    ),
    **{
        f"{stage}_ms": of_pass(f"{what}, mean step", "ms", _LOW, _of_exchanges(_milliseconds(stage)))
        for stage, what in STAGES.items()
    },
    **DRAFTS,
    "peak_memory_mib": of_pass(
        "peak memory", "MiB", _LOW, lambda s, c: UNKNOWN_MEMORY if s.peak_memory is None else s.peak_memory / 2**20
    ),
    "joules_per_token": of_pass("energy of the GPU, a token", "J", _LOW, _joules_per_token),
    "api_cpu_us": of_pass("CPU of the API processes, a token", "us", _LOW, _cpu_us(lambda host: host.api_s)),
    "engine_cpu_us": of_pass("CPU of the engine process, a token", "us", _LOW, _cpu_us(lambda host: host.engine_s)),
    "client_cpu_us": of_pass("CPU of the load client, a token", "us", _LOW, _cpu_us(lambda host: host.client_s)),
    "client_busy": of_pass(
        "share of the time that the busiest process of the load client computes",
        "",
        _LOW,
        _over_http(lambda served, host: host.client_busy),
    ),
    "tokens_per_read": of_pass(
        "tokens that a client reads at once, mean", "tokens", _LOW, _over_http(_tokens_per_read)
    ),
    "mbu": of_pass("memory bandwidth utilization", "", _HIGH, _roofline(lambda u: u.mbu)),
    "mfu": of_pass("compute utilization", "", _HIGH, _roofline(lambda u: u.mfu)),
    "floor_ms": of_pass(
        "least time that the hardware allows a step, mean", "ms", _LOW, _roofline(lambda u: 1e3 * u.floor_s)
    ),
    "gpu_idle_share": of_pass(
        "share of a decode step that the GPU waits for the next", "", _LOW, lambda s, c: NOT_PROFILED
    ),
}

SHARES = (
    *(
        "slo_share",
        "prefix_hit_rate",
        "host_hit_rate",
        "disk_hit_rate",
        "kv_utilization",
        "kv_used_share",
        "client_busy",
        "gpu_idle_share",
    ),
    *("accepted_of_drafted", "draft_time_share", *(name for name in DRAFTS if name.startswith("acceptance"))),
)
SERVING |= {name: replace(SERVING[name], metric=replace(SERVING[name].metric, share=True)) for name in SHARES}

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
        found[name] = SERVING[base].compute(_only(served, group) if group else served, context)
    return found


def _only(served: Served, group: str) -> Served:
    """The pass with those requests alone; it lasts as long as for all of them."""
    return replace(served, requests=tuple(request for request in served.requests if request.name == group))
