"""GET /metrics: the engine's Stats for Prometheus. Names and meanings are those that vLLM's users know, under the
prefix mini_infer.

The engine sends Stats at most every 0.1 s. They count since its start, histograms too, so that everything here is read
off the latest ones when Prometheus asks, and every API process of an engine answers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mini_infer.serving.histograms import BOUNDS, Histogram
from mini_infer.serving.processes.wire import Ready, Stats

PREFIX = "mini_infer:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Between consecutive tokens of a request.",
    "request_time_per_output_token_seconds": "A request's mean time of the tokens after its first.",
    "e2e_request_latency_seconds": "Arrival to end.",
    "request_queue_time_seconds": "Arrival to first computation.",
    "request_prefill_time_seconds": "First computation to first token.",
    "request_decode_time_seconds": "First token to end.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
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
    "spec_decode_num_drafts": "Times that a request's last token was verified with drafts behind it.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that were accepted.",
}


class Metrics:
    """One engine's metrics, labelled with the model's name.

    Args:
        latest: the Stats to read.
        own_process: with process_*, of this process; where several answer in turn, they would say nothing.
    """

    def __init__(self, model_name: str, info: Ready, latest: Callable[[], Stats], own_process: bool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(model_name, info, latest))
        if own_process:
            ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _Collector(Collector):
    def __init__(self, model_name: str, info: Ready, latest: Callable[[], Stats]) -> None:
        self._model_name = model_name
        self._latest = latest
        self._cache = {key: str(value) for key, value in info.settings["cache"].items()}
        self._cache["num_blocks"] = str(info.startup["num_kv_blocks"])

    def collect(self) -> Iterator[Metric]:
        stats = self._latest()
        for name, value in _gauges(stats).items():
            gauge = GaugeMetricFamily(PREFIX + name, GAUGES[name], labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, value in _counters(stats).items():
            counter = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        by_place = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their place behind the last token.",
            labels=["model_name", "position"],
        )
        for place, count in enumerate(stats.accepted):
            by_place.add_metric([self._model_name, str(place)], count)
        yield by_place
        for name, histogram in stats.histograms.items():
            yield self._histogram(name, histogram)
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Completions that ended, by how.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.ended.items():
            ended.add_metric([self._model_name, reason], count)
        yield ended
        yield from self._counted(stats.counted)
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "Settings of the KV cache.", labels=list(self._cache))
        cache.add_metric(list(self._cache.values()), 1)
        yield cache

    def _counted(self, counts: dict[str, int]) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            PREFIX + "http_responses", "Answers by path and status.", labels=["model_name", "path", "status"]
        )
        refused = CounterMetricFamily(
            PREFIX + "requests_refused", "Requests that got an error, by its code.", labels=["model_name", "reason"]
        )
        for name, count in counts.items():
            kind, *labels = name.split(" ")
            (responses if kind == "responses" else refused).add_metric([self._model_name, *labels], count)
        yield responses
        yield refused

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name], labels=["model_name"])
        bounds = [*map(floatToGoString, BOUNDS[name]), "+Inf"]
        family.add_metric(
            [self._model_name], list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum
        )
        return family


def _gauges(stats: Stats) -> dict[str, float]:
    return {
        "num_requests_running": stats.running + stats.prefilling,
        "num_requests_waiting": stats.waiting,
        "num_requests_swapped": stats.swapped,
        "kv_cache_usage_perc": stats.kv_used_blocks / max(stats.kv_total_blocks, 1),
    }


def _counters(stats: Stats) -> dict[str, float]:
    return {
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_cache_queries": stats.prefix_queried_tokens,
        "prefix_cache_hits": stats.prefix_hit_tokens,
        "prefix_cache_evictions": stats.evictions,
        "engine_steps": stats.steps,
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": sum(stats.drafted),
        "spec_decode_num_accepted_tokens": sum(stats.accepted),
    }
