"""Every metric of a timed pass: its formula, its unit, and which way is better. docs/metrics.md says the same in words
and draws it, with what each leaves out; a test holds that list and this one together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from experiments.lab.config import explain
from experiments.lab.judge import stats
from experiments.lab.judge.draft_formulas import DRAFTS
from experiments.lab.judge.metrics import (
    HIGHER,
    LOWER,
    NOT_A_PEERS,
    NOTHING,
    SLO,
    Compute,
    Context,
    Formula,
    Metric,
    Missing,
    Samples,
    mean,
    of_engine,
    of_pass,
    of_requests,
    too_few,
    total,
)
from experiments.lab.judge.roofline import Floor
from experiments.lab.measure.traces import HostUse, Served
from experiments.lab.store.rows import BURST
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import ExpertTraffic, StepRecord

CLASS = "@"  # itl_p99_ms@stream: of the requests of class `stream`
NOT_PROFILED = Missing("it is taken of profiled decode steps, and these were not", applies=False)
NOT_COUNTED = Missing("tokens are counted by expert where model.count_experts=true", applies=False)
NOT_EXCHANGED = Missing("it is measured with model.count_experts=true where ranks share experts", applies=False)
NOT_SEARCHED = Missing("it is what a search finds, and this was none", applies=False)
NOT_OVER_HTTP = Missing("there is no client and no server beside the engine", applies=False)
NOT_TOLD = Missing("only the processes of our own server can be asked", applies=False)
NO_COUNTER = Missing("no GPU has counted its energy", applies=False)
OfStep = Callable[[StepRecord], float]
OfExchange = Callable[[ExpertTraffic], float]
UNKNOWN_MEMORY = Missing("its memory is not known", applies=False)


def _times(key: str, what: str, one: str, samples: Samples) -> dict[str, Formula]:
    """Mean and percentiles of a time in seconds, each sample with its request or, of gaps, the moment of its end."""

    def compute(q: int | None, served: Served, context: Context) -> float | Missing:
        found = [(moment, 1e3 * sample) for moment, sample in samples(served) if sample is not None]
        times = [ms for _, ms in found]
        if q is None:
            return _mean(times)
        value = stats.percentile(times, q)
        if value is None:
            return too_few(f"{len(found)} samples do not show a P{q}, which takes {stats.samples_needed(q)}")
        beyond = {moment for moment, ms in found if ms >= value * (1 - 1e-9)}
        if q > 50 and len(beyond) < stats.SAMPLES_BEYOND:
            takes = f"takes {stats.SAMPLES_BEYOND}: gaps of several requests that end together are one"
            return too_few(f"{len(beyond)} moments lie beyond the P{q}, which {takes}")
        return value

    labels = {None: f"mean {one}", 50: f"median {one}", 90: "P90", 95: "P95", 99: "P99"}
    return {f"{key}{f'_p{q}' if q else ''}_ms": of_requests(f"{what}, {label}", "ms", LOWER, partial(compute, q))
            for q, label in labels.items()}  # fmt: skip


def _mean(values: Sequence[float], count: float | None = None, missing: Missing = NOTHING) -> float | Missing:
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


def _rate(count: Callable[[Served], float], served: Served, _: Context) -> float | Missing:
    if served.is_burst:
        return too_few(f"{BURST}{served.arriving_s:.3g} s, in which hardly one is answered: no rate could be kept up")
    return count(served) / served.seconds if served.seconds > 0 and served.counted else NOTHING


def _kv_utilization(served: Served) -> float | Missing:
    """Each step counts by how long it took. Idle time between steps counts nothing."""
    lasted = [(record.end_time - record.start_time, record.kv) for record in served.records]
    reserved = sum(seconds * kv.reserved_slots for seconds, kv in lasted)
    return sum(seconds * kv.used_slots for seconds, kv in lasted) / reserved if reserved > 0 else NOTHING


def _completed(served: Served) -> float:
    """Of an open loop without its ramps those that end meanwhile."""
    complete = [request for request in served.requests if not request.error]
    return len(complete) if served.window is None else sum(served.in_window(r.token_times[-1:]) for r in complete)


def _all_tokens(served: Served) -> int:
    return sum(len(request.token_times) for request in served.requests)


def _asked(served: Served) -> int:
    return sum(request.prompt_tokens for request in served.requests)


def _hits(tokens: OfStep, served: Served) -> float | Missing:
    return _mean([tokens(record) for record in served.records], _asked(served))


def _of_exchanges(value: OfExchange, served: Served, per: OfExchange = lambda _: 1) -> float | Missing:
    """Mean over the steps in which tokens went to experts of other ranks, or the ratio of two sums."""
    found = [record.expert_traffic for record in served.records if record.expert_traffic is not None]
    return _mean([value(traffic) for traffic in found], sum(map(per, found)), NOT_EXCHANGED)


def _stage(name: str, served: Served) -> float | Missing:
    return _of_exchanges(lambda traffic: 1e3 * getattr(traffic, f"{name}_s"), served)


def _over_http(compute: Callable[[Served, HostUse], float | Missing]) -> Compute:
    return lambda served, context: NOT_OVER_HTTP if served.host is None else compute(served, served.host)


def _cpu_us(seconds: Callable[[HostUse], float | None]) -> Compute:
    """A streamed token; `seconds` are of the whole pass."""

    def compute(served: Served, host: HostUse) -> float | Missing:
        used = seconds(host)
        return NOT_TOLD if used is None else _mean([1e6 * used], _all_tokens(served))

    return _over_http(compute)


def _roofline(value: Callable[[Sequence[Floor], float], float], served: Served, context: Context) -> float | Missing:
    """Of the steps' floors, and the seconds that they took: scheduling, which the host adds, is part of the gap."""
    if not served.records:
        return NOT_A_PEERS
    if context.floors is None:
        return Missing(context.no_floors, applies=False)
    seconds = sum(record.end_time - record.start_time for record in served.records)
    return value(context.floors(served.records), seconds) if seconds > 0 else NOTHING


# Of bringing tokens to the experts of other ranks, and what they are called in a table.
STAGES = {
    "route": "time to choose experts",
    "dispatch": "time to send tokens to their experts",
    "experts": "time of the experts",
    "combine": "time to bring results back and add them up",
}

SERVING: dict[str, Formula] = {
    **_times("ttft", "time to first token", "request", lambda s: enumerate(r.ttft for r in s.counted)),
    **_times("itl", "inter-token latency", "gap", _gaps),
    **_times("tpot", "time per output token after the first", "request", lambda s: enumerate(
        r.tpot for r in s.counted)),
    **_times("e2e", "end-to-end latency", "request", lambda s: enumerate(r.e2e for r in s.counted)),
    "itl_max_ms": of_requests("inter-token latency, longest gap", "ms", LOWER,
                              lambda s, c: max((1e3 * gap for _, gap in _gaps(s)), default=NOTHING)),
    "output_tokens_per_s": of_requests("output tokens per second", "tokens/s", HIGHER, partial(
        _rate, lambda s: sum(s.in_window(r.token_times) for r in s.requests))),
    "input_tokens_per_s": of_requests("prompt tokens per second", "tokens/s", HIGHER, partial(
        _rate, lambda s: sum(r.prompt_tokens for r in s.requests if s.in_window(r.token_times[:1])))),
    "requests_per_s": of_requests("requests per second", "requests/s", HIGHER, partial(_rate, _completed)),
    "goodput_rps": of_requests("requests per second that met every SLO", "requests/s", HIGHER,
                               lambda s, c: _rate(lambda served: sum(map(c.slo.met_by, served.counted)), s, c)),
    "slo_rate_rps": of_pass("highest rate of arrivals at which requests met the SLO", "requests/s", HIGHER,
                            lambda s, c: NOT_SEARCHED),
    "slo_share": of_requests("share of the requests that met every SLO", "", HIGHER,
                             lambda s, c: _mean([c.slo.met_by(r) for r in s.counted]), share=True),
    "prefix_hit_rate": of_requests("share of prompt tokens found in the prefix cache", "", HIGHER, lambda s, c:
        _mean([r.cached_tokens for r in s.requests], _asked(s))
        if s.records or (s.host and s.host.tells_cached) else NOT_A_PEERS, share=True),
    "preemptions": of_requests("preemptions", "", LOWER, lambda s, c:
        float(sum(r.preemptions for r in s.requests)) if s.records else NOT_A_PEERS),
    "total_s": of_pass("time for the whole workload", "s", LOWER, lambda s, c: s.took),
    "kv_utilization": of_engine("KV slots in use / reserved", "", HIGHER, _kv_utilization, share=True),
    "host_hit_rate": of_engine("share of prompt tokens that came back from host memory", "", HIGHER,
                               partial(_hits, lambda r: r.host_hit_tokens), share=True),
    "disk_hit_rate": of_engine("share of prompt tokens that came back from files", "", HIGHER,
                               partial(_hits, lambda r: r.disk_hit_tokens), share=True),
    "evictions": of_engine("cached KV blocks overwritten", "blocks", LOWER, total(lambda r: r.evictions)),
    "swapped_blocks": of_engine("KV blocks moved to host memory or back", "blocks", LOWER,
                                total(lambda r: r.swapped_out_blocks + r.swapped_in_blocks)),
    "tier_blocks": of_engine("KV blocks of prefixes copied to host memory or back", "blocks", LOWER,
                             total(lambda r: r.saved_blocks + r.loaded_blocks)),
    "file_blocks": of_engine("KV blocks of prefixes written to files or read", "blocks", LOWER,
                             total(lambda r: r.written_blocks + r.read_blocks)),
    "steps": of_engine("engine steps", "steps", LOWER, total(lambda r: 1)),
    "step_ms": of_engine("time of an engine step, mean", "ms", LOWER,
                         mean(lambda r: 1e3 * (r.end_time - r.start_time))),
    "schedule_ms": of_engine("time to schedule a step, mean", "ms", LOWER, mean(lambda r: 1e3 * r.schedule_s)),
    **{f"{stage}_ms": of_engine(f"{what}, mean step", "ms", LOWER, partial(_stage, stage))
       for stage, what in STAGES.items()},
    "batch_size": of_engine("requests that decode together, mean", "requests", HIGHER,
                            lambda s: _mean([r.decode_rows for r in s.records if r.decode_rows])),
    "expert_imbalance": of_engine("tokens of a layer's busiest expert / of its average one, mean step", "", LOWER,
        lambda s: _mean([x for r in s.records if (x := r.expert_imbalance) is not None], missing=NOT_COUNTED)),
    "rank_imbalance": of_engine("experts' tokens of a layer's busiest rank / of its average one, mean step", "", LOWER,
        lambda s: _mean([x for r in s.records if (x := r.rank_imbalance) is not None], missing=NOT_EXCHANGED)),
    "exchange_excess": of_engine("bytes sent / the fewest that would do", "", LOWER,
                                 partial(_of_exchanges, lambda t: t.sent_bytes, per=lambda t: t.ideal_bytes)),
    "exchange_mb": of_engine("bytes of a step to experts of other ranks and back, mean", "MB", LOWER,
                             partial(_of_exchanges, lambda t: t.sent_bytes / 1e6)),
    **DRAFTS,
    "kv_token_bytes": of_pass("KV of a token", "bytes", LOWER,
                              lambda s, c: UNKNOWN_MEMORY if s.kv_token_bytes is None else float(s.kv_token_bytes)),
    "peak_memory_mib": of_pass("peak memory", "MiB", LOWER,
                               lambda s, c: UNKNOWN_MEMORY if s.peak_memory is None else s.peak_memory / 2**20),
    "joules_per_token": of_pass("energy of the GPU, a token", "J", LOWER,
                                lambda s, c: NO_COUNTER if s.joules is None else _mean([s.joules], _all_tokens(s))),
    "api_cpu_us": of_pass("CPU of the API processes, a token", "us", LOWER, _cpu_us(lambda host: host.api_s)),
    "engine_cpu_us": of_pass("CPU of the engine process, a token", "us", LOWER, _cpu_us(lambda host: host.engine_s)),
    "client_cpu_us": of_pass("CPU of the load client, a token", "us", LOWER, _cpu_us(lambda host: host.client_s)),
    "tokens_per_read": of_pass("tokens that a client reads at once, mean", "tokens", LOWER, _over_http(
        lambda s, _: _mean([_all_tokens(s)], sum(len(set(r.token_times)) for r in s.requests)))),
    "client_busy": of_pass("share of the time that the busiest process of the load client computes", "", LOWER,
                           _over_http(lambda served, host: host.client_busy), share=True),
    "gpu_idle_share": of_pass("share of a decode step that the GPU waits for the next, under the profiler", "", LOWER,
                              lambda s, c: NOT_PROFILED, share=True),
    "mbu": of_pass("useful share of the memory bandwidth", "", HIGHER, partial(
        _roofline, lambda floors, s: sum(f.memory_s for f in floors) / s), share=True),
    "mfu": of_pass("compute utilization", "", HIGHER, partial(
        _roofline, lambda floors, s: sum(f.compute_s for f in floors) / s), share=True),
    "floor_ms": of_pass("least time that the hardware allows a step, mean", "ms", LOWER, partial(
        _roofline, lambda floors, s: 1e3 * sum(f.seconds for f in floors) / len(floors))),
}  # fmt: skip

OF_SEARCHES = ("slo_rate_rps",)  # of several passes: see rate_search.py
OF_PROFILES = ("gpu_idle_share",)  # and of no timed pass: see profile.py


def describe(name: str) -> Metric:
    """`ttft_ms`, or of one class of requests `ttft_ms@stream`."""
    base, _, group = name.partition(CLASS)
    metric = SERVING[base].metric
    return replace(metric, label=f"{metric.label}, of {group}") if group else metric


def is_share(name: str) -> bool:
    """No, of what is no metric of a pass."""
    base = name.partition(CLASS)[0]
    return base in SERVING and SERVING[base].metric.share


def require_known(names: Sequence[str], slo: SLO) -> None:
    """Raises ConfigError with the closest match."""
    for name in names:
        base, at, group = name.partition(CLASS)
        explain.require_known("unknown metric", [base], SERVING)
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
        group = name.partition(CLASS)[2]
        explain.require_known(f"metric {name!r}: {where} has no requests called", [group] if group else [], known)


def measure(served: Served, names: Sequence[str], context: Context | None = None) -> Mapping[str, float | Missing]:
    context, found = context or Context(), {}
    for name in names:
        base, _, group = name.partition(CLASS)
        own = tuple(request for request in served.requests if group in ("", request.name))  # in as long a pass
        found[name] = SERVING[base].compute(replace(served, requests=own), context)
    return found
