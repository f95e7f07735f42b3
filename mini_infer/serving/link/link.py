"""The API process's end of the connection to the engine process."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

from mini_infer.core.errors import ConfigError, MiniInferError, ModelError
from mini_infer.serving.link.wire import (
    Done,
    Event,
    Failed,
    FrameReader,
    FrameWriter,
    Message,
    Outputs,
    Ready,
    Refused,
    event_decoder,
)
from mini_infer.serving.processes.launch import EngineProcess
from mini_infer.serving.stats import Stats

if TYPE_CHECKING:  # few have Ray
    from mini_infer.serving.processes.ray_engine import RayEngine

ENDING_POLLS = 50  # from the end of the connection to the exit code; 20 ms each
ERRORS_TO_ACT_ON = {"ConfigError": ConfigError, "ModelError": ModelError}


class EngineDead(MiniInferError, RuntimeError):
    """There is no engine process any more; the message says how it ended."""


class Listener:
    """Who is told what an engine says."""

    def take_outputs(self, outputs: Outputs) -> None: ...

    def take_pause(self) -> None:
        """All that has come has been told."""

    def take_refusal(self, refused: Refused) -> None: ...

    def take_done(self, done: Done) -> None: ...

    def take_stats(self, stats: Stats) -> None: ...

    def take_death(self, reason: str) -> None: ...


class Link(asyncio.Protocol):
    """Made by `open`; tells a Listener what the engine says, once there is one."""

    def __init__(self, socket_path: str, process: EngineProcess | RayEngine | None) -> None:
        self.socket_path = socket_path
        self._process = process
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._listener: Listener | None = None
        self._early: list[Event] = []  # before there was a listener
        self._last_words: Failed | None = None
        self._death: str | None = None
        self.heard = time.monotonic()  # when the engine last said something
        self._inquest: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(
        cls, socket_path: str, process: EngineProcess | RayEngine | None, timeout: float
    ) -> tuple[Link, Ready]:
        """Connects, and waits until the engine serves.

        Raises:
            ConfigError, ModelError: why the engine cannot be made.
            EngineDead: the process ended, or was not ready within `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: cls(socket_path, process), socket_path)
        except OSError as error:
            raise EngineDead(f"no engine process listens at {socket_path}: {error.strerror or error}") from error
        try:
            return link, await asyncio.wait_for(link._opened, timeout)
        except asyncio.TimeoutError:
            link.close()
            raise EngineDead(f"the engine process was not ready within {timeout:g} s") from None
        except BaseException:
            link.close()
            raise

    def attach(self, listener: Listener) -> None:
        self._listener = listener
        for event in self._early:
            self._take(event)
        self._early.clear()
        listener.take_pause()
        if self._death is not None:
            listener.take_death(self._death)

    def send(self, message: Message) -> None:
        """Never waits; what is said to a dead engine is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._writer.frame(message))

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    # --- asyncio calls these --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        for frame in self._reader.feed(data):
            self._take(event_decoder.decode(frame))
        if self._listener is not None:
            self._listener.take_pause()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closing:
            self._inquest = asyncio.get_running_loop().create_task(self._find_out(error))

    # --------------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        listener = self._listener
        if isinstance(event, Ready):
            if not self._opened.done():
                self._opened.set_result(event)
        elif isinstance(event, Failed):
            self._last_words = event
        elif listener is None:
            self._early.append(event)
        elif isinstance(event, Outputs):
            listener.take_outputs(event)
        elif isinstance(event, Stats):
            listener.take_stats(event)
        elif isinstance(event, Done):
            listener.take_done(event)
        else:
            listener.take_refusal(event)

    async def _find_out(self, error: Exception | None) -> None:
        """Why the connection ended. The exit code is known a moment later than that."""
        ending = None
        if self._process is not None:
            for _ in range(ENDING_POLLS):
                ending = self._process.ending()
                if ending is not None:
                    break
                await asyncio.sleep(0.02)
        reason = f"the engine process {ending or 'has closed the connection'}"
        if self._last_words is not None:
            reason += f": {self._last_words.error}: {self._last_words.message}"
        elif error is not None:
            reason += f" ({error})"
        self._death = reason
        if not self._opened.done():
            self._opened.set_exception(self._why_not_opened(reason))
        elif self._listener is not None:
            self._listener.take_death(reason)

    def _why_not_opened(self, reason: str) -> Exception:
        words = self._last_words
        if words is not None and words.error in ERRORS_TO_ACT_ON:
            return ERRORS_TO_ACT_ON[words.error](words.message)
        return EngineDead(reason)
