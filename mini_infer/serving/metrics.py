"""GET /metrics: the engines' Stats for Prometheus, under the prefix mini_infer.

An engine sends Stats at most every 0.1 s. Everything here is read off the latest ones when Prometheus asks, and every
API process answers the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mini_infer.serving.link.replica import Replica
from mini_infer.serving.link.wire import Ready
from mini_infer.serving.stats import HISTOGRAMS, METRICS, Gauge, Histogram

PREFIX = "mini_infer:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
        up = [((replica.number,), float(replica.failure is None)) for replica in self._replicas]
        yield self._family(GaugeMetricFamily, "replica_up", "Whether the replica can be asked.", up)
        asked = [(replica.number, replica.stats) for replica in self._replicas if replica.failure is None]
        for name, kind in METRICS.items():
            family = GaugeMetricFamily if isinstance(kind, Gauge) else CounterMetricFamily
            yield self._family(family, name, kind.help, [((number,), getattr(told, name)) for number, told in asked])
        yield self._family(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their place behind the last token.",
            [((number, place), count) for number, told in asked for place, count in enumerate(told.accepted)],
            "position",
        )
        for name, (text, bounds) in HISTOGRAMS.items():
            histograms = [(number, told.histograms[name]) for number, told in asked if name in told.histograms]
            yield self._histogram(name, text, bounds, histograms)
        yield self._family(
            CounterMetricFamily,
            "request_success",
            "Completions that ended, by how.",
            [((number, reason), count) for number, told in asked for reason, count in told.ended.items()],
            "finished_reason",
        )
        yield from self._counted([told.counted for _, told in asked])
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
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Iterable[tuple[tuple[Any, ...], float]],
        *labels: str,
    ) -> Metric:
        """
        Args:
            values: each behind its replica's number and what the further labels are.
        """
        family = kind(PREFIX + name, text, labels=["model_name", "replica", *labels])
        for told, value in values:
            family.add_metric([self._model_name, *map(str, told)], value)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], histograms: Sequence[tuple[int, Histogram]]
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", "replica"])
        names = [*map(floatToGoString, bounds), "+Inf"]
        for number, histogram in histograms:
            buckets = list(zip(names, accumulate(histogram.counts), strict=True))
            family.add_metric([self._model_name, str(number)], buckets, histogram.sum)
        return family
