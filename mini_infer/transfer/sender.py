"""The engine that computes prompts for others: it hears what they ask, has the engine compute it, and tells the end.

Its threads only hear. Everything else happens in the loop of the engine: `turn` between two steps, `take` for each
output. A prompt is a request like any other, of which nobody wants the token that it samples.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mini_infer.core.clock import machine
from mini_infer.core.errors import RequestError
from mini_infer.core.request import Export, FinishReason, RequestOutput, SamplingParams
from mini_infer.transfer.address import Door
from mini_infer.transfer.link import Bell, Link
from mini_infer.transfer.protocol import Ask, Cancel, Clock, End, Hello, Message, Unlike
from mini_infer.transfer.pusher import LOST

if TYPE_CHECKING:  # it is handed one
    from mini_infer.runtime.llm_engine import LLMEngine

logger = logging.getLogger(__name__)
_COMPUTE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class _Asked(NamedTuple):
    link: Link
    transfer_id: int  # as the link's other side calls it
    number: int  # as the pusher does


class Sender:
    """
    Args:
        about: what has to be equal on both sides (Hello.about).
    """

    def __init__(self, engine: LLMEngine, about: dict[str, str]) -> None:
        pusher = engine.executor.runner.pusher
        assert pusher is not None, "an engine with parallel.prefill has one"
        self._engine, self._about, self._pusher = engine, about, pusher
        self.bell = Bell()
        self._heard: deque[tuple[Link, Message | None]] = deque()  # None: the link has ended
        self._links: dict[Link, int] = {}  # those that have said Hello, numbered
        self._asked: dict[str, _Asked] = {}  # by the engine's request id
        self._numbers = itertools.count(1)
        self._door: Door | None = None

    def listen(self, where: str) -> str:
        """Takes links from other processes, `where` as of a Door. Its address."""
        self._door = door = Door.open(where)
        threading.Thread(target=self._accept, args=[door], name="kv-accept", daemon=True).start()
        return door.address

    def _accept(self, door: Door) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock = door.listener.accept()[0]
                threading.Thread(target=self._admit, args=[door, sock], daemon=True).start()

    def _admit(self, door: Door, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            Link(door.admit(sock), self.hear, self.hear_end).start()

    def hear(self, link: Link, message: Message, payload: bytearray) -> None:
        if isinstance(message, Hello) and message.machine != machine():
            link.send(Clock(message.now, self._engine.clock()))
        self._heard.append((link, message))
        self.bell.ring()

    def hear_end(self, link: Link) -> None:
        self._heard.append((link, None))
        self.bell.ring()

    def turn(self) -> None:
        """Takes in what was heard."""
        self.bell.quiet()
        while self._heard:
            link, message = self._heard.popleft()
            if isinstance(message, Hello):
                self._greet(link, message)
            elif isinstance(message, Ask) and link in self._links:
                self._add(link, message)
            elif isinstance(message, Cancel):
                self._abort(link, message.transfer_id)
            elif message is None:
                self._abort(link)
                if link in self._links:
                    self._pusher.disconnect(self._links.pop(link))

    def take(self, output: RequestOutput) -> bool:
        """Whether the output is of a prompt that somebody asked for; then that is all there is to do with it."""
        asked = self._asked.get(output.request_id)
        if asked is None:
            return False
        (completion,) = output.outputs
        if completion.finish_reason is None:
            return True
        del self._asked[output.request_id]
        num_bytes = self._pusher.close(asked.number)
        metrics = completion.metrics
        assert metrics is not None
        if num_bytes == LOST:  # something may still be on its way, as after a link has ended
            asked.link.close()
            return True
        if completion.finish_reason is FinishReason.length:
            assert metrics.first_scheduled_time is not None
            times = metrics.first_scheduled_time, metrics.token_times[-1], self._pusher.seconds
            end = End(asked.transfer_id, "", *times, num_bytes)
        else:
            end = End(asked.transfer_id, f"the prompt was given up: {completion.finish_reason.value}")
        asked.link.send(end)
        return True

    def close(self) -> None:
        if self._door is not None:
            self._door.listener.close()
        for link in self._links:
            link.close()
        self.bell.close()

    def _greet(self, link: Link, hello: Hello) -> None:
        unlike = [
            f"{name} is {hello.about.get(name)} there and {own} here"
            for name, own in self._about.items()
            if hello.about.get(name) != own
        ]
        number = next(self._numbers)
        if not unlike and hello.memories is None:
            self._pusher.send_by(number, link)
        elif not unlike and not self._pusher.connect(number, hello.memories or ()):
            self._pusher.disconnect(number)  # from those of our ranks that have reached it
            unlike = ["its memory cannot be reached from there (the log there says why)"]
        if unlike:
            logger.error("an engine asks for prompts and gets none: %s", "; ".join(unlike))
            link.send(Unlike("; ".join(unlike)))
        else:
            self._links[link] = number

    def _add(self, link: Link, ask: Ask) -> None:
        number = next(self._numbers)
        request_id = f"prompt-{number}"
        export = Export(number, ask.first, ask.blocks, self._engine.config.cache.block_size)
        try:
            self._engine.add_request(
                array("I", ask.token_ids),
                _COMPUTE,
                request_id=request_id,
                priority=ask.priority,
                cache_salt=ask.cache_salt,
                stream=False,
                export=export,
            )
        except (RequestError, ValueError) as error:  # bytes that are no tokens, too
            link.send(End(ask.transfer_id, str(error)))
            return
        self._pusher.open(number, self._links[link], ask.transfer_id)
        self._asked[request_id] = _Asked(link, ask.transfer_id, number)

    def _abort(self, link: Link, transfer_id: int | None = None) -> None:
        """One transfer of a link, or all of them. Their ends come with the engine's next outputs."""
        for request_id, asked in list(self._asked.items()):
            if asked.link is link and transfer_id in (None, asked.transfer_id):
                self._engine.abort(request_id)
