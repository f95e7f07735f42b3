"""Metrics from timestamps. Every latency starts at the moment a request was due to arrive.

arrival      first token            last token
   |------------|----|----|----|----|
   <--- TTFT --->
                <ITL>                        gap between neighbouring tokens
                <------ (n - 1) x TPOT ----->
   <------------------ e2e ----------------->
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise

from experiments.lab import stats
from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class RequestTrace:
    """What one request asked for and got. Times are seconds on one clock."""

    prompt_tokens: int
    asked_tokens: int  # output tokens it should have got
    arrival: float
    token_times: tuple[float, ...]  # one an output token; tokens that appeared together share a time
    token_ids: tuple[int, ...]
    cached_tokens: int = 0  # prompt tokens found in a prefix cache

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time a token after the first; None for a single token."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies. A chunk of n tokens counts as n gaps of its n-th part; the first chunk's end
        is the TTFT and leaves no gap."""
        gaps: list[float] = []
        chunks = [(time, len(list(tokens))) for time, tokens in groupby(self.token_times)]
        for (before, _), (time, size) in pairwise(chunks):
            gaps += [(time - before) / size] * size
        return gaps


@dataclass(frozen=True)
class Served:
    """One timed pass over a workload: from the first arrival to the last request's end."""

    requests: tuple[RequestTrace, ...]
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Better(Enum):
    higher = "higher"
    lower = "lower"


@dataclass(frozen=True)
class Metric:
    """What a report needs to know about a column of numbers."""

    label: str
    unit: str
    better: Better


Compute = Callable[[Served], "float | None"]  # None: the sample is too small


def _milliseconds(values: Sequence[float | None], q: float | None = None) -> float | None:
    known = [1e3 * value for value in values if value is not None]
    if not known:
        return None
    return stats.median(known) if q is None else stats.percentile(known, q)


def _gaps(served: Served) -> list[float | None]:
    return [gap for request in served.requests for gap in request.gaps]


SERVING: dict[str, tuple[Metric, Compute]] = {
    "output_tokens_per_s": (
        Metric("output tokens per second", "tokens/s", Better.higher),
        lambda s: sum(len(r.token_ids) for r in s.requests) / s.seconds,
    ),
    "total_s": (Metric("time for the whole workload", "s", Better.lower), lambda s: s.seconds),
    "ttft_ms": (
        Metric("time to first token, median request", "ms", Better.lower),
        lambda s: _milliseconds([r.ttft for r in s.requests]),
    ),
    "ttft_p99_ms": (
        Metric("time to first token, P99", "ms", Better.lower),
        lambda s: _milliseconds([r.ttft for r in s.requests], 99),
    ),
    "tpot_ms": (
        Metric("time per output token after the first, median request", "ms", Better.lower),
        lambda s: _milliseconds([r.tpot for r in s.requests]),
    ),
    "itl_ms": (
        Metric("inter-token latency, median gap", "ms", Better.lower),
        lambda s: _milliseconds(_gaps(s)),
    ),
    "itl_p99_ms": (
        Metric("inter-token latency, P99", "ms", Better.lower),
        lambda s: _milliseconds(_gaps(s), 99),
    ),
    "e2e_ms": (
        Metric("end-to-end latency, median request", "ms", Better.lower),
        lambda s: _milliseconds([r.e2e for r in s.requests]),
    ),
}


def require_known(names: Sequence[str]) -> None:
    for name in names:
        if name not in SERVING:
            raise ConfigError(f"unknown metric {name!r}; known: {', '.join(SERVING)}")


def measure(served: Served, names: Sequence[str]) -> dict[str, float | None]:
    return {name: SERVING[name][1](served) for name in names}
