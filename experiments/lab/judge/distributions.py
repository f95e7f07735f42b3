"""The single requests and tokens behind a metric, from the steps and requests that a run stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.lab.measure.steps import RequestRow
from experiments.lab.store.result import Result

ALIKE = 1.05  # times the least of a variant's times


@dataclass(frozen=True)
class Distribution:
    """`values[variant]` holds times in milliseconds and how often each counts."""

    what: str  # is counted
    label: str
    values: dict[str, tuple[list[float], list[float]]]

    @property
    def differ(self) -> bool:
        """Whether some variant's times do, by more than a little: else a median says it all."""
        return any(max(times) > ALIKE * min(times) for times, _ in self.values.values())


def of(metric: str, result: Result) -> Distribution:
    """The distribution behind `metric`, whatever its percentile; `metric@name` looks at the requests of that name.

    Inter-token latencies are taken from the steps: the time from one step's end to the next one's counts once for
    each token that the step decoded."""
    base, _, name = metric.partition("@")
    base = base.split("_")[0]
    if base == "itl":
        return Distribution("decoded tokens", "inter-token latency of a token (ms)", _gaps(result))
    label, time_of = _OF_REQUEST[base]
    values: dict[str, tuple[list[float], list[float]]] = {}
    for request in result.traced:
        if request.first_token_s is None or request.end_s is None or name not in ("", request.name):
            continue
        seconds = time_of(request, request.first_token_s, request.end_s)
        if seconds is not None:
            times, weights = values.setdefault(request.variant, ([], []))
            times.append(1e3 * seconds)
            weights.append(1.0)
    return Distribution("requests", f"{label} of a request (ms)", values)


def above(times: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """`times` in order, and the share of the weight, in percent, that lies above each; it starts with all of it."""
    order = np.argsort(times, kind="stable")
    x = np.asarray(times, dtype=np.float64)[order]
    weight = np.asarray(weights, dtype=np.float64)[order]
    left = 100 * (1 - np.cumsum(weight) / weight.sum())
    left[-1] = 0.0
    return [x[0], *x.tolist()], [100.0, *left.tolist()]


_OF_REQUEST: dict[str, tuple[str, Callable[[RequestRow, float, float], float | None]]] = {
    "ttft": ("time to first token", lambda r, first, end: first - r.arrival_s),
    "e2e": ("end-to-end latency", lambda r, first, end: end - r.arrival_s),
    "tpot": (
        "time per output token after the first",
        lambda r, first, end: (end - first) / (r.output_tokens - 1) if r.output_tokens > 1 else None,
    ),
}


def _gaps(result: Result) -> dict[str, tuple[list[float], list[float]]]:
    values: dict[str, tuple[list[float], list[float]]] = {}
    for before, step in pairwise(result.steps):
        if (before.variant, before.point) == (step.variant, step.point) and step.decode_tokens:
            times, weights = values.setdefault(step.variant, ([], []))
            times.append(1e3 * (step.start_s + step.duration_s - before.start_s - before.duration_s))
            weights.append(float(step.decode_tokens))
    return values
