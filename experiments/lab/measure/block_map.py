"""A map of the KV pool: in whose hands each block is after every step of a pass in which nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mini_infer.core.plan import StepRecord
from mini_infer.runtime.engine_core import EngineCore

MOST = 256  # blocks: those that requests had first
# Instead of a request's name: of several requests; of nobody, and kept for prompts that begin alike; of nobody, and
# free as soon as it has been copied.
SHARED, CACHED, COPIED = "shared", "cached", "copied"


@dataclass(frozen=True)
class BlockRow:
    """A block that stays in the same hands from one step of a pass to another. Steps are counted from 0."""

    variant: str
    point: str
    block: int
    first: int
    last: int
    owner: str  # a request, or as above
    empty: bool = False  # it is reserved, and lies behind the request's last token


class Hands(NamedTuple):
    owner: str
    empty: bool = False


class BlockWatch:
    """To be called with every StepRecord of a pass."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps = 0
        self._held: dict[int, tuple[Hands, int]] = {}  # block -> whose it is, and since which step
        self._let_go: list[tuple[int, Hands, int, int]] = []  # as in BlockRow

    def __call__(self, record: StepRecord) -> None:
        now = self._hands()
        for block, (hands, since) in list(self._held.items()):
            if now.get(block) != hands:
                self._let_go.append((block, hands, since, self._steps - 1))
                del self._held[block]
        for block, hands in now.items():
            self._held.setdefault(block, (hands, self._steps))
        self._steps += 1

    def rows(self, variant: str, point: str) -> Iterator[BlockRow]:
        held = [(block, hands, since, self._steps - 1) for block, (hands, since) in self._held.items()]
        known = sorted(self._let_go + held)
        used = sorted((first, block) for block, hands, first, _ in known if hands.owner not in (CACHED, COPIED))
        shown = set(list(dict.fromkeys(block for _, block in used))[:MOST])
        for block, hands, first, last in known:
            if block in shown:
                yield BlockRow(variant, point, block, first, last, *hands)

    def _hands(self) -> dict[int, Hands]:
        """Of each block that somebody refers to, or that is kept."""
        scheduler, own = self._core.scheduler, dict[int, Hands]()
        kv = scheduler.kv
        for request in scheduler.batch.requests():
            full = -(-(request.num_tokens + request.num_in_flight) // kv.block_size)
            for place, block in enumerate(request.block_table):
                own[block] = Hands(SHARED) if block in own else Hands(request.request_id, place >= full)
        copied = (block for parked in kv.transfers.values() for block in parked.table)
        cached = kv._pool.cached()  # which nobody but this map asks for
        others = dict.fromkeys(cached, Hands(CACHED)) | dict.fromkeys(copied, Hands(COPIED))
        return others | own
