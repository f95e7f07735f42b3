"""Which request is due when (closed loops, arrival times, requests that follow others), how many are in flight, and
what becomes of them; and the second witness of a pass's time, who knows nothing of requests."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer.core.plan import StepRecord


class Schedule:
    """`in_flight_s` is requests `in_flight`, integrated over time as the client sees it: what the sum of their
    latencies must be (Little 1961). `own`: indices of the items that count, with all that they follow; None: all."""

    def __init__(self, items: Sequence[Item], start: float, concurrency: int, own: Sequence[int] | None = None) -> None:
        self._items, self._places = items, concurrency  # free ones, of the closed loop
        self.in_flight, self.in_flight_s, self._now = 0, 0.0, start
        self._timed: list[tuple[float, int]] = []  # a heap of (due, index)
        self._ready: list[int] = []  # a heap: of closed-loop requests that could arrive, the first of the list does
        self._followers: dict[int, list[int]] = {}
        for index in range(len(items)) if own is None else own:
            item = items[index]
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
        followers = self._free(index)
        for follower in followers:
            heapq.heappush(self._timed, (at + self._items[follower].think_s, follower))
        return followers

    def lose(self, index: int) -> list[int]:
        """Frees the place of a request without an answer, and drops all that would have followed it. Returns them."""
        dropped = self._free(index)
        for follower in dropped:  # of which there are more, the further it gets
            dropped += self._followers.pop(follower, [])
        return dropped

    def _free(self, index: int) -> list[int]:
        self.in_flight -= 1
        self._places += self.is_closed(index)
        return self._followers.pop(index, [])

    def is_closed(self, index: int) -> bool:
        item = self._items[index]
        while item.follows is not None:
            item = self._items[item.follows]
        return item.arrival_s is None


def lead_s(items: Sequence[Item]) -> float:
    """Seconds from the start of a schedule to its first arrival."""
    return min((item.arrival_s or 0.0 for item in items if item.follows is None), default=0.0)


def from_outside(serve: Callable[[Sequence[Item], int], Served], items: Sequence[Item], concurrency: int) -> Served:
    """A pass, timed by somebody who knows nothing of requests and tokens. Of several who called, each the next one, the
    last has the last word: what the others did beside is not in its time."""
    start = time.perf_counter()
    served = serve(items, concurrency)
    took = time.perf_counter() - start - lead_s(items)
    return served if served.outside_s is not None else replace(served, outside_s=took)


class Sent(NamedTuple):
    """When a request went to the subject; as in RequestTrace."""

    arrival: float
    sent: float | None
    could_send: float


class CutOff(KeyboardInterrupt):
    """Ctrl-C came in the middle of a pass, `served` so far; requests without an end say so. `begun`: the timed Pass."""

    begun: Any = None

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.served = served


LOST = "the request that it follows has no answer"


class Outcomes:
    """What becomes of the requests of a pass, as who calls the subject notes it."""

    schedule: Schedule  # of the pass that runs

    def __init__(self, items: Sequence[Item], clock: Callable[[], float], prefix: str = "", lost: str = LOST) -> None:
        """`lost`: why a request has no answer, of one that follows another without."""
        self.items, self._lost, self._clock = items, lost, clock
        self.names = [f"{prefix}{item.name or 'request'}-{index}" for index, item in enumerate(items)]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        # Token ids, made before the clock starts; of a request that follows another, with all that came before it from
        # the moment that this is known.
        self.prompts = [list(item.prompt) for item in items]
        self.sent: dict[int, Sent] = {}  # of those that have been sent
        self.traces: dict[int, RequestTrace] = {}  # of those that have ended

    def run(
        self,
        concurrency: int,
        send: Callable[[int], None],
        advance: Callable[[float | None], bool],
        records: Sequence[StepRecord] = (),
    ) -> Served:
        """A whole pass.

        Args:
            send: gives a request to the subject. ValueError where it refuses that.
            advance: lets the subject work until something has ended or the next request is due, at the time that it is
                told (None: none is before something ends), and says whether there was anything to do or to wait for.
            records: of the subject, which are complete in the end.

        Raises CutOff where it was interrupted after some of it.
        """
        start = self._returned = self._clock()  # the subject, to who calls it
        self.schedule = Schedule(self.items, start, concurrency)
        try:
            while len(self.traces) < len(self.items):
                arrived = self.schedule.due(self._clock())
                for index, arrival in arrived:
                    # While a call lasts nothing can be sent: the time of a step, or of taking one, is the subject's.
                    sent = None if self.schedule.is_closed(index) else self._clock()
                    self.sent[index] = Sent(arrival, sent, self._returned)
                    try:
                        send(index)
                    except ValueError as error:  # it is too long, say
                        self.end(index, str(error))
                    self._returned = self._clock()
                if not advance(self.schedule.next_due()) and not arrived:  # what arrived may have been refused
                    raise RuntimeError("the subject has nothing to do, and requests are missing")
        except KeyboardInterrupt as stop:
            if not self.traces:
                raise
            for index in set(range(len(self.items))) - self.traces.keys():
                self.note(index, "the run was interrupted before its end")
            raise CutOff(self._served(start, records)) from stop
        return self._served(start, records)

    def answered(self) -> float:
        """To be called when the subject has returned with answers, before they are told of; says when that was."""
        self._returned = now = self._clock()
        self.schedule.tick(now)
        return now

    def end(
        self, index: int, error: str, token_times: Sequence[float] = (), token_ids: Sequence[int] = (), **more: Any
    ) -> Sequence[int]:
        """A request has ended, with an answer or with an error: then those that follow it have none either, and are
        returned."""
        self.note(index, error, token_times, token_ids, **more)
        if error:
            lost = self.schedule.lose(index)
            for follower in lost:
                self.note(follower, self._lost)
            return lost
        for follower in self.schedule.ended(index, token_times[-1]):
            self.prompts[follower] = [*self.prompts[index], *token_ids, *self.prompts[follower]]
        return ()

    def _served(self, start: float, records: Sequence[StepRecord]) -> Served:
        traces = tuple(self.traces[index] for index in range(len(self.items)))
        first = min((trace.arrival for trace in traces), default=start)
        return Served(traces, first, self._clock(), tuple(records), in_flight_s=self.schedule.in_flight_s)

    def note(
        self, index: int, error: str, token_times: Sequence[float] = (), token_ids: Sequence[int] = (), **more: Any
    ) -> None:
        """One that was never sent counts as having arrived now."""
        item, now = self.items[index], self._clock()
        self.traces[index] = RequestTrace(
            prompt_tokens=len(self.prompts[index]),
            asked_tokens=item.output_tokens,
            token_times=tuple(token_times),
            token_ids=tuple(token_ids),
            request_id=self.names[index],
            name=item.name,
            shared_tokens=item.shared_tokens,
            error=error,
            **self.sent.get(index, Sent(now, None, now))._asdict(),
            **more,
        )
