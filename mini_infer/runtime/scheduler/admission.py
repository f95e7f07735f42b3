"""Admission control: who is next to join the batch, whether there is room for it, and who has to give way."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from mini_infer.cache.kv_manager import KVManager, PrefixMatch
from mini_infer.core.request import Request
from mini_infer.runtime.scheduler.batch import Batch
from mini_infer.runtime.scheduler.waiting_line import WaitingLine


class Newcomer(NamedTuple):
    """The next in line, for which there is room."""

    request: Request
    match: PrefixMatch

    @property
    def missing_tokens(self) -> int:
        return self.request.num_tokens - self.match.num_tokens


class AdmissionControl:
    """
    Args:
        watermark_blocks: that stay free while others run.
    """

    def __init__(self, line: WaitingLine, batch: Batch, kv: KVManager, watermark_blocks: int) -> None:
        self._line, self._batch, self._kv, self._watermark_blocks = line, batch, kv, watermark_blocks

    def newcomer(self) -> Newcomer | None:
        """The next in line, if there is room for it now."""
        head = self._head()
        match = None if head is None else self.room_for(head)
        return None if head is None or match is None else Newcomer(head, match)

    def room_for(self, request: Request, without: list[Request] | None = None) -> PrefixMatch | None:
        """Whether a request that waits could be admitted: the prefix that it would share, or None. Whoever asks what a
        newcomer may bring (admission, priorities, drafts, steps behind drafts in flight) asks this.

        Args:
            without: what would be if these requests had given way.
        """
        num_ahead = self._line.num_siblings_before(request)
        if len(self._batch.free_indices) + len(without or ()) <= num_ahead:
            return None
        # Running requests are to grow, and a sibling ahead needs its last block. An idle engine can give all it has.
        watermark = self._watermark_blocks if len(self._batch) else 0
        return self._kv.room_for(request, watermark + num_ahead * self._kv.least_blocks, without)

    def victims(self) -> list[Request]:
        """Requests of lower priority that have to give way, and are enough, for the head of the line to find room."""
        head = self._head()
        if head is None or self.room_for(head) is not None:
            return []
        lower = [r for r in self._batch.requests() if r.priority > head.priority]
        lower.sort(key=self._batch.rank, reverse=True)
        enough = bisect_left(range(len(lower) + 1), True, key=lambda n: self.room_for(head, lower[:n]) is not None)
        return lower[:enough] if enough <= len(lower) else []

    def _head(self) -> Request | None:
        """Whose turn it is. None also where it cannot come yet, since those behind it wait, too: one that was preempted
        while a step of its own was in flight comes back when that step's token is known, and one that is on its way to
        the host when it is there."""
        head = self._line.head()
        return None if head is None or head.num_in_flight or self._kv.is_under_way(head) else head
