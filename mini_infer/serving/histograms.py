"""Counts by bucket, kept where the engine is observed, so that every API process shows the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
BOUNDS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "inter_token_latency_seconds": _TOKEN_S,
    "request_time_per_output_token_seconds": _TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "request_kv_transfer_seconds": _FIRST_TOKEN_S,
    "request_kv_transfer_exposed_seconds": _FIRST_TOKEN_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
}


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """`counts[i]`: values above bound i - 1 and not above bound i; one more than there are bounds."""

    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, name: str) -> Histogram:
        return cls([0] * (len(BOUNDS[name]) + 1))

    def observe(self, bounds: Sequence[float], value: float) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.sum += value

    def observe_all(self, bounds: Sequence[float], values: NDArray[np.float64]) -> None:
        """Many at once: there is one value for every token."""
        found = np.bincount(np.searchsorted(bounds, values), minlength=len(self.counts))
        self.counts = (found + self.counts).tolist()
        self.sum += float(values.sum())
