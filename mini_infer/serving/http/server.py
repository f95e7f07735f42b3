"""The HTTP server of one API process, around the app."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from mini_infer.core.garbage import settle
from mini_infer.core.logs import install
from mini_infer.serving.api.app import create_app
from mini_infer.serving.http.acceptor import Acceptor, allow_many_open_files, room_for_connections
from mini_infer.serving.http.connections import Connections, LimitedProtocol
from mini_infer.serving.http.handover import Handover
from mini_infer.serving.settings import ServerSettings

KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that it is not closed as they use it again
YOUNG_OBJECTS = 2000  # before the garbage collector looks at them
SWITCH_S = 0.001  # after which a thread that parses or encodes something long lets the event loop have Python
BACKSTOP_S = 5  # beyond shutdown_timeout, for answers to be sent


async def serve(
    settings: ServerSettings,
    source: socket.socket | Handover,
    on_ready: Callable[[], None] = lambda: None,
    engine_paths: Sequence[str] = (),
    accounts: int | None = None,
    homes_file: int | None = None,
) -> int:
    """
    Args:
        source: of connections: a bound socket, at which this process listens, or the supervisor who accepts them.
        on_ready: called when they may come.
        engine_paths, accounts, homes_file: as with Gateway.start.

    Returns:
        The exit code: 0 after a signal, 1 when the engine died.

    Raises:
        ConfigError, ModelError, EngineDead: the engine cannot start.
    """

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings, stop, engine_paths, accounts, homes_file)
    server = _Server(app, settings, source, on_ready)
    with _stoppable_start(asyncio.get_running_loop()):
        starting = app.router.lifespan_context(app)
        await starting.__aenter__()
    _pass_signals_to(server)
    settle(YOUNG_OBJECTS)
    sys.setswitchinterval(SWITCH_S)
    try:
        await server.serve()
        return 1 if app.state.gateway.failure else 0
    finally:
        await starting.__aexit__(None, None, None)


class _Server(uvicorn.Server):
    """Serves connections from elsewhere, and tells the app when it is asked to stop."""

    def __init__(
        self, app: FastAPI, settings: ServerSettings, source: socket.socket | Handover, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",  # here, so that an engine that cannot start is a message and no traceback
                log_level=settings.log_level.value,
                log_config=None if install(settings.log_format) else LOGGING_CONFIG,
                access_log=settings.access_log,
                server_header=False,
                proxy_headers=False,  # nothing here asks for the client's address
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_graceful_shutdown=int(settings.shutdown_timeout) + BACKSTOP_S,
            )
        )
        self._app = app
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._on_ready = on_ready
        allow_many_open_files()
        self._limits = Connections(
            min(settings.max_connections, room_for_connections()),
            settings.header_timeout,
            settings.body_timeout,
            lambda status: app.state.gateway.count(f"responses other {status}"),
        )
        if isinstance(source, socket.socket):
            self._source: Handover | Acceptor = Acceptor(source, self._take, self._limits.make_room)
        else:
            self._source = source
        self._opening: dict[asyncio.Task[object], None] = {}  # oldest first; it is TLS that takes time

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT and isinstance(self._source, Handover):
            return  # a terminal's Ctrl-C is for the supervisor, who then sends SIGTERM
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._stop_app)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        await self.lifespan.startup()
        self.started = True
        if isinstance(self._source, Handover):
            self._source.start(self._take, self._limits.make_room, self._on_supervisors_end)
        else:
            self._source.listen()
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._source.stop()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await super().shutdown(sockets)

    def _stop_app(self) -> None:
        gateway = self._app.state.gateway
        if not gateway.stopping:
            gateway.stop()
            self._loop.call_later(self._settings.shutdown_timeout, self._end_running)

    def _end_running(self) -> None:
        self._limits.end_bodies(self._app.state.gateway.end_running())

    def _on_supervisors_end(self) -> None:
        self.should_exit = True
        self._stop_app()

    # --- connections ----------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket) -> bool:
        sock.setblocking(False)
        patience = self._settings.header_timeout if self.config.is_ssl else None
        accepting = self._loop.connect_accepted_socket(
            self._make_protocol, sock, ssl=self.config.ssl, ssl_handshake_timeout=patience
        )
        opening = self._loop.create_task(accepting)
        self._opening[opening] = None
        opening.add_done_callback(self._opened)
        if len(self._opening) > self._limits.most:
            next(iter(self._opening)).cancel()
        return True

    def _make_protocol(self) -> LimitedProtocol:
        return LimitedProtocol(
            self.config, self.server_state, self.lifespan.state, connections=self._limits, on_end=self._on_end
        )

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.pop(opening)
        if opening.cancelled() or opening.exception() is not None:
            self._on_end()

    def _on_end(self) -> None:
        if isinstance(self._source, Handover):
            self._source.connection_ended()


def _pass_signals_to(server: _Server) -> None:
    """One that comes before the HTTP server listens for signals stops it, too. When it has ended it raises again those
    that it was stopped by: then they have been dealt with."""

    def take(number: int, frame: FrameType | None) -> None:
        if not server.should_exit:
            server.handle_exit(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)


@contextlib.contextmanager
def _stoppable_start(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """SIGTERM cancels this task."""
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
