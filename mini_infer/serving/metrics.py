"""GET /metrics: the engines' Stats for Prometheus, under the prefix mini_infer.

An engine sends Stats at most every 0.1 s. Everything here is read off the latest ones when Prometheus asks, and every
API process answers the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

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
    "adapter_requests": ("adapter_requests", "Requests that ended, by the adapter that they had.", ("adapter",)),
    "adapter_generation_tokens": ("adapter_generation_tokens", "Tokens generated with an adapter.", ("adapter",)),
    "key_generation_tokens": ("key_generation_tokens", "Tokens generated for a key.", ("key",)),
}


class Model(Protocol):
    """`replicas` are whose Stats to read, of those that can be asked."""

    name: str
    replicas: Sequence[Replica]


class Metrics:
    """The engines' metrics, labelled with the model's name and the replica's number; with `own_process` process_* of
    this process, too: where several answer in turn, they would say nothing."""

    def __init__(self, models: Sequence[Model], own_process: bool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(models))
        if own_process:
            ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)


class _Collector(Collector):
    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        all_of_them = [((model.name, each.number), each) for model in self._models for each in model.replicas]
        up = [(labels, float(replica.failure is None)) for labels, replica in all_of_them]
        yield self._family(GaugeMetricFamily, "replica_up", "Whether the replica can be asked.", up)
        asked = [(labels, replica.stats) for labels, replica in all_of_them if replica.failure is None]
        for name, kind in METRICS.items():
            family = GaugeMetricFamily if isinstance(kind, Gauge) else CounterMetricFamily
            yield self._family(family, name, kind.help, [(labels, getattr(told, name)) for labels, told in asked])
        yield self._family(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their place behind the last token.",
            [((*labels, place), count) for labels, told in asked for place, count in enumerate(told.accepted)],
            "position",
        )
        for name, (text, bounds) in HISTOGRAMS.items():
            histograms = [(labels, told.histograms[name]) for labels, told in asked if name in told.histograms]
            yield self._histogram(name, text, bounds, histograms)
        yield self._family(
            CounterMetricFamily,
            "request_success",
            "Completions that ended, by how.",
            [((*labels, reason), count) for labels, told in asked for reason, count in told.ended.items()],
            "finished_reason",
        )
        yield from self._counted([told.counted for _, told in asked])
        infos = {model.name: info for model in self._models if (info := _first_info(model.replicas)) is not None}
        names = [*next(iter(infos.values())).settings["cache"]] if infos else []
        labels = [*dict.fromkeys([*names, "num_blocks"]), "model_name"]
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "Settings of the KV cache.", labels=labels)
        for model_name, info in infos.items():
            values = {**info.settings["cache"], "num_blocks": info.startup["num_kv_blocks"], "model_name": model_name}
            cache.add_metric([str(values[label]) for label in labels], 1)
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
            kind, _, rest = name.partition(" ")
            *labels, model_name = rest.split(" ", len(COUNTED[kind][2]))
            families[kind].add_metric([model_name, *labels], count)
        yield from families.values()

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Iterable[tuple[tuple[Any, ...], float]],
        *labels: str,
    ) -> Metric:
        """`values`: each behind its model's name, its replica's number and what the further labels are."""
        family = kind(PREFIX + name, text, labels=["model_name", "replica", *labels])
        for told, value in values:
            family.add_metric([*map(str, told)], value)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], histograms: Sequence[tuple[tuple[Any, ...], Histogram]]
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", "replica"])
        names = [*map(floatToGoString, bounds), "+Inf"]
        for labels, histogram in histograms:
            buckets = list(zip(names, accumulate(histogram.counts), strict=True))
            family.add_metric([*map(str, labels)], buckets, histogram.sum)
        return family


def _first_info(replicas: Sequence[Replica]) -> Ready | None:
    return next((replica.info for replica in replicas if replica.info is not None), None)
