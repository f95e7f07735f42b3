"""One engine as an API process sees it: a connection, and the requests that it has been given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from mini_infer.core.clock import machine
from mini_infer.core.errors import MiniInferError, RequestError
from mini_infer.serving.link.link import EngineDead, Link, Listener
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.link.wire import Abort, Add, ChangeAdapter, Count, Done, Outputs, Ready, Refused
from mini_infer.serving.processes.launch import EngineProcess
from mini_infer.serving.router import Chain, Route
from mini_infer.serving.stats import Stats

if TYPE_CHECKING:
    from mini_infer.serving.processes.async_engine import AsyncEngine

RETRY_S = 0.1  # from a connection that ended to the next attempt


class EngineError(MiniInferError, RuntimeError):
    """A fault of the engine's own that costs one request."""


class QueueFull(MiniInferError, RuntimeError):
    """Too many requests wait; `retry_after`: for how many seconds, about."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Request:
    """What an engine was asked, so that another one can be asked."""

    __slots__ = ("add", "chain", "num_completions", "num_lost", "parts", "refused_by", "route", "stream")

    def __init__(self, add: Add, stream: Stream, num_completions: int, chain: Chain) -> None:
        self.add = add
        self.stream = stream
        self.num_completions = num_completions
        self.chain = chain
        self.route: Route | None = None
        self.refused_by: set[int] = set()  # replicas
        self.num_lost = 0  # engines that died with it
        self.parts: list[bytes] = []  # of its prompt's log-probabilities, as far as they have come


class Replica(Listener):
    """Told to `open` or to `keep_open`, and then whom to tell what comes: `attach`.

    Args:
        number: its place among the replicas.
        process: where this process is the one that started the engine.

    Attributes:
        info: what the engine turned out to be; None before it has served.
        stats: its latest; they come every 0.1 s while it works, and when it has nothing left to do.
        failure: why it cannot be asked; None while it can.
        requests: those under way, by number.
    """

    def __init__(self, number: int, socket_path: str, process: EngineProcess | None = None) -> None:
        self.number = number
        self.socket_path = socket_path
        self.process = process
        self.info: Ready | None = None
        self.stats = Stats()
        self.failure: str | None = "it has not served yet"
        self.requests: dict[int, Request] = {}
        self._to_wake: list[Stream] = []
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._owner: AsyncEngine | None = None
        self._link: Link | None = None
        self._opening: asyncio.Task[None] | None = None
        self._ahead = 0.0  # seconds that the engine's clock is

    @property
    def takes_requests(self) -> bool:
        return self.failure is None and not self.stats.draining

    async def open(self, timeout: float) -> None:
        """Connects, and waits until the engine serves. Errors: Link.open's."""
        self._link, self.info = await Link.open(self.socket_path, self.process, timeout)
        self._ahead = 0.0 if self.info.machine == machine() else self.info.now - time.perf_counter()
        self.failure, self.stats = None, Stats()
        if self._owner is not None:
            self._link.attach(self)

    def keep_open(self, timeout: float) -> asyncio.Task[None]:
        """Tries `open` until it succeeds: whoever supervises the engine starts another one when it ends."""

        async def connect() -> None:
            while True:
                try:
                    return await self.open(timeout)
                except MiniInferError as error:
                    if self.info is None:  # else how it ended says more
                        self.failure = str(error)
                await asyncio.sleep(RETRY_S)

        self._opening = asyncio.get_running_loop().create_task(connect())
        return self._opening

    def attach(self, owner: AsyncEngine) -> None:
        self._owner = owner
        if self._link is not None:
            self._link.attach(self)

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last said something."""
        return 0.0 if self._link is None else time.monotonic() - self._link.heard

    def count(self, counts: dict[str, int]) -> None:
        """Adds to its `Stats.counted`."""
        if self._link is not None:
            self._link.send(Count(counts))

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._link is not None:
            self._link.close()

    def send(self, request: Request) -> None:
        """Raises RequestError where it holds what cannot be sent."""
        assert self._link is not None
        add = request.add
        if self._ahead:
            due = None if add.deadline_time is None else add.deadline_time + self._ahead
            add = structs.replace(add, arrival_time=add.arrival_time + self._ahead, deadline_time=due)
        try:
            self._link.send(add)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request holds what cannot be sent to the engine: {error}") from error
        self.requests[request.add.number] = request
        request.parts = []

    async def change_adapter(self, change: ChangeAdapter) -> str | None:
        """Returns the folder that the name stood for before, None where it was nobody's: `stats` may not have come yet
        that tell it. Raises RequestError where the engine refuses it, and EngineDead."""
        if self._link is None:
            raise EngineDead(str(self.failure))
        answer = self._asked[change.number] = asyncio.get_running_loop().create_future()
        self._link.send(change)
        return await answer

    def abort(self, request: Request) -> None:
        """The engine's last word of it is still to come."""
        if request.add.number in self.requests and self._link is not None:
            self._link.send(Abort(request.add.number))

    @property
    def _told(self) -> AsyncEngine:
        assert self._owner is not None
        return self._owner

    # --- what the engine says -------------------------------------------------------------------------------------

    def take_outputs(self, outputs: Outputs) -> None:
        requests = self.requests
        for delta in outputs.deltas:
            request = requests.get(delta.number)
            if request is None:  # it has ended
                continue
            if (logprobs := delta.prompt_logprobs) is not None:
                request.parts += logprobs.parts
                if logprobs.more:
                    continue
                logprobs.parts, request.parts = request.parts, []
            stream = request.stream
            if stream.put(delta):
                self._to_wake.append(stream)
            if not stream.num_unfinished:
                del requests[delta.number]
                self._told.take_end(request)

    def take_pause(self) -> None:
        # Not before: behind a loop that is late there are several steps' outputs, which go out as one.
        woken, self._to_wake = self._to_wake, []
        for stream in woken:
            stream.wake()

    def take_refusal(self, refused: Refused) -> None:
        request = self.requests.pop(refused.number, None)
        if request is not None:
            self._told.take_refusal_of(request, _error(refused))
        elif (answer := self._asked.pop(refused.number, None)) is not None and not answer.done():
            answer.set_exception(_error(refused))

    def take_done(self, done: Done) -> None:
        if (answer := self._asked.pop(done.number, None)) is not None and not answer.done():
            answer.set_result(done.had)

    def take_stats(self, stats: Stats) -> None:
        self.stats = stats
        self._told.take_news(self)

    def take_death(self, reason: str) -> None:
        self.failure = reason
        self._link = None
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))
        lost, self.requests = list(self.requests.values()), {}
        self._told.take_loss(self, lost)


def why_none(replicas: Sequence[Replica]) -> str:
    """Why none of them takes requests."""
    if len(replicas) == 1:
        return str(replicas[0].failure)
    reasons = [f"replica {replica.number}: {replica.failure or 'it is being restarted'}" for replica in replicas]
    return f"no replica takes requests: {'; '.join(reasons)}"


def _error(refused: Refused) -> Exception:
    if refused.retry_after is not None:
        return QueueFull(refused.message, refused.retry_after)
    return EngineError(refused.message) if refused.internal else RequestError(refused.message, refused.param)
