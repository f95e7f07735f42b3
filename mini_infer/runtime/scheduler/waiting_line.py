"""Who waits to be admitted, and whose turn it is."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from mini_infer.core.request import Request, RequestStatus

Rank = tuple[int, int]


class RequestQueue:
    """Smallest rank first: O(1) to look at the head, O(log n) to add or take one.

    A request that leaves from the middle (an abort) changes its status. It is dropped when it reaches the head, or
    when the dead outnumber the living.
    """

    def __init__(self, status: RequestStatus) -> None:
        self._status = status  # of a request that is still in this queue
        self._heap: list[tuple[Rank, Request]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, rank: Rank, request: Request) -> None:
        request.status = self._status
        self._length += 1
        if len(self._heap) > 2 * self._length + 64:
            self._heap = [entry for entry in self._heap if entry[1].status is self._status]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (rank, request))  # ranks are unique, so requests are never compared

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].status is not self._status:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Takes the head, which `peek` has just returned."""
        self._length -= 1
        return heapq.heappop(self._heap)[1]

    def discard(self, request: Request) -> None:
        """Takes a request out of the middle; the caller gives it another status."""
        assert request.status is self._status
        self._length -= 1


class WaitingLine:
    """New requests and preempted ones, in rank order; and beside them siblings (n > 1), each until the prompt of its
    leader is computed and its blocks can be shared.

    Args:
        may_come: whether a request that is there could be admitted, as far as that is its own affair.
        siblings_wait: False where all are to be computed side by side.
    """

    def __init__(
        self, rank: Callable[[Request], Rank], may_come: Callable[[Request], bool], siblings_wait: bool
    ) -> None:
        self._rank = rank
        self._may_come = may_come
        self._siblings_wait = siblings_wait
        self._queues = {s: RequestQueue(s) for s in (RequestStatus.waiting, RequestStatus.swapped)}
        self._siblings: dict[Request, list[Request]] = {}  # by leader
        self._leaders: dict[Request, None] = {}  # those of them that have been admitted

    def __len__(self) -> int:
        return sum(map(len, self._queues.values())) + sum(map(len, self._siblings.values()))

    @property
    def num_swapped(self) -> int:
        return len(self._queues[RequestStatus.swapped])

    def add(self, request: Request) -> None:
        """A new request. One with `fork_of` waits beside the line as long as its leader's prompt is not computed."""
        leader = request.fork_of
        if leader is not None and self._siblings_wait and leader.status is RequestStatus.waiting:
            self._siblings.setdefault(leader, []).append(request)
        else:
            self.push(request, RequestStatus.waiting)

    def push(self, request: Request, status: RequestStatus) -> None:
        self._queues[status].push(self._rank(request), request)

    def discard(self, request: Request) -> None:
        """Takes out a request; the caller gives it another status."""
        beside = self._siblings.get(request.fork_of, []) if request.fork_of is not None else []
        if request in beside:
            beside.remove(request)
        else:
            self._queues[request.status].discard(request)

    def head(self) -> Request | None:
        """The request whose turn it is; None also where it cannot come yet, since those behind it wait, too."""
        heads = [head for head in (queue.peek() for queue in self._queues.values()) if head is not None]
        head = min(heads, key=self._rank, default=None)
        return head if head is not None and self._may_come(head) else None

    def admit_head(self, head: Request) -> None:
        self._queues[head.status].pop()
        if head in self._siblings:
            self._leaders[head] = None

    def release_siblings(self, leader: Request) -> None:
        """The leader's prompt is computed, or never will be: either way its siblings need not wait any longer."""
        self._leaders.pop(leader, None)
        for sibling in self._siblings.pop(leader, ()):
            self.push(sibling, RequestStatus.waiting)

    def num_siblings_before(self, request: Request) -> int:
        """Siblings beside the line that rank before it: nobody may take their places while they wait."""
        rank = self._rank(request)
        return sum(self._rank(sibling) < rank for leader in self._leaders for sibling in self._siblings[leader])
