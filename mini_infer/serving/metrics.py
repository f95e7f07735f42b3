"""GET /metrics: the engine's Stats for Prometheus. Names and meanings are those that vLLM's users know, under the
prefix mini_infer.

The engine sends Stats at most every 0.1 s; between two of them nothing here costs anything. Gauges and counters are
read off the latest Stats when Prometheus asks; only the histograms are kept here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mini_infer.serving.wire import Finished, Ready, Stats

PREFIX = "mini_infer:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between consecutive tokens of a request.", TOKEN_S),
    "request_time_per_output_token_seconds": ("A request's mean time of the tokens after its first.", TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to end.", REQUEST_S),
    "request_queue_time_seconds": ("Arrival to first computation.", REQUEST_S),
    "request_prefill_time_seconds": ("First computation to first token.", REQUEST_S),
    "request_decode_time_seconds": ("First token to end.", REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", TOKENS),
}
GAUGES = {
    "num_requests_running": "Requests that hold a place in the batch.",
    "num_requests_waiting": "Requests that wait for a place in the batch.",
    "num_requests_swapped": "Requests whose KV lies in host memory.",
    "kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all of them.",
}
COUNTERS = {
    "num_preemptions": "Requests that gave their KV blocks up for others.",
    "prompt_tokens": "Prompt tokens computed, or found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_evictions": "Cached KV blocks given to others.",
    "engine_steps": "Steps of the engine.",
}


class Metrics:
    """One engine's metrics, labelled with the model's name."""

    def __init__(self, model_name: str, info: Ready) -> None:
        self._registry = CollectorRegistry()
        self._collector = _Collector(model_name, info)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)  # of the API process

    def take(self, stats: Stats) -> None:
        """Called with all Stats in turn."""
        self._collector.take(stats)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _Histogram:
    """Counts by bucket. prometheus_client's own takes 2 us a value, and there is one for every token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def family(self, name: str, text: str, model_name: str) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric([model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class _Collector(Collector):
    """Gauges and counters as the last Stats have them, and histograms of all that ended."""

    def __init__(self, model_name: str, info: Ready) -> None:
        self._model_name = model_name
        self._cache = {key: str(value) for key, value in info.settings["cache"].items()}
        self._cache["num_blocks"] = str(info.startup["num_kv_blocks"])
        self._stats: Stats | None = None
        self._ended: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0, "deadline": 0})
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def take(self, stats: Stats) -> None:
        self._stats = stats
        for finished in stats.finished:
            self._ended[finished.finish_reason] += 1
            for name, values in _observations(finished).items():
                self._histograms[name].observe(values)

    def collect(self) -> Iterator[Metric]:
        for name, value in self._gauges().items():
            gauge = GaugeMetricFamily(PREFIX + name, GAUGES[name], labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, value in self._counters().items():
            counter = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        for name, histogram in self._histograms.items():
            yield histogram.family(name, HISTOGRAMS[name][0], self._model_name)
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Completions that ended, by how.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._ended.items():
            ended.add_metric([self._model_name, reason], count)
        yield ended
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "Settings of the KV cache.", labels=list(self._cache))
        cache.add_metric(list(self._cache.values()), 1)
        yield cache

    def _gauges(self) -> dict[str, float]:
        stats = self._stats
        if stats is None:
            return dict.fromkeys(GAUGES, 0)
        return {
            "num_requests_running": stats.running + stats.prefilling,
            "num_requests_waiting": stats.waiting,
            "num_requests_swapped": stats.swapped,
            "kv_cache_usage_perc": stats.kv_used_blocks / max(stats.kv_total_blocks, 1),
        }

    def _counters(self) -> dict[str, float]:
        stats = self._stats
        if stats is None:
            return dict.fromkeys(COUNTERS, 0)
        return {
            "num_preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_cache_queries": stats.prefix_queried_tokens,
            "prefix_cache_hits": stats.prefix_hit_tokens,
            "prefix_cache_evictions": stats.evictions,
            "engine_steps": stats.steps,
        }


def _observations(finished: Finished) -> dict[str, Sequence[float]]:
    """What an ended completion adds to each histogram."""
    seen: dict[str, Sequence[float]] = {
        "e2e_request_latency_seconds": [finished.e2e_s],
        "request_prompt_tokens": [finished.prompt_tokens],
        "request_generation_tokens": [finished.output_tokens],
        "inter_token_latency_seconds": finished.itl_s,
    }
    if finished.queue_s is not None:
        seen["request_queue_time_seconds"] = [finished.queue_s]
    if finished.ttft_s is not None:
        seen["time_to_first_token_seconds"] = [finished.ttft_s]
        seen["request_prefill_time_seconds"] = [finished.ttft_s - (finished.queue_s or 0.0)]
        seen["request_decode_time_seconds"] = [finished.e2e_s - finished.ttft_s]
    if finished.tpot_s is not None:
        seen["request_time_per_output_token_seconds"] = [finished.tpot_s]
    return seen
