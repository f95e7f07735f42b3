"""Steps of made-up rows whose drafts are accepted at a stated rate."""

from __future__ import annotations

import numpy as np

from mini_infer.core.uniforms import SYNTHETIC, Array, hash_seeds, uniforms


def stands_at_rate(keys: Array, positions: Array, rate: float) -> Array:
    """Whether the draft at each position is accepted if those before it are: with a chance of `rate`, by a hash of
    (key, position). keys (core.uniforms.hash_seeds) and positions broadcast."""
    return uniforms(keys, positions + SYNTHETIC) < rate


def accepted_at_rate(seeds: Array, positions: Array, num_drafts: Array, rate: float) -> Array:
    """How many drafts of each of R rows are accepted, [R]: up to the first that does not stand, as a step settles it
    (kernels/rows.py).

    Args:
        seeds: [R], of the requests.
        positions: [R], of their first drafts.
        num_drafts: [R]
    """
    place = np.arange(num_drafts.max(initial=0))
    stands = stands_at_rate(hash_seeds(seeds.astype(np.uint64))[:, None], positions[:, None] + place, rate)
    return np.logical_and.accumulate(stands & (place < num_drafts[:, None]), axis=1).sum(axis=1)
