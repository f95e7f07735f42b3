"""One process of the load client: its share of a pass's requests, each sent when it is due and noted as it streams in.

Times are time.perf_counter's, which on Linux is CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.load.clients import Target
from experiments.lab.load.connection import Connection, Exchange, read_answer
from experiments.lab.measure.schedule import LOST, Outcomes, Schedule, Sent
from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig

OPEN_LOOP_CONNECTIONS = 64  # opened before the clock starts; an open loop opens more as it needs them
CONNECTING = 32  # at once, so that a server's backlog holds them


class Drive:
    """One pass. Requests are made, and connections opened, before the clock starts."""

    def __init__(self, items: Sequence[Item], target: Target, salt: str) -> None:
        self._items = items
        self._target = target
        self._salt = salt
        self._outcomes = Outcomes(items, time.perf_counter, lost=f"{LOST}, or none with token ids")
        self._requests = [
            b"" if item.follows is not None else target.request(item.prompt, item, salt) for item in items
        ]
        self._followed = {item.follows for item in items if item.follows is not None}
        self._exchanges: dict[int, Exchange] = {}
        self._unfinished = len(items)
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def connect(self, places: int) -> None:
        """Raises OSError where nobody listens."""
        closed = all(item.arrival_s is None for item in self._items)
        wanted = min(places if closed else OPEN_LOOP_CONNECTIONS, len(self._items))
        for first in range(0, wanted, CONNECTING):
            new = [self._connection() for _ in range(min(CONNECTING, wanted - first))]
            self._idle += await asyncio.gather(*new)

    async def run(self, start: float, places: int) -> None:
        """Begins at `start`, and returns when all have ended; at most `places` requests of the closed loop are in
        flight."""
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self._start = start
        self._schedule = self._outcomes.schedule = Schedule(self._items, start, places)
        gc.collect()
        gc.disable()  # a collection would look at all that has been read so far
        try:
            await asyncio.sleep(start - time.perf_counter())
            cpu = time.process_time()
            self._pump()
            await self._done
            self._end, self._cpu_s = time.perf_counter(), time.process_time() - cpu
        finally:
            gc.enable()
            for connection in self._idle:
                connection.close()

    def outcome(self) -> tuple[Served, float, bool]:
        """The pass that has run, the seconds of CPU that it took here, and whether the server said of every request
        what was in a prefix cache."""
        tells_cached = True
        for index, exchange in self._exchanges.items():
            answer = read_answer(exchange.reads)
            tells_cached &= answer.cached_tokens is not None
            if exchange.error or exchange.status != 200:
                begin = b"".join(piece for _, piece in exchange.reads)[:300].decode(errors="replace")  # it is no stream
                answer.error = exchange.error or f"HTTP status {exchange.status}: {begin}"
            if not self._schedule.is_closed(index):
                self._outcomes.sent[index] = self._outcomes.sent[index]._replace(sent=exchange.sent)
            tells_tokens = bool(answer.token_ids) or not answer.token_times
            self._outcomes.note(index, answer.error, answer.token_times, answer.token_ids, tells_tokens=tells_tokens,
                                cached_tokens=answer.cached_tokens or 0, spans=answer.spans,
                                first_scheduled=answer.first_scheduled)  # fmt: skip
        traces = tuple(trace for _, trace in sorted(self._outcomes.traces.items()))
        served = Served(traces, self._start, self._end, in_flight_s=self._schedule.in_flight_s)
        return served, self._cpu_s, tells_cached

    def _pump(self) -> None:
        """Sends what is due, and comes back when something else is."""
        for index, arrival in self._schedule.due(time.perf_counter()):
            self._send(index, arrival)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._schedule.next_due()
        if due is not None:  # the loop's clock is CLOCK_MONOTONIC, too, but need not be elsewhere
            self._timer = self._loop.call_later(max(0.0, due - time.perf_counter()), self._pump)

    def _send(self, index: int, arrival: float) -> None:
        exchange = Exchange()
        self._exchanges[index], self._outcomes.sent[index] = exchange, Sent(arrival, None, arrival)
        if not self._requests[index]:
            self._requests[index] = self._target.request(self._outcomes.prompts[index], self._items[index], self._salt)
        if self._idle:
            self._send_on(self._idle.pop(), index, exchange)
        else:
            self._open_and_send(index, exchange)

    def _send_on(self, connection: Connection, index: int, exchange: Exchange) -> None:
        connection.send(self._requests[index], exchange, lambda: self._ended(connection, index, exchange))

    def _open_and_send(self, index: int, exchange: Exchange) -> None:
        task = asyncio.ensure_future(self._open(index, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, index: int, exchange: Exchange) -> None:
        try:
            connection = await self._connection()
        except OSError as error:
            exchange.error = f"the server cannot be reached: {error}"
            self._finish(index, exchange)
            return
        self._send_on(connection, index, exchange)

    async def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._forget), self._target.host, self._target.port
        )
        return connection

    def _forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def _ended(self, connection: Connection, index: int, exchange: Exchange) -> None:
        if connection.stale:  # as servers do with connections that were idle for long
            exchange.error = ""
            self._open_and_send(index, exchange)
            return
        if not connection.is_closing:
            self._idle.append(connection)
        self._finish(index, exchange)

    def _finish(self, index: int, exchange: Exchange) -> None:
        self._unfinished -= 1
        now = time.perf_counter()
        self._schedule.tick(now)
        if index not in self._followed:
            self._schedule.ended(index, now)
        else:
            answer = read_answer(exchange.reads)
            whole = not (exchange.error or answer.error) and len(answer.token_ids) == self._items[index].output_tokens
            lost = self._outcomes.end(index, "" if whole else LOST, answer.token_times, answer.token_ids)
            self._unfinished -= len(lost)
        if self._unfinished:
            self._pump()
        elif not self._done.done():
            self._done.set_result(None)


class Client:
    """What the process that measures calls."""

    about: Mapping[str, Any] = {}

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()

    def prepare(self, items: Sequence[Item], salt: str, places: int) -> None:
        self._places = places
        self._drive = Drive(items, self._target, salt)
        self._loop.run_until_complete(self._drive.connect(places))

    def go(self, start: float) -> None:
        """As Drive.run. Answers are read afterwards: who calls this has a clock of its own."""
        self._loop.run_until_complete(self._drive.run(start, self._places))

    def outcome(self) -> tuple[Served, float, bool]:
        """As Drive.outcome."""
        return self._drive.outcome()


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Client:
    """For a process of its own. `config` is nothing for it."""
    return Client(settings["target"])
