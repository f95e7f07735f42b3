"""Whether blocks of a prefix are sooner there by loading them or by computing their tokens, by what both took lately."""

from __future__ import annotations

_WEIGHT = 0.25  # of the latest observation
_FORGETS = 0.98  # a choice that is not made is observed no more: what speaks against it counts for less each time


class LoadCosts:
    """A load takes what a block takes, times their number, and beside that a time of its own: until a step is booked,
    say. All are seconds as the scheduler sees them, between planning and booking.

    Until either has been observed a load is tried.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None  # of a prompt
        self._block_s: float | None = None
        self._load_s = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Takes in a step with prompts."""
        each = seconds / tokens
        self._token_s = each if self._token_s is None else self._token_s + _WEIGHT * (each - self._token_s)

    def loaded(self, blocks: int, seconds: float) -> None:
        """Takes in a load. The fastest one tells what a block takes, and is forgotten bit by bit."""
        each = seconds / blocks
        self._block_s = each if self._block_s is None else min(each, self._block_s / _FORGETS)
        self._load_s += _WEIGHT * (seconds - blocks * self._block_s - self._load_s)

    def loading_pays(self, blocks: int, tokens: int) -> bool:
        """Whether these blocks, with so many tokens, are to be loaded."""
        if self._token_s is None or self._block_s is None:
            return True
        pays = self._load_s + blocks * self._block_s <= tokens * self._token_s
        if not pays:
            self._load_s *= _FORGETS
            self._block_s *= _FORGETS
        return pays
