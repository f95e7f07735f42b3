"""The requests that hold a req_index: a row of the per-request state on the device."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from mini_infer.core.request import Request, RequestStatus
from mini_infer.runtime.scheduler.waiting_line import Rank


class Batch:
    """Three queues, each in rank order: the last one is the first to give way."""

    def __init__(self, size: int, rank: Callable[[Request], Rank]) -> None:
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.swapping_in: list[Request] = []
        self._queues = {
            RequestStatus.prefilling: self.prefilling,
            RequestStatus.running: self.running,
            RequestStatus.swapping_in: self.swapping_in,
        }
        self.free_indices = list(range(size - 1, -1, -1))
        self.rank = rank

    def __len__(self) -> int:
        return len(self.running) + len(self.prefilling) + len(self.swapping_in)

    def __contains__(self, request: Request) -> bool:
        return request.status in self._queues

    def requests(self) -> list[Request]:
        return self.running + self.prefilling + self.swapping_in

    def last(self) -> Request:
        """Who ranks behind all others."""
        return max((queue[-1] for queue in self._queues.values() if queue), key=self.rank)

    def join(self, request: Request, status: RequestStatus) -> None:
        request.req_index = self.free_indices.pop()
        request.status = status
        insort(self._queues[status], request, key=self.rank)

    def move(self, request: Request, status: RequestStatus) -> None:
        self._queues[request.status].remove(request)
        request.status = status
        insort(self._queues[status], request, key=self.rank)

    def leave(self, request: Request) -> None:
        """The caller gives it another status."""
        assert request.req_index is not None
        self._queues[request.status].remove(request)
        self.free_indices.append(request.req_index)
        request.req_index, request.is_announced = None, False
        request.grow_after = request.quiet_until = 0
