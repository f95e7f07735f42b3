"""Replicas behind the server's own router, on one time line.

Each replica has a clock of its own, and the one that is furthest behind is the next to act, unless a request comes
before. So nobody learns what has not happened yet: the router hears of an end at its moment, and a replica that has
looked ahead takes only the steps that begin before a newcomer's arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mini_infer.core.request import Request
from mini_infer.serving.router import Route, Router
from mini_infer.simulation.executor import VirtualClock
from mini_infer.simulation.replica import Replica


class Cluster:
    """
    Args:
        routers: of several, requests take turns, and each hears from the replicas how much the others have sent there.

    Attributes:
        clock: how far the time line is; it never goes back.
    """

    def __init__(self, replicas: Sequence[Replica], *routers: Router) -> None:
        self.clock = VirtualClock()
        self._replicas, self._routers = list(replicas), routers
        self._up = list(range(len(replicas)))
        # A heap of (when a replica acts next, its number, stamp): once something came between, its stamp is another,
        # and the entry counts nothing.
        self._acts: list[tuple[float, int, int]] = []
        self._stamps = [0] * len(replicas)
        self._ends: list[tuple[float, int, Request]] = []  # a heap: of requests that have ended ahead of the clock
        self._num_ends = 0
        self._sent: dict[Request, tuple[Router, Route]] = {}
        self._num_sent = 0
        for number in self._up:
            self._tell(number)

    def send(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        arrival: float | None = None,
        priority: int = 0,
    ) -> Request:
        """A request that comes now, where it was not due at an `arrival` before. RequestError where it can never be
        served."""
        now = self.clock.now if arrival is None else max(self.clock.now, arrival)
        router = self._routers[self._num_sent % len(self._routers)]
        self._num_sent += 1
        route = router.route(router.chain(prompt), 1, self._up)
        replica = self._replicas[route.replica]
        try:
            request = replica.add(request_id, prompt, output_tokens, now, priority, arrival)
        except Exception:
            router.end(route)
            raise
        self._sent[request] = router, route
        self._schedule(route.replica)
        return request

    def stop(self, number: int) -> list[Request]:
        """A replica breaks down now: its requests, which nobody goes on with. Another one has to be up."""
        self._up.remove(number)
        self._stamps[number] += 1
        lost = [request for request, (_, route) in self._sent.items() if route.replica == number]
        for request in lost:
            router, route = self._sent.pop(request)
            router.end(route)
        self._ends = [end for end in self._ends if end[2] in self._sent]
        heapq.heapify(self._ends)
        for router in self._routers:
            router.restarted(number)
        return lost

    def start(self, number: int, replica: Replica) -> None:
        """In place of one that has stopped: an engine that has cached nothing yet."""
        replica.clock.wait_until(self.clock.now)
        self._replicas[number] = replica
        self._up.append(number)
        self._up.sort()
        self._tell(number)

    def advance(self, until: float | None = None) -> Request | None:
        """Goes on to the next end of a request, and returns it. None where none comes before `until`, to which the
        clock has then gone on, or at all."""
        while self._acts or self._ends:
            act = self._acts[0][0] if self._acts else float("inf")
            end = self._ends[0][0] if self._ends else float("inf")
            if until is not None and act >= until and end >= until:
                break
            if end <= act:
                _, _, request = heapq.heappop(self._ends)
                self.clock.wait_until(end)
                router, route = self._sent.pop(request)
                router.end(route, request.num_cached_tokens)
                return request
            _, number, stamp = heapq.heappop(self._acts)
            if stamp == self._stamps[number]:
                self._act(number)
        if until is not None:
            self.clock.wait_until(until)
        return None

    def _act(self, number: int) -> None:
        replica = self._replicas[number]
        for request in replica.run():
            heapq.heappush(self._ends, (replica.clock.now, self._num_ends, request))
            self._num_ends += 1
        self._schedule(number)
        if len(self._routers) > 1:
            self._tell(number)

    def _tell(self, number: int) -> None:
        replica = self._replicas[number]
        for router in self._routers:
            router.told(number, replica.core.scheduler.num_unfinished, replica.limits.num_blocks)

    def _schedule(self, number: int) -> None:
        self._stamps[number] += 1
        replica = self._replicas[number]
        if replica.busy:
            heapq.heappush(self._acts, (replica.next_event, number, self._stamps[number]))
