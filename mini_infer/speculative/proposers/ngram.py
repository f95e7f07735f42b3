"""Prompt lookup: what followed the last tokens where they came before (Saxena 2023, "Prompt Lookup Decoding")."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """The n-grams of one request's prompt and output, and what followed them last.

    Appending a token enters max_n - min_n + 1 n-grams, whatever the length; nothing is searched when proposing.

    Args:
        min_n, max_n: tokens that must match, at least, and those that are tried first.
    """

    def __init__(self, token_ids: Sequence[int], min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-grams must have 1 <= min_n <= max_n tokens, got min_n={min_n} and max_n={max_n}")
        self._tokens: list[int] = []
        # By size, the longest first: n-gram -> the place behind its latest occurrence that something follows.
        self._places: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(max_n, min_n - 1, -1)}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens: of the prompt, or accepted ones."""
        tokens = self._tokens
        before = len(tokens)
        tokens.extend(token_ids)
        for n, places in self._places.items():
            for place in range(max(before, n), len(tokens)):
                places[tuple(tokens[place - n : place])] = place

    def propose(self, k: int) -> list[int]:
        """The k tokens behind the latest earlier occurrence of the longest suffix that has one; none where no suffix of
        min_n tokens came before. Where the end is nearer than that, the draft goes on in itself, as a period does."""
        tokens = self._tokens
        for n, places in self._places.items():
            place = places.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if place is not None:
                repeated = tokens[place : place + k]
                while len(repeated) < k:
                    repeated += repeated[: k - len(repeated)]
                return repeated
        return []
