"""Which request is due when: closed loops, arrival times, requests that follow others; and how many are in flight. And
the second witness of a pass's time, who knows nothing of requests."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item


class Schedule:
    """
    Attributes:
        in_flight: requests.
        in_flight_s: the same, integrated over time as the client sees it: what the sum of their latencies
            must be (Little 1961).
    """

    def __init__(self, items: Sequence[Item], start: float, concurrency: int) -> None:
        self._items = items
        self._start = start
        self._places = concurrency  # free ones, of the closed loop
        self.in_flight_s = 0.0
        self.in_flight, self._now = 0, start
        self._timed: list[tuple[float, int]] = []  # a heap of (due, index)
        self._ready: list[int] = []  # a heap: of closed-loop requests that could arrive, the first of the list does
        self._followers: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            if item.follows is not None:
                self._followers.setdefault(item.follows, []).append(index)
            elif item.arrival_s is None:
                heapq.heappush(self._ready, index)
            else:
                heapq.heappush(self._timed, (start + item.arrival_s, index))

    def due(self, now: float) -> list[tuple[int, float]]:
        """(index, arrival) of the requests that arrive by `now`; they count as in flight from here on."""
        self.tick(now)
        arrived = []
        while self._timed and self._timed[0][0] <= now:
            due, index = heapq.heappop(self._timed)
            if self.is_closed(index):
                heapq.heappush(self._ready, index)
            else:
                arrived.append((index, due))
        while self._ready and self._places:
            self._places -= 1
            arrived.append((heapq.heappop(self._ready), now))
        self.in_flight += len(arrived)
        self.in_flight_s += sum(now - arrival for _, arrival in arrived)
        return arrived

    def tick(self, now: float) -> None:
        """To be called when answers are there, before they are told of."""
        self.in_flight_s += self.in_flight * (now - self._now)
        self._now = now

    def next_due(self) -> float | None:
        """When the next timed request is due; None where none is before another one ends."""
        return self._timed[0][0] if self._timed else None

    def ended(self, index: int, at: float) -> list[int]:
        """Frees the request's place, and lets those that follow it arrive in time. Returns them."""
        self.in_flight -= 1
        if self.is_closed(index):
            self._places += 1
        followers = self._followers.pop(index, [])
        for follower in followers:
            item = self._items[follower]
            due = at + item.think_s
            if item.arrival_s is not None:
                due = max(due, self._start + item.arrival_s)
            heapq.heappush(self._timed, (due, follower))
        return followers

    def lose(self, index: int) -> list[int]:
        """Frees the place of a request without an answer, and drops all that would have followed it. Returns them."""
        self.in_flight -= 1
        if self.is_closed(index):
            self._places += 1
        lost = deque(self._followers.pop(index, []))
        dropped = []
        while lost:
            dropped.append(lost.popleft())
            lost += self._followers.pop(dropped[-1], [])
        return dropped

    def is_closed(self, index: int) -> bool:
        item = self._items[index]
        while item.follows is not None:
            item = self._items[item.follows]
        return item.arrival_s is None


def lead_s(items: Sequence[Item]) -> float:
    """Seconds from the start of a schedule to its first arrival."""
    return min((item.arrival_s or 0.0 for item in items if item.follows is None), default=0.0)


def from_outside(
    serve: Callable[[Sequence[Item], int], Served],
    items: Sequence[Item],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Served:
    """A pass, timed by somebody who knows nothing of requests and tokens. Whoever is nearer to it has the last word."""
    start = clock()
    served = serve(items, concurrency)
    took = clock() - start - lead_s(items)
    return served if served.outside_s is not None else replace(served, outside_s=took)
