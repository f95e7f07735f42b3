"""Metrics by their names. Every latency starts at the moment a request was due to arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from experiments.lab.explain import suggest
from experiments.lab.judge.formulas import OF_PROFILES, OF_SEARCHES, SERVING, Better, Context, Metric, Missing
from experiments.lab.judge.slo import SLO
from experiments.lab.measure.traces import RequestTrace, Served
from mini_infer.core.errors import ConfigError

__all__ = [
    "OF_PROFILES",
    "OF_SEARCHES",
    "SERVING",
    "SLO",
    "Better",
    "Context",
    "Metric",
    "Missing",
    "RequestTrace",
    "Served",
    "describe",
    "measure",
    "require_classes",
    "require_known",
]

CLASS = "@"  # itl_p99_ms@stream: of the requests of class `stream`


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
    context, served = context or Context(), served.steady()
    found = {}
    for name in names:
        base, _, group = name.partition(CLASS)
        found[name] = SERVING[base].compute(_only(served, group) if group else served, context)
    return found


def _only(served: Served, group: str) -> Served:
    """The pass with those requests alone; it lasts as long as for all of them."""
    return replace(served, requests=tuple(request for request in served.requests if request.name == group))
