"""Prompts that one simulated engine computes for another (docs/disaggregation.md). What they say to each other is the
protocol's own, and is heard at once. Blocks are pushed while they are computed, one step's after the other's: what is
still on its way when the last of them is computed holds up its end, but for the last group of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_infer.core.errors import RequestError
from mini_infer.core.request import Export, Handover, Request
from mini_infer.transfer.protocol import Arrival, Ask, Choice, NoReceiver

if TYPE_CHECKING:
    from mini_infer.simulation.executor import VirtualClock
    from mini_infer.simulation.replica import Replica


class SimulatedReceiver(NoReceiver):
    """Of an engine that decodes.

    Args:
        always: computes nothing here that others can.

    Attributes:
        said: since somebody last looked: (when, a prompt or the id of a transfer that nobody needs any more).
    """

    def __init__(self, clock: VirtualClock, always: bool) -> None:
        self.choice: Choice = Choice(always)
        self.said: list[tuple[float, Ask | int]] = []
        self._clock = clock
        self._asked: dict[int, float] = {}  # transfer -> when
        self._arrived: list[Arrival] = []

    def start(self, asks: Sequence[Ask], cancelled: Sequence[int]) -> None:
        self.said += [(self._clock.now, transfer_id) for transfer_id in cancelled]
        self.said += [(self._clock.now, ask) for ask in asks]
        self._asked |= {ask.transfer_id: self._clock.now for ask in asks}

    def poll(self) -> list[Arrival]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def end(self, transfer_id: int, computed: Request | None, copying: float) -> None:
        """A transfer has ended now, whose copies took so long. None: nobody has computed it."""
        asked, handover = self._asked.pop(transfer_id), None
        if computed is not None:
            assert computed.first_scheduled_time is not None
            times = computed.first_scheduled_time, computed.token_times[-1]
            handover = Handover(asked, *times, copying, arrived=self._clock.now, num_bytes=0)
        self._arrived.append(Arrival(transfer_id, handover))


@dataclass(frozen=True, eq=False)
class Said:
    """What replica `number` says."""

    number: int
    what: Ask | int


class Errands:
    """Prompts of a cluster's engines that others compute."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._computing: dict[Request, tuple[int, Ask]] = {}  # which replica has asked for it, and how

    def said(self, number: int) -> Iterator[tuple[float, Said]]:
        """What a replica has said since this was last asked."""
        receiver = self._replicas[number].receiver
        if receiver is not None:
            said, receiver.said = receiver.said, []
            yield from ((moment, Said(number, what)) for moment, what in said)

    def hear(self, event: Said | Request, now: float) -> list[int]:
        """Something that was said has come to those whom it concerns, or a prompt has been computed. Says which
        replicas have something to do now."""
        if isinstance(event, Request):
            return [self._end(event, event, now)]
        what = event.what
        if isinstance(what, Ask):
            replica = self._replicas[int(what.at)]
            export = Export(what.transfer_id, what.first, what.blocks, replica.block_size)
            try:
                request = replica.add("", what.token_ids, 1, now, what.priority, export=export)
            except RequestError:  # too long for this one: as where a Sender says so, it is computed where it decodes
                self._replicas[event.number].hear(what.transfer_id, None, 0.0, now)
                return [event.number]
            self._computing[request] = event.number, what
            return [int(what.at)]
        for request, (asker, ask) in self._computing.items():
            if (asker, ask.transfer_id) == (event.number, what) and not request.finished:
                self._replicas[int(ask.at)].cancel(request, now)
                return [int(ask.at), self._end(request, None, now)]
        return []  # its end is on its way

    def _end(self, request: Request, computed: Request | None, now: float) -> int:
        number, ask = self._computing.pop(request)
        copying = self._replicas[int(ask.at)].push_s(request)
        self._replicas[number].hear(ask.transfer_id, computed, copying, now)
        return number
