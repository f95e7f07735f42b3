"""The HTTP server of one API process, around the app."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mini_infer.serving.api.app import create_app
from mini_infer.serving.processes.handover import Handover
from mini_infer.serving.settings import ServerSettings

KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that it is not closed as they use it again
BACKSTOP_S = 5  # beyond shutdown_timeout, for answers to be sent


async def serve(settings: ServerSettings, sock: socket.socket, on_ready: Callable[[], None]) -> int:
    """The only API process: it starts the engine process, listens at this bound socket, and calls `on_ready`.

    Returns:
        The exit code: 0 after a signal, 1 when the engine died.

    Raises:
        ConfigError, ModelError, EngineDead: the engine cannot start.
    """
    return await _serve(settings, (), lambda app: _Listening(app, settings, sock, on_ready))


async def serve_handed_over(settings: ServerSettings, engine_paths: Sequence[str], handover: Handover) -> int:
    """One API process of several, under a Supervisor. Arguments, results and errors otherwise as with `serve`.

    Args:
        engine_paths: the engine processes' sockets.
        handover: where the connections come from.
    """
    return await _serve(settings, engine_paths, lambda app: _HandedOver(app, settings, handover))


class _Server(uvicorn.Server):
    """Tells the app when it is asked to stop."""

    def __init__(self, app: FastAPI, settings: ServerSettings, protocol: type[HttpToolsProtocol]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",  # here, so that an engine that cannot start is a message and no traceback
                log_level=settings.log_level.value,
                access_log=settings.access_log,
                server_header=False,
                proxy_headers=False,  # nothing here asks for the client's address
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(settings.shutdown_timeout) + BACKSTOP_S,
            )
        )
        self._app = app
        self._settings = settings
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self.stop_app)

    def stop_app(self) -> None:
        service = self._app.state.service
        if not service.stopping:
            service.stop()
            self._loop.call_later(self._settings.shutdown_timeout, service.end_running)


class _Listening(_Server):
    """Accepts connections itself."""

    def __init__(
        self, app: FastAPI, settings: ServerSettings, sock: socket.socket, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(app, settings, HttpToolsProtocol)
        self._sock = sock
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([self._sock])
        self._on_ready()


class _HandedOver(_Server):
    """Takes the connections that a supervisor has accepted, and ends with it."""

    def __init__(self, app: FastAPI, settings: ServerSettings, handover: Handover) -> None:
        class Protocol(HttpToolsProtocol):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                handover.connection_ended()

        super().__init__(app, settings, Protocol)
        self._handover = handover
        self._protocol = Protocol
        self._opening: set[asyncio.Task[object]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGINT:  # a terminal's Ctrl-C is for the supervisor, who then sends SIGTERM
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        await self.lifespan.startup()
        self._handover.start(self._take, self._on_end)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._handover.stop()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await super().shutdown(sockets)

    def _take(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        opening = self._loop.create_task(self._loop.connect_accepted_socket(self._make_protocol, sock))
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    def _make_protocol(self) -> HttpToolsProtocol:
        return self._protocol(self.config, self.server_state, self.lifespan.state)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if opening.cancelled() or opening.exception() is not None:
            self._handover.connection_ended()

    def _on_end(self) -> None:
        self.should_exit = True
        self.stop_app()


async def _serve(settings: ServerSettings, engine_paths: Sequence[str], make: Callable[[FastAPI], _Server]) -> int:
    def stop() -> None:
        server.should_exit = True

    app = create_app(settings, stop, engine_paths)
    server = make(app)
    with _stoppable_start(asyncio.get_running_loop()):
        starting = app.router.lifespan_context(app)
        await starting.__aenter__()
    _pass_signals_to(server)
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at again and again
    try:
        await server.serve()
        return 1 if app.state.service.engine.failure else 0
    finally:
        await starting.__aexit__(None, None, None)


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
