"""Uniform random numbers as hashes of (seed, position), without a generator's state to advance.

What a request draws is then the same in every batch, slot and process, and after a preemption. Speculation draws more
than one number a position; they come from streams of their own, far apart on the request's sequence:

    uniforms(key, position)              the token itself, as without speculation
    uniforms(key, position + DRAFT)      a draft model's proposal for the position
    uniforms(key, position + ACCEPT)     whether that proposal is accepted
    uniforms(key, position + SYNTHETIC)  the same, where the rate of acceptance is a setting
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DRAFT, ACCEPT, SYNTHETIC = (stream << 60 for stream in (1, 2, 3))  # no position is as large


def hash_seeds(seeds: Array) -> Array:
    """Keys for `uniforms`, uint64: without this, neighbouring seeds would be neighbouring streams."""
    return splitmix64(seeds)


def uniforms(keys: Array, positions: Array) -> Array:
    """One float64 in [0, 1), a multiple of 2**-53, for each (key, position).

    SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") read at any
    position: its n-th output is a hash of key + n * the golden ratio.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    return (splitmix64(keys + positions.astype(np.uint64) * golden) >> np.uint64(11)) * 2.0**-53


def splitmix64(x: Array) -> Array:
    """The finaliser of SplitMix64 over uint64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
