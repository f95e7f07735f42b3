"""Who waits, who is in the batch, who is next to join it, whether there is room, and who has to give way."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import NamedTuple

from mini_infer.cache.kv_manager import KVManager, PrefixMatch
from mini_infer.core.config import Policy, SchedulerConfig
from mini_infer.core.request import Request, RequestStatus
from mini_infer.runtime.scheduler.adapter_slots import AdapterSlots

_rank = attrgetter("rank")


class WaitingLine:
    """New requests and preempted ones, smallest rank first; and beside them siblings (n > 1), each until the prompt of
    its leader is computed and its blocks can be shared, unless all are to be computed side by side."""

    def __init__(self, siblings_wait: bool) -> None:
        self._siblings_wait = siblings_wait
        self._line: list[Request] = []
        self._siblings: dict[Request, list[Request]] = {}  # by leader
        self._leaders: dict[Request, None] = {}  # those of them that have been admitted
        self.num_swapped = 0

    def __len__(self) -> int:
        return len(self._line) + sum(map(len, self._siblings.values()))

    def add(self, request: Request) -> None:
        """A new request. One with `fork_of` waits beside the line as long as its leader's prompt is not computed."""
        leader = request.fork_of
        if leader is not None and self._siblings_wait and leader.status is RequestStatus.waiting:
            self._siblings.setdefault(leader, []).append(request)
        else:
            self.push(request, RequestStatus.waiting)

    def push(self, request: Request, status: RequestStatus) -> None:
        """A request that comes, as `waiting` or `swapped`; or one that is there, and whose swapped blocks are lost."""
        if request.status is RequestStatus.swapped:
            self.num_swapped -= 1
        else:
            insort(self._line, request, key=_rank)
        request.status = status
        self.num_swapped += status is RequestStatus.swapped

    def discard(self, request: Request) -> None:
        """Takes out a request that has ended; the caller gives it that status."""
        beside = self._siblings.get(request.fork_of, []) if request.fork_of is not None else []
        if request in beside:
            beside.remove(request)
        else:
            self._leave(bisect_left(self._line, request.rank, key=_rank))

    def head(self) -> Request | None:
        """The request whose turn it is."""
        return self._line[0] if self._line else None

    def num_tokens(self, count: int, enough: int) -> int:
        """Of the prompts of the first `count` in line; it stops counting at `enough`."""
        total = 0
        for request in self._line[:count]:
            if total >= enough:
                break
            total += request.num_tokens * (request.status is RequestStatus.waiting)
        return total

    def admit_head(self) -> None:
        """Takes out the head; the caller gives it another status."""
        head = self._leave(0)
        if head in self._siblings:
            self._leaders[head] = None

    def _leave(self, place: int) -> Request:
        request = self._line.pop(place)
        self.num_swapped -= request.status is RequestStatus.swapped
        return request

    def release_siblings(self, leader: Request) -> None:
        """The leader's prompt is computed, or never will be: either way its siblings need not wait any longer."""
        if leader in self._siblings:
            self._leaders.pop(leader, None)
            for sibling in self._siblings.pop(leader):
                self.push(sibling, RequestStatus.waiting)

    def num_siblings_before(self, request: Request) -> int:
        """Siblings beside the line that rank before it: nobody may take their places while they wait."""
        beside = [sibling for leader in self._leaders for sibling in self._siblings[leader]]
        return sum(sibling.rank < request.rank for sibling in beside)


class Batch:
    """Four queues, each in rank order: the last one is the first to give way."""

    def __init__(self, size: int, num_adapters: int = 0) -> None:
        self.adapters = AdapterSlots(num_adapters)
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.receiving: list[Request] = []
        self._queues = {
            RequestStatus.prefilling: self.prefilling,
            RequestStatus.running: self.running,
            RequestStatus.loading: self.loading,
            RequestStatus.receiving: self.receiving,
        }
        self._size = size
        self.free_indices = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        return self._size - len(self.free_indices)

    def __contains__(self, request: Request) -> bool:
        return request.status in self._queues

    def requests(self) -> list[Request]:
        return self.running + self.prefilling + self.loading + self.receiving

    def last(self) -> Request:
        """Who ranks behind all others."""
        return max((queue[-1] for queue in self._queues.values() if queue), key=_rank)

    def join(self, request: Request, status: RequestStatus) -> None:
        request.req_index = self.free_indices.pop()
        self.adapters.take(request)
        request.status = status
        insort(self._queues[status], request, key=_rank)

    def move(self, request: Request, status: RequestStatus) -> None:
        self._queues[request.status].remove(request)
        request.status = status
        insort(self._queues[status], request, key=_rank)

    def leave(self, request: Request) -> None:
        """The caller gives it another status."""
        assert request.req_index is not None
        self._queues[request.status].remove(request)
        self.free_indices.append(request.req_index)
        self.adapters.release(request)
        request.req_index, request.is_announced = None, False
        request.grow_after = request.quiet_until = 0


class Newcomer(NamedTuple):
    """The next in line, for which there is room."""

    request: Request
    match: PrefixMatch

    @property
    def missing_tokens(self) -> int:
        return self.request.num_tokens - self.match.num_tokens


class AdmissionControl:
    def __init__(
        self, config: SchedulerConfig, line: WaitingLine, batch: Batch, kv: KVManager, watermark_blocks: int
    ) -> None:
        self._line, self._batch, self._kv, self._watermark_blocks = line, batch, kv, watermark_blocks
        self.by_priority = config.policy is Policy.priority

    def newcomer(self) -> Newcomer | None:
        """The next in line, if there is room for it now."""
        head = self._head()
        match = None if head is None else self.room_for(head)
        return None if head is None or match is None else Newcomer(head, match)

    def room_for(self, request: Request, without: list[Request] | None = None) -> PrefixMatch | None:
        """Whether a request that waits could be admitted: the prefix that it would share, or None. Whoever asks what a
        newcomer may bring (admission, priorities, drafts, steps behind drafts in flight) asks this.
        `without`: what would be if these requests had given way."""
        num_ahead = self._line.num_siblings_before(request)
        if len(self._batch.free_indices) + len(without or ()) <= num_ahead:
            return None
        if not self._batch.adapters.room_for(request, without or ()):
            return None
        # Running requests are to grow, and a sibling ahead needs its last block. An idle engine can give all it has.
        watermark = self._watermark_blocks if len(self._batch) else 0
        return self._kv.room_for(request, watermark + num_ahead * self._kv.least_blocks, without)

    def victims(self) -> list[Request]:
        """Requests of lower priority that have to give way, and are enough, for the head of the line to find room."""
        head = self._head() if self.by_priority else None
        if head is None or self.room_for(head) is not None:
            return []
        lower = [r for r in self._batch.requests() if r.priority > head.priority]
        lower.sort(key=_rank, reverse=True)
        enough = bisect_left(range(len(lower) + 1), True, key=lambda n: self.room_for(head, lower[:n]) is not None)
        return lower[:enough] if enough <= len(lower) else []

    def _head(self) -> Request | None:
        """Whose turn it is. None also where it cannot come yet, since those behind it wait, too: one that was preempted
        while a step of its own was in flight comes back when that step's token is known, and one that is on its way to
        the host when it is there."""
        head = self._line.head()
        return None if head is None or head.num_in_flight or self._kv.is_under_way(head) else head
