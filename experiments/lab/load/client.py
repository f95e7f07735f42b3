"""The load client. Each of its processes sends its share of a pass's requests when they are due, and notes them as they
stream in; `Clients` is all of them, as the process that measures sees them.

Times are time.perf_counter's, which on Linux is CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.lab.load.connection import Connection, Exchange, read_answer
from experiments.lab.measure.kinds import ClientSettings
from experiments.lab.measure.schedule import LOST, Outcomes, Schedule, Sent, lead_s
from experiments.lab.measure.traces import HostUse, Served, first_scheduled, joined
from experiments.lab.peers.process import PeerProcess, ask_all
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.cores import usable_cores

OPEN_LOOP_CONNECTIONS = 64  # opened before the clock starts; an open loop opens more as it needs them
CONNECTING = 32  # at once, so that a server's backlog holds them
STREAMS_EACH = 64  # of a process, before there is another one
LEAD_S = 0.05  # from the word to go to the start, which all processes share

# Of every request. A model without a tokenizer has no text to tell: with ids each of its tokens has an event anyway.
ASKED = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    path: str  # of the completions
    model: str
    ours: bool = False  # a server that knows what others may not

    def request(self, prompt: Sequence[int], item: Item, salt: str) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": item.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **ASKED,
            **({"return_spans": True} if self.ours else {}),
            **({"priority": item.priority} if item.priority else {}),
            **({"cache_salt": salt} if salt else {}),
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class Client:
    """One process, and the requests of a pass that are its own. They are made, and connections opened, before the clock
    starts."""

    about: Mapping[str, Any] = {}

    def __init__(self, target: Target) -> None:
        self._target, self._loop = target, asyncio.new_event_loop()

    def prepare(self, items: Sequence[Item], own: Sequence[int], salt: str, places: int) -> None:
        """`places`: so many requests of the closed loop are in flight at most. Raises OSError where nobody listens."""
        self._items, self._own, self._salt, self._places = items, own, salt, places
        self._outcomes = Outcomes(items, time.perf_counter, lost=f"{LOST}, or none with token ids")
        first = [index for index in own if items[index].follows is None]
        self._requests = {index: self._target.request(items[index].prompt, items[index], salt) for index in first}
        self._followed = {items[index].follows for index in own} - {None}
        self._exchanges: dict[int, Exchange] = {}
        self._unfinished = len(own)
        self._idle: dict[Connection, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.run_until_complete(self._connect())

    def go(self, start: float) -> None:
        """From `start` until all have ended. Answers are read afterwards: who calls this has a clock of its own."""
        self._loop.run_until_complete(self._run(start))

    async def _connect(self) -> None:
        closed = all(self._items[index].arrival_s is None for index in self._own)
        wanted = min(self._places if closed else OPEN_LOOP_CONNECTIONS, len(self._own))
        while (missing := wanted - len(self._idle)) > 0:
            made = await asyncio.gather(*(self._connection() for _ in range(min(CONNECTING, missing))))
            self._idle |= dict.fromkeys(made)

    async def _run(self, start: float) -> None:
        self._start = start
        self._done = self._loop.create_future()
        self._schedule = self._outcomes.schedule = Schedule(self._items, start, self._places, self._own)
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
                                first_scheduled=first_scheduled(answer.token_times, answer.spans))  # fmt: skip
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
        if index not in self._requests:
            self._requests[index] = self._target.request(self._outcomes.prompts[index], self._items[index], self._salt)
        if self._idle:
            self._send_on(self._idle.popitem()[0], index, exchange)
        else:
            self._open_and_send(index, exchange)

    def _send_on(self, connection: Connection, index: int, exchange: Exchange) -> None:
        connection.send(self._requests[index], exchange, lambda: self._ended(connection, index, exchange))

    def _open_and_send(self, index: int, exchange: Exchange) -> None:
        task = self._loop.create_task(self._open(index, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, index: int, exchange: Exchange) -> None:
        try:
            self._send_on(await self._connection(), index, exchange)
        except OSError as error:
            exchange.error = f"the server cannot be reached: {error}"
            self._finish(index, exchange)

    async def _connection(self) -> Connection:
        make, target = partial(Connection, lambda gone: self._idle.pop(gone, None)), self._target
        _, connection = await self._loop.create_connection(make, target.host, target.port)
        return connection

    def _ended(self, connection: Connection, index: int, exchange: Exchange) -> None:
        if connection.stale:  # as servers do with connections that were idle for long
            exchange.error = ""
            self._open_and_send(index, exchange)
            return
        if not connection.is_closing:
            self._idle[connection] = None
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


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Client:
    """For a process of its own. `config` is nothing for it."""
    return Client(settings["target"])


class Clients:
    def __init__(self, target: Target, settings: ClientSettings) -> None:
        self._target, self._settings = target, settings
        self._processes: list[PeerProcess] = []

    def serve(self, items: Sequence[Item], concurrency: int, salt: str) -> Served:
        """Raises PeerError where a process fails. A request that fails is in its trace."""
        count = self._count(min(concurrency, len(items)))
        hands = [own for own in deal(items, count) if own]
        while len(self._processes) < len(hands):
            client = PeerProcess("the load client", __name__, EngineConfig(), self._settings, target=self._target)
            self._processes.append(client)
        places = (concurrency // count + (process < concurrency % count) for process in range(count))
        about = {"items": items, "salt": salt}
        asked = [{**about, "own": own, "places": free} for own, free in zip(hands, places, strict=False)]
        clients = self._processes[: len(asked)]  # a smaller pass needs fewer of them
        ask_all(clients, "connect", "prepare", asked)
        start = time.perf_counter() + LEAD_S
        ask_all(clients, "serve", "go", [{"start": start}] * len(asked))
        took = time.perf_counter() - start - lead_s(items)  # by this clock, whatever they say of theirs
        told = ask_all(clients, "read the answers", "outcome", [{}] * len(asked))
        parts, cpu, tells_cached = zip(*told, strict=True)
        served = joined(parts, hands)
        return replace(
            served,
            start=min((request.arrival for request in served.requests), default=start),
            host=HostUse(
                client_s=sum(cpu),
                client_busy=max(used / part.seconds for used, part in zip(cpu, parts, strict=True)),
                tells_cached=all(tells_cached),
            ),
            outside_s=took,
        )

    def close(self) -> None:
        while self._processes:
            self._processes.pop().close()

    def _count(self, in_flight: int) -> int:
        """Processes for so many streams; without a setting never more than half of the CPUs, which others need."""
        most = min(math.ceil(in_flight / STREAMS_EACH), max(1, usable_cores() // 2))
        return min(self._settings.processes or most, in_flight)


def deal(items: Sequence[Item], processes: int) -> list[list[int]]:
    """Indices of each process's requests: dealt out in turns, those of a conversation together. A process keeps its own
    places filled: at the end of a closed loop one may have none left to send while another still has."""
    dealt: list[list[int]] = [[] for _ in range(processes)]
    turns, owner = itertools.cycle(dealt), list[list[int]]()
    for index, item in enumerate(items):
        owner.append(next(turns) if item.follows is None else owner[item.follows])
        owner[-1].append(index)
    return dealt
