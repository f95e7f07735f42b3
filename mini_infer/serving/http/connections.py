"""What a client may take before it has said what it wants: bytes of a head, seconds, and a place among the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from mini_infer.core.logs import Complaint
from mini_infer.serving.api.errors import ApiError, as_api_error
from mini_infer.serving.http.turns import Turns

logger = logging.getLogger("uvicorn.error")

HEAD_BYTES = 2**16  # of request line and headers
STEP = 2**12  # bytes of a head that are parsed before they are counted again
SWEEP_S = 0.25
AT_ONCE = 16  # connections that are closed: some milliseconds


class Connections:
    """The connections of one API process that wait for their client, oldest first.

    Args:
        most: open ones, of whatever kind. Beyond, the one that has been silent for longest gives way.
        head_s, body_s: seconds until a request's head, and then its body, must be there.
        on_refusal: called with the status of each answer that is given here.
    """

    def __init__(self, most: int, head_s: float, body_s: float, on_refusal: Callable[[int], None]) -> None:
        self.most = most
        self._head_s = head_s
        self._body_s = body_s
        self.on_refusal = on_refusal
        self._open: set[LimitedProtocol] = set()
        self._heads: dict[LimitedProtocol, float] = {}  # with the time when their patience ends
        self._bodies: dict[LimitedProtocol, float] = {}
        self._idle: dict[LimitedProtocol, None] = {}  # kept alive, between two requests
        self._sweeping = False
        self._complaint = Complaint(logger)
        self.turns = Turns()

    def opened(self, connection: LimitedProtocol) -> None:
        self._open.add(connection)
        if len(self._open) > self.most and not self.make_room():
            self._complaint.say("503: %d connections are open, and none of them is silent", self.most)
            connection.refuse(ApiError(503, f"{self.most} connections are open: try again later"))
        else:
            self.await_head(connection)

    def closed(self, connection: LimitedProtocol) -> None:
        self._open.discard(connection)
        self.await_nothing(connection)

    def await_head(self, connection: LimitedProtocol) -> None:
        self._idle.pop(connection, None)
        self._await(connection, self._heads, self._head_s)

    def await_body(self, connection: LimitedProtocol) -> None:
        self._heads.pop(connection, None)
        self._await(connection, self._bodies, self._body_s)

    def await_nothing(self, connection: LimitedProtocol) -> None:
        for waiting in (self._heads, self._bodies, self._idle):
            waiting.pop(connection, None)

    def await_next(self, connection: LimitedProtocol) -> None:
        """uvicorn's own time for keeping it alive begins."""
        if connection not in self._heads and connection not in self._bodies:
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Closes some that wait for their client to speak; whether there were any."""
        silent = list(islice(chain(self._heads, self._idle, self._bodies), AT_ONCE))
        for connection in silent:
            connection.transport.abort()
            self.closed(connection)
        return bool(silent)

    def end_bodies(self, error: ApiError) -> None:
        """No longer waits for those that have not come to their end."""
        for connection in list(self._bodies):
            connection.refuse(as_api_error(error))  # which logs it

    def _await(self, connection: LimitedProtocol, waiting: dict[LimitedProtocol, float], seconds: float) -> None:
        waiting.setdefault(connection, asyncio.get_running_loop().time() + seconds)
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        now, wait_s = asyncio.get_running_loop().time(), SWEEP_S
        for waiting, what in ((self._heads, "head"), (self._bodies, "body")):
            late = [connection for connection, until in islice(waiting.items(), AT_ONCE) if until <= now]
            for connection in late:
                waiting.pop(connection)
                connection.refuse(ApiError(408, f"the {what} of the request did not come in time"))
            if len(late) == AT_ONCE:  # there may be more
                wait_s = 0.0
        self._sweeping = bool(self._heads or self._bodies)
        if self._sweeping:
            asyncio.get_running_loop().call_later(wait_s, self._sweep)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's, which knows no limits of these kinds.

    The app is asked when a request has come to its end, or is longer than uvicorn keeps: one that does not go on costs
    neither a task nor the app's time.

    Args:
        on_end: called when the connection has ended.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        connections: Connections,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = connections
        self._on_end = on_end
        self._head_bytes = 0
        self._in_body = False
        self._begin: Callable[[], object] | None = None  # asks the app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limits.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limits.closed(self)
        self._on_end()
        if self._begin is not None:  # nobody ends it, and it refers to this connection: left to the garbage collector
            self._begin = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if not self._in_body and not self._head_bytes:
            self._limits.await_head(self)
        start = 0
        while start < len(data) and not self.transport.is_closing():
            piece = data[start:]
            if not self._in_body:
                if self._head_bytes >= HEAD_BYTES:
                    limit = f"the request's line and headers are larger than {HEAD_BYTES} bytes"
                    self.refuse(ApiError(431, limit, code="head_too_large"))
                    return
                piece = piece[:STEP]
                self._head_bytes += len(piece)
            super().data_received(piece)
            start += len(piece)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._limits.await_head(self)  # it may begin in the piece in which the one before has ended

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # a trailer is for nobody, and there could be many
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._limits.await_body(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._ask()

    def on_message_complete(self) -> None:
        self._in_body, self._head_bytes = False, 0
        self._limits.await_nothing(self)
        super().on_message_complete()
        self._ask()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._begin = partial(super()._start_asgi_task, cycle, app)
        if cycle.waiting_for_100_continue or not cycle.more_body:
            self._ask()

    def _ask(self) -> None:
        """In its turn, and not where the connection has ended by then."""
        if (begin := self._begin) is not None:
            self._begin = None
            self._limits.turns.take(
                self.client[0] if self.client else "", lambda: self.transport.is_closing() or begin()
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._limits.await_next(self)

    def refuse(self, error: ApiError) -> None:
        """Ends the connection, with an answer where none has begun."""
        if self.transport.is_closing():
            return
        self._limits.on_refusal(error.status)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
                error.body
            )
            self.transport.write(STATUS_LINE[error.status] + head + error.body)
        self.transport.close()
