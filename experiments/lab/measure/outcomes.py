"""What becomes of the requests of a pass, as somebody notes it who calls the subject."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.lab.measure.schedule import Schedule
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer.core.plan import StepRecord


class Sent(NamedTuple):
    """When a request went to the subject; as in RequestTrace."""

    arrival: float
    sent: float | None
    could_send: float


class CutOff(KeyboardInterrupt):
    """Ctrl-C came in the middle of a pass. What there is of it: requests that had not ended say so."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.served = served


class Outcomes:
    """
    Attributes:
        prompts: token ids, made before the clock starts; of a request that follows another, with all that came before
            it from the moment that this is known.
        names: of the requests.
        sent: of those that have been sent.
        traces: of those that have ended.
        schedule: from `begin` on.
    """

    schedule: Schedule

    def __init__(self, items: Sequence[Item], names: Sequence[str], clock: Callable[[], float]) -> None:
        self.items = items
        self.names = names
        self.prompts = [list(item.prompt) for item in items]
        self.sent: dict[int, Sent] = {}
        self.traces: dict[int, RequestTrace] = {}
        self._clock = clock

    def run(
        self,
        concurrency: int,
        send: Callable[[int], None],
        advance: Callable[[float | None], bool],
        records: Sequence[StepRecord] = (),
    ) -> Served:
        """A whole pass.

        Args:
            send: gives a request to the subject.
            advance: lets the subject work until something has ended or the next request is due, at the time that it is
                told (None: none is before something ends), and says whether there was anything to do or to wait for.
            records: of the subject, which are complete in the end.

        Raises CutOff where it was interrupted after some of it.
        """
        self.begin(concurrency)
        try:
            while self.missing:
                arrived = self.deliver(send)
                if not advance(self.schedule.next_due()) and not arrived:  # what arrived may have been refused
                    raise RuntimeError("the subject has nothing to do, and requests are missing")
        except KeyboardInterrupt as stop:
            if not self.traces:
                raise
            for index in set(range(len(self.items))) - self.traces.keys():
                self._note(index, "the run was interrupted before its end")
            raise CutOff(self.served(records)) from stop
        return self.served(records)

    def begin(self, concurrency: int) -> None:
        self._start = self._returned = self._clock()  # the subject, to who calls it
        self.schedule = Schedule(self.items, self._start, concurrency)

    @property
    def missing(self) -> bool:
        return len(self.traces) < len(self.items)

    def deliver(self, give: Callable[[int], None]) -> bool:
        """Gives all requests that are due to the subject, and tells whether there were any. While a call lasts nothing
        can be sent: the time of a step, and of taking a request, is the subject's."""
        arrived = self.schedule.due(self._clock())
        for index, arrival in arrived:
            sent = None if self.schedule.is_closed(index) else self._clock()
            self.sent[index] = Sent(arrival, sent, self._returned)
            give(index)
            self._returned = self._clock()
        return bool(arrived)

    def answered(self) -> float:
        """To be called when the subject has returned with answers, before they are told of; says when that was."""
        self._returned = now = self._clock()
        self.schedule.tick(now)
        return now

    def end(
        self, index: int, error: str, token_times: Sequence[float] = (), token_ids: Sequence[int] = (), **more: Any
    ) -> None:
        """A request has ended, with an answer or with an error: then those that follow it have none either."""
        self._note(index, error, token_times, token_ids, **more)
        if error:
            for follower in self.schedule.lose(index):
                self._note(follower, "the request that it follows has no answer")
            return
        for follower in self.schedule.ended(index, token_times[-1]):
            self.prompts[follower] = [*self.prompts[index], *token_ids, *self.prompts[follower]]

    def served(self, records: Sequence[StepRecord] = ()) -> Served:
        end = self._clock()
        traces = tuple(self.traces[index] for index in range(len(self.items)))
        first = min((trace.arrival for trace in traces), default=self._start)
        return Served(traces, first, end, tuple(records), in_flight_s=self.schedule.in_flight_s)

    def _note(
        self, index: int, error: str, token_times: Sequence[float] = (), token_ids: Sequence[int] = (), **more: Any
    ) -> None:
        """One that was never sent counts as having arrived now."""
        item, sent = self.items[index], self.sent.get(index)
        if sent is None:
            now = self._clock()
            sent = Sent(now, None, now)
        self.traces[index] = RequestTrace(
            prompt_tokens=len(self.prompts[index]),
            asked_tokens=item.output_tokens,
            token_times=tuple(token_times),
            token_ids=tuple(token_ids),
            request_id=self.names[index],
            name=item.name,
            shared_tokens=item.shared_tokens,
            error=error,
            **sent._asdict(),
            **more,
        )
