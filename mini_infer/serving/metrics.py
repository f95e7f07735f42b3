"""GET /metrics: the engines' Stats for Prometheus. Names and meanings are those that vLLM's users know, under the
prefix mini_infer.

An engine sends Stats at most every 0.1 s. They count since its start, histograms too, so that everything here is read
off the latest ones when Prometheus asks, and every API process answers the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mini_infer.serving.histograms import BOUNDS, Histogram
from mini_infer.serving.processes.replica import Replica
from mini_infer.serving.processes.wire import Ready, Stats

PREFIX = "mini_infer:"
LABELS = ("model_name", "replica")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Between consecutive tokens of a request.",
    "request_time_per_output_token_seconds": "A request's mean time of the tokens after its first.",
    "e2e_request_latency_seconds": "Arrival to end.",
    "request_queue_time_seconds": "Arrival to first computation.",
    "request_prefill_time_seconds": "First computation to first token.",
    "request_decode_time_seconds": "First token to end.",
    "request_kv_transfer_seconds": "Copying a prompt's KV from another engine, most of it while it was computed.",
    "request_kv_transfer_exposed_seconds": "From the end of a prompt's computation elsewhere until its KV was here.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
}
GAUGES = {
    "num_requests_running": "Requests that hold a place in the batch.",
    "num_requests_waiting": "Requests that wait for a place in the batch.",
    "num_requests_swapped": "Requests whose KV lies in host memory.",
    "num_requests_receiving": "Requests whose prompts another engine computes.",
    "kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all of them.",
    "kv_host_cached_blocks": "KV blocks of prefixes in host memory.",
}
COUNTERS = {
    "num_preemptions": "Requests that gave their KV blocks up for others.",
    "prompt_tokens": "Prompt tokens computed, or found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_host_hits": "Those that came back from host memory.",
    "prefix_cache_disk_hits": "Those that came back from files.",
    "prefix_cache_saved_bytes": "KV of prefixes copied to host memory.",
    "prefix_cache_loaded_bytes": "KV of prefixes copied back.",
    "prefix_cache_written_bytes": "KV of prefixes written to files.",
    "prefix_cache_read_bytes": "KV of prefixes read from files.",
    "prefix_cache_lost_blocks": "KV blocks that files did not give, being broken or gone, or take, on a full disk.",
    "prefix_cache_evictions": "Cached KV blocks given to others.",
    "engine_steps": "Steps of the engine.",
    "kv_transfers": "Prompts whose KV came from another engine.",
    "kv_transfers_failed": "Prompts whose KV did not come, and was computed here.",
    "kv_transfer_bytes": "Bytes of KV that came from other engines.",
    "prompts_computed_here": "Prompts that another engine could have computed, at a higher cost.",
    "spec_decode_num_drafts": "Times that a request's last token was verified with drafts behind it.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that were accepted.",
}
COUNTED = {  # by API processes: the family's name, what it tells, its labels
    "responses": ("http_responses", "Answers by path and status.", ("path", "status")),
    "refused": ("requests_refused", "Requests that got an error, by its code.", ("reason",)),
    "key_requests": ("key_requests", "Requests taken, by the name of their key.", ("key",)),
    "key_refusals": ("key_refusals", "Requests beyond the limits of their key.", ("key",)),
    "key_prompt_tokens": ("key_prompt_tokens", "Prompt tokens sent with a key.", ("key",)),
    "key_generation_tokens": ("key_generation_tokens", "Tokens generated for a key.", ("key",)),
}


class Metrics:
    """The engines' metrics, labelled with the model's name and the replica's number.

    Args:
        replicas: whose Stats to read, of those that can be asked.
        own_process: with process_*, of this process; where several answer in turn, they would say nothing.
    """

    def __init__(self, model_name: str, info: Ready, replicas: Sequence[Replica], own_process: bool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(model_name, info, replicas))
        if own_process:
            ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _Collector(Collector):
    def __init__(self, model_name: str, info: Ready, replicas: Sequence[Replica]) -> None:
        self._model_name = model_name
        self._replicas = replicas
        self._cache = {key: str(value) for key, value in info.settings["cache"].items()}
        self._cache["num_blocks"] = str(info.startup["num_kv_blocks"])

    def collect(self) -> Iterator[Metric]:
        stats = {str(replica.number): replica.stats for replica in self._replicas if replica.failure is None}
        up = {str(replica.number): float(replica.failure is None) for replica in self._replicas}
        yield self._family(GaugeMetricFamily, "replica_up", "Whether the replica can be asked.", up)
        for name, text in GAUGES.items():
            values = {number: _gauges(each)[name] for number, each in stats.items()}
            yield self._family(GaugeMetricFamily, name, text, values)
        for name, text in COUNTERS.items():
            values = {number: _counters(each)[name] for number, each in stats.items()}
            yield self._family(CounterMetricFamily, name, text, values)
        yield self._parts(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their place behind the last token.",
            "position",
            {number: dict(enumerate(each.accepted)) for number, each in stats.items()},
        )
        for name, text in HISTOGRAMS.items():
            yield self._histograms(name, text, {number: each.histograms for number, each in stats.items()})
        ended = {number: each.ended for number, each in stats.items()}
        yield self._parts("request_success", "Completions that ended, by how.", "finished_reason", ended)
        yield from self._counted([each.counted for each in stats.values()])
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "Settings of the KV cache.", labels=list(self._cache))
        cache.add_metric(list(self._cache.values()), 1)
        yield cache

    def _counted(self, counts: Sequence[Mapping[str, int]]) -> Iterator[Metric]:
        """What API processes have told one engine or another."""
        together: Counter[str] = Counter()
        for each in counts:
            together.update(each)
        families = {
            kind: CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
            for kind, (name, text, labels) in COUNTED.items()
        }
        for name, count in together.items():
            kind, *labels = name.split(" ")
            families[kind].add_metric([self._model_name, *labels], count)
        yield from families.values()

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, values: dict[str, float]
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=LABELS)
        for replica, value in values.items():
            family.add_metric([self._model_name, replica], value)
        return family

    def _parts(self, name: str, text: str, label: str, values: Mapping[str, Mapping[Any, float]]) -> Metric:
        """A counter that is told by a further label."""
        family = CounterMetricFamily(PREFIX + name, text, labels=[*LABELS, label])
        for replica, counts in values.items():
            for part, count in counts.items():
                family.add_metric([self._model_name, replica, str(part)], count)
        return family

    def _histograms(self, name: str, text: str, values: dict[str, dict[str, Histogram]]) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
        bounds = [*map(floatToGoString, BOUNDS[name]), "+Inf"]
        for replica, histograms in values.items():
            if name in histograms:  # else it has told nothing yet
                counts = accumulate(histograms[name].counts)
                buckets = list(zip(bounds, counts, strict=True))
                family.add_metric([self._model_name, replica], buckets, histograms[name].sum)
        return family


def _gauges(stats: Stats) -> dict[str, float]:
    return {
        "num_requests_running": stats.running + stats.prefilling,
        "num_requests_waiting": stats.waiting,
        "num_requests_swapped": stats.swapped,
        "num_requests_receiving": stats.receiving,
        "kv_cache_usage_perc": stats.kv_used_blocks / max(stats.kv_total_blocks, 1),
        "kv_host_cached_blocks": stats.host_cached_blocks,
    }


def _counters(stats: Stats) -> dict[str, float]:
    return {
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_cache_queries": stats.prefix_queried_tokens,
        "prefix_cache_hits": stats.prefix_hit_tokens,
        "prefix_cache_host_hits": stats.host_hit_tokens,
        "prefix_cache_disk_hits": stats.disk_hit_tokens,
        "prefix_cache_saved_bytes": stats.saved_bytes,
        "prefix_cache_loaded_bytes": stats.loaded_bytes,
        "prefix_cache_written_bytes": stats.written_bytes,
        "prefix_cache_read_bytes": stats.read_bytes,
        "prefix_cache_lost_blocks": stats.lost_blocks,
        "prefix_cache_evictions": stats.evictions,
        "engine_steps": stats.steps,
        "kv_transfers": stats.prompts_received,
        "kv_transfers_failed": stats.prompts_not_received,
        "kv_transfer_bytes": stats.received_bytes,
        "prompts_computed_here": stats.prompts_computed_here,
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": sum(stats.drafted),
        "spec_decode_num_accepted_tokens": sum(stats.accepted),
    }
