"""A queue of requests in rank order whose costs do not depend on how many wait in vain."""

from __future__ import annotations

import heapq

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
