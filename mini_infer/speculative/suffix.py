"""Suffix decoding: the likeliest continuation of the longest match, by counts (Oliaro et al. 2024, arXiv:2411.04975).

Interface only, so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    token_ids: list[int]
    probabilities: list[float]  # estimated: of each token, those before it being right


class SuffixCorpus:
    """Outputs of finished requests, within bounded memory: the oldest go first.

    Args:
        max_tokens: kept at most.
        max_match: tokens of context that are told apart.
    """

    def __init__(self, max_tokens: int, max_match: int = 32) -> None:
        raise NotImplementedError

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's output."""


class SuffixProposer:
    """One request's prompt and output, beside a corpus that requests share.

    Args:
        min_probability: a draft ends where the estimated probability that all of it is right falls below this.
    """

    def __init__(
        self, token_ids: Sequence[int], corpus: SuffixCorpus | None = None, min_probability: float = 0.1
    ) -> None:
        raise NotImplementedError

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens: of the prompt, or accepted ones."""

    def propose(self, k: int) -> Proposal:
        """At most k tokens; none where nothing matches."""
        raise NotImplementedError
