"""Drafts that are accepted at a stated rate, whatever the target says: for the speed of models with random weights."""

from __future__ import annotations

import numpy as np

from mini_infer.core.uniforms import SYNTHETIC, Array, hash_seeds, uniforms

_PRIME = 2**61 - 1


def synthetic_drafts(seed: int, position: int, k: int, vocab_size: int) -> list[int]:
    """k arbitrary tokens for `position` and those after it: a function of (seed, place) alone."""
    mixed = seed * 0x9E3779B97F4A7C15
    return [((mixed ^ place * 0xBF58476D1CE4E5B9) % _PRIME) % vocab_size for place in range(position, position + k)]


def stands_at_rate(keys: Array, positions: Array, rate: float) -> Array:
    """Whether the draft at each position is accepted if those before it are: with a chance of `rate`, by a hash of
    (key, position). keys (core.uniforms.hash_seeds) and positions broadcast."""
    return uniforms(keys, positions + SYNTHETIC) < rate


def synthetic_accepts(seeds: Array, positions: Array, num_drafts: Array, rate: float) -> Array:
    """How many of each row's drafts are to be accepted.

    Each has the rate `rate` by itself (`stands_at_rate`), so that the tokens a step follow Leviathan's formula.

    Args:
        seeds: [R], of the requests.
        positions: [R], of their first drafts.
        num_drafts: [R]
        rate: from 0 to 1.

    Returns:
        [R] int64.
    """
    most = int(num_drafts.max(initial=0))
    place = np.arange(most)
    keys = hash_seeds(seeds.astype(np.uint64))[:, None]
    heads = stands_at_rate(keys, positions[:, None] + place, rate)
    return np.logical_and.accumulate(heads & (place < num_drafts[:, None]), axis=1).sum(axis=1)
