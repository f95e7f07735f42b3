"""Replicas behind the server's own router, on one time line.

Each replica has a clock of its own, and the one that is furthest behind is the next to act, unless a request comes
before. So nobody learns what has not happened yet: the router hears of an end at its moment, and a replica that has
looked ahead takes only the steps that begin before a newcomer's arrival. Where some compute prompts for the others
(apart.py), what these say to each other is on the same line.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mini_infer.core.request import Request
from mini_infer.serving.router import Chain, Route, Router
from mini_infer.simulation.apart import Errands, Said
from mini_infer.simulation.executor import VirtualClock
from mini_infer.simulation.replica import NEVER, Replica


class Cluster:
    """
    Args:
        routers: of several, requests take turns unless they say to which one they come, and each hears from the
            replicas how much the others have sent there.

    Attributes:
        clock: how far the time line is; it never goes back.
    """

    def __init__(self, replicas: Sequence[Replica], *routers: Router) -> None:
        self.clock = VirtualClock()
        self._replicas, self._routers = list(replicas), routers
        self._errands = Errands(self._replicas)
        self._prompts = [number for number, replica in enumerate(replicas) if replica.computes_prompts]
        self._up = [number for number in range(len(replicas)) if number not in self._prompts]
        # A heap of (when a replica acts next, its number, stamp): once something came between, its stamp is another,
        # and the entry counts nothing.
        self._acts: list[tuple[float, int, int]] = []
        self._stamps = [0] * len(replicas)
        # A heap of what has happened ahead of the clock: requests that have ended, and what replicas say to each other.
        self._events: list[tuple[float, int, Request | Said]] = []
        self._num_events = 0
        self._sent: dict[Request, tuple[Router, Route]] = {}
        self._num_sent = 0
        for number in range(len(replicas)):
            self._tell(number)

    def send(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        arrival: float | None = None,
        priority: int = 0,
        router: int | None = None,
    ) -> Request:
        """A request that comes now, where it was not due at an `arrival` before, to the router of this number. None:
        they take turns. RequestError where it can never be served."""
        now = self.clock.now if arrival is None else max(self.clock.now, arrival)
        chosen = self._routers[(self._num_sent if router is None else router) % len(self._routers)]
        self._num_sent += 1
        chain = chosen.chain(prompt)
        prefill_at = self._choose_prefill(chosen, chain) if self._prompts else None
        route = chosen.route(chain, 1, self._up)
        replica = self._replicas[route.replica]
        try:
            request = replica.add(request_id, prompt, output_tokens, now, priority, arrival, prefill_at)
        except Exception:
            chosen.end(route)
            raise
        self._sent[request] = chosen, route
        self._schedule(route.replica)
        return request

    def _choose_prefill(self, router: Router, chain: Chain) -> str:
        route = router.route(chain, 1, self._prompts, role=1)
        router.end(route)  # what it has to do it tells
        return str(route.replica)

    def stop(self, number: int) -> list[Request]:
        """A replica breaks down now: its requests, which nobody goes on with. Another one has to be up, and none may
        compute prompts for others."""
        assert not self._prompts, "what becomes of prompts that are under way is not simulated"
        self._up.remove(number)
        self._stamps[number] += 1
        lost = [request for request, (_, route) in self._sent.items() if route.replica == number]
        for request in lost:
            router, route = self._sent.pop(request)
            router.end(route)
        self._events = [event for event in self._events if event[2] in self._sent]
        heapq.heapify(self._events)
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
        while self._acts or self._events:
            act = self._acts[0][0] if self._acts else NEVER
            moment = self._events[0][0] if self._events else NEVER
            if until is not None and act >= until and moment >= until:
                break
            if moment <= act:
                _, _, event = heapq.heappop(self._events)
                self.clock.wait_until(moment)
                if event in self._sent:
                    assert isinstance(event, Request)
                    router, route = self._sent.pop(event)
                    router.end(route, event.num_cached_tokens)
                    return event
                for number in self._errands.hear(event, moment):
                    self._schedule(number)
                    self._tell(number)
                continue
            _, number, stamp = heapq.heappop(self._acts)
            if stamp == self._stamps[number]:
                self._act(number)
        if until is not None:
            self.clock.wait_until(until)
        return None

    def _act(self, number: int) -> None:
        replica = self._replicas[number]
        if ended := replica.run():
            moment = max(replica.clock.now, replica.pushed)
            for request in ended:
                self._add_event(moment, request)
        self._schedule(number)
        if self._prompts or len(self._routers) > 1:
            self._tell(number)

    def _add_event(self, moment: float, event: Request | Said) -> None:
        heapq.heappush(self._events, (moment, self._num_events, event))
        self._num_events += 1

    def _tell(self, number: int) -> None:
        replica = self._replicas[number]
        for router in self._routers:
            router.told(number, replica.core.scheduler.num_unfinished, replica.limits.num_blocks)

    def _schedule(self, number: int) -> None:
        """What a replica does next, now that something has changed there."""
        self._stamps[number] += 1
        if (moment := self._replicas[number].next_event) < NEVER:
            heapq.heappush(self._acts, (moment, number, self._stamps[number]))
        if self._prompts:
            for moment, said in self._errands.said(number):
                self._add_event(moment, said)
