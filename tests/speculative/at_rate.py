"""Steps of made-up rows whose drafts are accepted at a stated rate."""

from __future__ import annotations

import numpy as np

from mini_infer.core.uniforms import SYNTHETIC, Array, hash_seeds, uniforms


def stands_at_rate(keys: Array, positions: Array, rate: float | Array) -> Array:
    """Whether the draft at each position is accepted if those before it are: with a chance of `rate`, by a hash of
    (key, position). keys (core.uniforms.hash_seeds), positions and rates broadcast."""
    return uniforms(keys, positions + SYNTHETIC) < rate


def accepted_at_rate(seeds: Array, positions: Array, most: int, rates: float | Array) -> Array:
    """How many of `most` drafts are accepted: up to the first that does not stand, as a step settles it
    (kernels/rows.py). Of fewer drafts it is the smaller number.

    Args:
        seeds: of the requests.
        positions: of their first drafts; broadcasts with seeds and rates to what is returned.
        rates: of acceptance.
    """
    keys, places = hash_seeds(seeds.astype(np.uint64)), np.arange(most)
    stands = stands_at_rate(keys[..., None], positions[..., None] + places, np.asarray(rates)[..., None])
    return np.logical_and.accumulate(stands, axis=-1).sum(axis=-1)
