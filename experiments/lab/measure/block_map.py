"""A map of the KV pool: whose each block is after every step of a pass in which nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from experiments.lab.measure.traces import CACHED, SHARED, BlockRow
from mini_infer.core.plan import StepRecord

if TYPE_CHECKING:
    from mini_infer.runtime.engine_core import EngineCore

MAX_BLOCKS = 256  # of a map: those that requests had first


class NoMap(Exception):
    """Why there is nothing to see."""


class BlockState(NamedTuple):
    """As in BlockRow."""

    owner: str
    empty: bool = False


class BlockWatch:
    """To be called with every StepRecord of a pass."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps = 0
        self._known: dict[int, None] = {}  # blocks of the map, in the order in which requests had them
        self._states: dict[int, tuple[BlockState, int]] = {}  # of a block, and since which step
        self._ended: list[tuple[int, BlockState, int, int]] = []  # block, its state, from which step to which

    def __call__(self, record: StepRecord) -> None:
        now = self._now()
        for block, (state, since) in list(self._states.items()):
            if now.get(block) != state:
                self._ended.append((block, state, since, self._steps - 1))
                del self._states[block]
        for block, state in now.items():
            self._states.setdefault(block, (state, self._steps))
        self._steps += 1

    def rows(self, variant: str, point: str) -> Iterator[BlockRow]:
        lasting = [(block, state, since, self._steps - 1) for block, (state, since) in self._states.items()]
        for block, state, first, last in sorted(self._ended + lasting):
            yield BlockRow(variant, point, block, first, last, *state)

    def _now(self) -> dict[int, BlockState]:
        """Of each block of the map that is referenced, or cached."""
        scheduler, found = self._core.scheduler, dict[int, BlockState]()
        kv = scheduler.kv
        for request in scheduler.batch.requests():
            full = -(-(request.num_tokens + request.num_in_flight) // kv.block_size)
            for place, block in enumerate(request.block_table):
                shared = block in found
                found[block] = BlockState(SHARED) if shared else BlockState(request.request_id, place >= full)
        for block in found:
            if len(self._known) < MAX_BLOCKS:
                self._known.setdefault(block)
        own = {block: found[block] for block in self._known if block in found}
        cached = self._known.keys() & set(kv._pool.cached())  # which nobody but this map asks for
        return own | dict.fromkeys(cached, BlockState(CACHED))
