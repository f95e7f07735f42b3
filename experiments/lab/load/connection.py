"""An HTTP/1.1 connection for one request at a time. While an answer streams in, each read is noted with its time and
nothing is decoded, so that the client costs little where the clock runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httptools

from experiments.lab.load.events import Read


class Exchange:
    """One request and what came back of it."""

    __slots__ = ("error", "reads", "sent", "status")

    def __init__(self) -> None:
        self.sent: float | None = None  # when it was written
        self.status = 0
        self.reads: list[Read] = []  # of the body
        self.error = ""  # of the connection


class Connection(asyncio.Protocol):
    def __init__(self, gone: Callable[[Connection], None]) -> None:
        """`gone` is called when the connection is lost while it is idle."""
        self._gone = gone
        self._clock = time.perf_counter
        self._now = 0.0
        self._exchange: Exchange | None = None
        self._ended: Callable[[], None] | None = None
        self._answered = False  # a byte of the answer has come
        self.uses = 0  # requests sent
        self.stale = False  # the server had closed it before it could know of the request

    def send(self, request: bytes, exchange: Exchange, ended: Callable[[], None]) -> None:
        """`ended` is called when the answer is complete, or the connection lost; then it can be used again unless
        `is_closing`."""
        self._exchange, self._ended, self._answered = exchange, ended, False
        self.uses += 1
        exchange.sent = self._clock()
        self._transport.write(request)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._gone = _nothing
        self._transport.abort()

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._transport.abort()
            self._end(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is None:
            self._gone(self)
            return
        self.stale = self.uses > 1 and not self._answered
        self._end(f"the connection was lost: {error or 'the server closed it'}")

    # --- the parser's side ----------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        self._exchange.reads.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self._transport.close()
        self._end("")

    def _end(self, error: str) -> None:
        exchange, ended = self._exchange, self._ended
        if exchange is None or ended is None:
            return
        exchange.error = error
        self._exchange = self._ended = None
        ended()


def _nothing(_: Connection) -> None:
    """For a connection that is closed on purpose."""
