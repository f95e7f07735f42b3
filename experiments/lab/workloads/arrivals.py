"""Arrival times of an open loop."""

from __future__ import annotations

import numpy as np


def gamma_times(count: int, rate_per_s: float, cv: float, rng: np.random.Generator) -> list[float]:
    """`count` times in seconds, the first at 0, with independent gamma-distributed gaps of mean 1 / rate_per_s and
    coefficient of variation `cv`. With cv = 1 the gaps are exponential: a Poisson process."""
    gaps = rng.gamma(shape=cv**-2, scale=cv**2 / rate_per_s, size=count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
