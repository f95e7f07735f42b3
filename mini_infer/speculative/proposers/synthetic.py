"""Arbitrary drafts, to be accepted at a stated rate, whatever the target says: for speed with random weights."""

from __future__ import annotations

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request
from mini_infer.speculative.proposers import Proposer

_PRIME = 2**61 - 1


class SyntheticProposer(Proposer):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, request: Request, length: int) -> Draft:
        return Draft(length, synthetic_drafts(request.seed, request.num_tokens, length, self._vocab_size))


def synthetic_drafts(seed: int, position: int, k: int, vocab_size: int) -> list[int]:
    """k arbitrary tokens for `position` and those after it: a function of (seed, place) alone."""
    mixed = seed * 0x9E3779B97F4A7C15
    return [((mixed ^ place * 0xBF58476D1CE4E5B9) % _PRIME) % vocab_size for place in range(position, position + k)]
