"""Who waits to be admitted, and whose turn it is."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from mini_infer.core.request import Request, RequestStatus

Rank = tuple[int, int]


class WaitingLine:
    """New requests and preempted ones, smallest rank first; and beside them siblings (n > 1), each until the prompt of
    its leader is computed and its blocks can be shared.

    O(1) to look at the head, O(log n) to add or take one. A request that ends in the middle is dropped when it reaches
    the head, or when the dead outnumber the living.

    Args:
        siblings_wait: False where all are to be computed side by side.
    """

    def __init__(self, rank: Callable[[Request], Rank], siblings_wait: bool) -> None:
        self._rank = rank
        self._siblings_wait = siblings_wait
        self._heap: list[tuple[Rank, Request]] = []  # ranks are unique, so requests are never compared
        self._num_in_heap = 0  # of them those that have not ended
        self._siblings: dict[Request, list[Request]] = {}  # by leader
        self._leaders: dict[Request, None] = {}  # those of them that have been admitted
        self.num_swapped = 0

    def __len__(self) -> int:
        return self._num_in_heap + sum(map(len, self._siblings.values()))

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
            request.status = status
            return
        request.status = status
        self._num_in_heap += 1
        self.num_swapped += status is RequestStatus.swapped
        if len(self._heap) > 2 * self._num_in_heap + 64:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._rank(request), request))

    def discard(self, request: Request) -> None:
        """Takes out a request that has ended; the caller gives it that status."""
        beside = self._siblings.get(request.fork_of, []) if request.fork_of is not None else []
        if request in beside:
            beside.remove(request)
        else:
            self._leave(request)

    def head(self) -> Request | None:
        """The request whose turn it is."""
        while self._heap and self._heap[0][1].finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def admit_head(self, head: Request) -> None:
        """Takes out what `head` has just returned; the caller gives it another status."""
        heapq.heappop(self._heap)
        self._leave(head)
        if head in self._siblings:
            self._leaders[head] = None

    def _leave(self, request: Request) -> None:
        self._num_in_heap -= 1
        self.num_swapped -= request.status is RequestStatus.swapped

    def release_siblings(self, leader: Request) -> None:
        """The leader's prompt is computed, or never will be: either way its siblings need not wait any longer."""
        if leader in self._siblings:
            self._leaders.pop(leader, None)
            for sibling in self._siblings.pop(leader):
                self.push(sibling, RequestStatus.waiting)

    def num_siblings_before(self, request: Request) -> int:
        """Siblings beside the line that rank before it: nobody may take their places while they wait."""
        beside = [sibling for leader in self._leaders for sibling in self._siblings[leader]]
        return sum(self._rank(sibling) < self._rank(request) for sibling in beside)
