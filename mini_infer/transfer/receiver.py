"""The engine that decodes: it asks others for prompts' KV, and hears what has come.

The engine's loop calls `start` and `poll`, and waits for nobody; a thread of each link takes what comes. Links are made
when somebody is first asked, and again when one has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer.core.request import Handover
from mini_infer.transfer.address import reach
from mini_infer.transfer.link import Bell, Link
from mini_infer.transfer.protocol import (
    Arrival,
    Ask,
    Blocks,
    Cancel,
    Choice,
    Clock,
    End,
    Hello,
    Message,
    NoReceiver,
    Unlike,
)

logger = logging.getLogger(__name__)
SLOW_S = 0.1  # to be told that nobody is at an address
AWAY_S = 30.0  # for which such an address is not tried again: the engine's streams wait meanwhile
COPIES_END_S = 1.0  # after the process whose GPU makes them has ended: the connector `memory`


@dataclass
class _Asked:
    link: Link
    time: float
    copying: float = 0.0  # on this side
    cancelled: bool = False


class Receiver(NoReceiver):
    """
    Args:
        hello: what is said first on every link.
        take_blocks: puts the bytes behind a Blocks message where they belong.
        always: computes nothing here that others can.
        late_s: after a link has ended, others may write to this engine's memory for so long, if they do that
            themselves: they may be several processes, ask a GPU, or not know yet.

    Attributes:
        num_received, num_failed, num_bytes: transfers that came, those that did not though nobody had cancelled them,
            and what came.
    """

    def __init__(
        self,
        hello: Hello,
        take_blocks: Callable[[Blocks, bytearray], None],
        always: bool = False,
        late_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.choice: Choice = Choice(always)
        self.bell = Bell()
        self.num_received = self.num_failed = self.num_bytes = 0
        self._hello, self._take_blocks, self._clock = hello, take_blocks, clock
        self._late_s = late_s
        # Of the engine's thread and of those of links:
        self._changes = threading.Condition()
        self._links: dict[str, Link] = {}
        self._away: dict[str, float] = {}  # addresses, until when
        self._unlike: set[Link] = set()  # those that lead to an engine which computes nothing for this one
        self._ahead: dict[Link, float] = {}  # seconds that the clock of another machine is
        self._asked: dict[int, _Asked] = {}
        self._arrived: deque[Arrival] = deque()

    def start(self, asks: Sequence[Ask], cancelled: Sequence[int]) -> None:
        for transfer_id in cancelled:
            asked = self._asked.get(transfer_id)
            if asked is not None:
                asked.cancelled = True
                asked.link.send(Cancel(transfer_id))
        for ask in asks:
            if self._clock() < self._away.get(ask.at, 0.0):
                self._end(ask.transfer_id, None)
                continue
            started = time.perf_counter()
            try:
                with self._changes:
                    link = self._links.get(ask.at) or self._connect(ask.at)
                    self._asked[ask.transfer_id] = _Asked(link, self._clock())
                if link in self._unlike:
                    self._end(ask.transfer_id, None)
                else:
                    link.send(ask._replace(token_ids=array("I", ask.token_ids).tobytes()))
            except OSError as error:
                logger.warning("no engine computes prompts at %s: %s", ask.at, error)
                if time.perf_counter() - started > SLOW_S:
                    self._away[ask.at] = self._clock() + AWAY_S
                self._end(ask.transfer_id, None)

    def _connect(self, address: str) -> Link:
        return self.attach(address, Link(reach(address), self.hear, self.hear_end))

    def attach(self, address: str, link: Any) -> Any:
        self._links[address] = link
        link.start()
        link.send(self._hello._replace(now=self._clock()))
        return link

    def poll(self) -> list[Arrival]:
        self.bell.quiet()
        arrivals = []
        while self._arrived:
            arrivals.append(self._arrived.popleft())
        for arrival in arrivals:
            if arrival.handover is not None:
                self.num_received += 1
                self.num_bytes += arrival.handover.num_bytes
        return arrivals

    def abandon(self) -> None:
        with self._changes:
            for transfer_id, asked in self._asked.items():
                asked.cancelled = True
                asked.link.send(Cancel(transfer_id))
            self._changes.wait_for(lambda: not self._asked)
        self._arrived.clear()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self.bell.close()

    # --- in threads of links --------------------------------------------------------------------------------------

    def hear(self, link: Link, message: Message, payload: bytearray) -> None:
        if isinstance(message, Blocks):
            asked = self._asked.get(message.transfer_id)
            if asked is not None:
                started = time.perf_counter()
                self._take_blocks(message, payload)
                asked.copying += link.seconds + time.perf_counter() - started
        elif isinstance(message, End):
            asked = self._asked.get(message.transfer_id)
            if asked is None:
                return
            handover = None
            if message.reason and not asked.cancelled:
                logger.info("a prompt is computed here: %s", message.reason)
            elif not message.reason:
                copying = message.copying + asked.copying
                ahead = self._ahead.get(link, 0.0)
                times = message.begun - ahead, message.computed - ahead, copying, self._clock()
                handover = Handover(asked.time, *times, message.num_bytes)
            self._end(message.transfer_id, handover)
        elif isinstance(message, Clock):
            self._ahead[link] = message.now - (message.asked + self._clock()) / 2
        elif isinstance(message, Unlike):
            logger.error(
                "prompts are computed here, since the engine for prompts is unlike this one: %s", message.reason
            )
            with self._changes:
                self._unlike.add(link)
            for transfer_id in self._of(link):
                self._end(transfer_id, None)

    def hear_end(self, link: Link) -> None:
        """Whatever it was to send will not come."""
        if lost := self._lose(link):
            time.sleep(self._late_s)
        for transfer_id in lost:
            self._end(transfer_id, None)

    def _lose(self, link: Link) -> list[int]:
        """Nobody waits for what the link was to send. Nobody has the blocks of these transfers, either, until `_end` of
        each; and not to reserve more and more, nobody else is asked there meanwhile."""
        with self._changes:
            lost = self._of(link)
            gone = [at for at, other in self._links.items() if other is link]
            for at in gone:
                del self._links[at]
                if lost:
                    self._away[at] = self._clock() + self._late_s
            self._unlike.discard(link)
            self._ahead.pop(link, None)
            self._arrived.extend(Arrival(transfer_id, None, free=False) for transfer_id in lost)
        self.bell.ring()
        return lost

    def _of(self, link: Link) -> list[int]:
        return [transfer_id for transfer_id, asked in self._asked.items() if asked.link is link]

    def _end(self, transfer_id: int, handover: Handover | None) -> None:
        with self._changes:
            asked = self._asked.pop(transfer_id, None)
            self.num_failed += handover is None and not (asked is not None and asked.cancelled)
            self._arrived.append(Arrival(transfer_id, handover))
            self._changes.notify_all()
        self.bell.ring()
