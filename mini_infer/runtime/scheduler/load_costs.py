"""Whether blocks of a prefix are there sooner by loading or by computing them, by what both took of late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

_WEIGHT = 0.25  # of the latest observation
_FORGETS = 0.98  # a choice that is not made is observed no more: what speaks against it counts for less each time


@dataclass
class _Load:
    """Seconds, as the scheduler sees them between planning and booking."""

    block_s: float | None = None
    start_s: float = 0.0  # beside what the blocks take: until a step has ended, say


class LoadCosts:
    """What a prompt's token takes, and what a load does: by where from, a time for each block and one of its own.

    Until both have been observed a load is tried.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._loads: defaultdict[Hashable, _Load] = defaultdict(_Load)

    def computed(self, tokens: int, seconds: float) -> None:
        """Takes in a step with prompts."""
        each = seconds / tokens
        self._token_s = each if self._token_s is None else self._token_s + _WEIGHT * (each - self._token_s)

    def loaded(self, source: Hashable, blocks: int, seconds: float) -> None:
        """Takes in a load. The fastest one tells what a block takes, and is forgotten bit by bit."""
        load, each = self._loads[source], seconds / blocks
        load.block_s = each if load.block_s is None else min(each, load.block_s / _FORGETS)
        load.start_s += _WEIGHT * (seconds - blocks * load.block_s - load.start_s)

    def loading_pays(self, source: Hashable, blocks: int, tokens: int) -> bool:
        """Whether these blocks, with so many tokens, are to be loaded."""
        load = self._loads[source]
        if self._token_s is None or load.block_s is None:
            return True
        pays = load.start_s + blocks * load.block_s <= tokens * self._token_s
        if not pays:
            load.start_s *= _FORGETS
            load.block_s *= _FORGETS
        return pays
