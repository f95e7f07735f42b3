"""Blocks of prefixes that come back from host memory and files, where loading them takes less than computing them: by
what both took of late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import takewhile

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.plan import Transfer
from mini_infer.core.request import Request
from mini_infer.core.trials import Trials

_WEIGHT = 0.25  # of the latest observation
_FORGETS = 0.98  # what the fastest load is thought to have taken grows with each one that is slower


@dataclass
class _Load:
    """Seconds, as the scheduler sees them between planning and booking."""

    block_s: float | None = None
    start_s: float = 0.0  # beside what the blocks take: until a step has ended, say
    trials: Trials = field(default_factory=Trials)


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
        load.trials.took(blocks, seconds)

    def loading_pays(self, source: Hashable, blocks: int, tokens: int) -> bool:
        """Whether these blocks, with so many tokens, are to be loaded."""
        load = self._loads[source]
        if self._token_s is None or load.block_s is None:
            return True
        return load.trials.pays(blocks, load.start_s + blocks * load.block_s, tokens * self._token_s)


class PrefixLoads:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self.costs = LoadCosts()
        self._under_way: dict[int, tuple[float, bool, int]] = {}  # id -> when planned, whether files are read, blocks

    def start(self, request: Request, now: float) -> Transfer | None:
        """Starts to bring back what host memory and files hold of an admitted request's prompt, where that pays."""
        if not (saved := self._kv.tiers.find(request)):
            return None
        in_host = list(takewhile(lambda one: one.block is not None, saved))
        # Where reading files takes too long, what needs none may be worth it.
        for part in (saved, in_host) if len(in_host) < len(saved) else (in_host,):
            count, reads = len(part), len(part) > len(in_host)
            if part and self.costs.loading_pays(reads, count, count * self._kv.block_size):
                transfer = self._kv.tiers.load(request, part)
                if transfer is not None:
                    self._under_way[transfer.transfer_id] = now, reads, len(transfer.pairs)
                return transfer
        return None

    def ended(self, transfer_id: int, now: float) -> None:
        """A transfer has ended; perhaps it was a load."""
        if transfer_id in self._under_way:
            planned, reads, blocks = self._under_way.pop(transfer_id)
            self.costs.loaded(reads, blocks, now - planned)
