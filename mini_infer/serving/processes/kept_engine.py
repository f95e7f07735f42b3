"""One replica as the supervisor sees it: its engine process, and the next one when that ends."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mini_infer.core.errors import MiniInferError
from mini_infer.serving.link.link import Link, Listener
from mini_infer.serving.link.wire import Drain
from mini_infer.serving.processes.launch import EngineProcess

if TYPE_CHECKING:  # few have Ray
    from mini_infer.serving.processes.ray_engine import RayEngine

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0  # before another process is started; each time twice as long
STEADY_S = 60.0  # of serving, after which a death counts as the first
WATCH_S = 1.0  # between two looks at when it last said something
SILENT_S = 1.0  # for one that has said nothing for too long, until it is killed: its streams wait meanwhile
BACKSTOP_S = 5.0  # beyond the time that a drained engine has, until it is killed


class KeptEngine(Listener):
    """
    Args:
        name: for messages.
        make: a process that listens at a path.
        startup_timeout: seconds.
        hang_timeout: seconds without a sign of life after which it is ended.
        on_end: called with the reason when a process that has served ends unasked, or could not be started again.

    Attributes:
        serves: set while it does.
        failed_starts: in a row.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[str], EngineProcess | RayEngine],
        socket_path: str,
        startup_timeout: float,
        hang_timeout: float,
        on_end: Callable[[KeptEngine, str], None],
    ) -> None:
        self.name = name
        self.socket_path = socket_path
        self.serves = asyncio.Event()
        self.failed_starts = 0
        self._make = make
        self._process = make(self.socket_path)
        self._startup_timeout = startup_timeout
        self._hang_timeout = hang_timeout
        self._on_end = on_end
        self._link: Link | None = None
        self._ended = asyncio.Event()
        self._asked_to_end = False
        self._since = 0.0
        self._wait_s = 0.0
        self._next: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Waits until the process serves. Errors: Link.open's."""
        self._link, _ = await Link.open(self.socket_path, self._process, self._startup_timeout)
        self._since = time.monotonic()
        self._asked_to_end = False
        self.failed_starts = 0
        self._ended.clear()
        self.serves.set()
        self._link.attach(self)
        if self._hang_timeout < math.inf:
            self._watch = asyncio.get_running_loop().create_task(self._end_if_silent(self._link))

    def start_again(self) -> None:
        """For an engine that has ended: another process takes its place, after a wait where it has not served long."""
        self._next = asyncio.get_running_loop().create_task(self._start_again())

    async def restart(self, seconds: float) -> None:
        """Ends the process when its requests have ended, or after `seconds`, and waits until another one serves. One
        that is being started again is only waited for."""
        if self.serves.is_set() and self._link is not None:
            self._asked_to_end = True
            self._link.send(Drain(seconds))
            try:
                await asyncio.wait_for(self._ended.wait(), seconds + BACKSTOP_S)
            except asyncio.TimeoutError:
                await asyncio.to_thread(self._process.stop)
                await self._ended.wait()
        await self.serves.wait()

    async def stop(self) -> None:
        """For good."""
        for task in (self._next, self._watch):
            if task is not None:
                task.cancel()
        if self._link is not None:
            self._link.close()
        await asyncio.to_thread(self._process.stop)

    async def _end_if_silent(self, link: Link) -> None:
        while (silence := time.monotonic() - link.heard) < self._hang_timeout:
            await asyncio.sleep(min(self._hang_timeout - silence, WATCH_S))
        logger.error("%s has not said anything for %.0f s, and is ended", self.name, silence)
        await asyncio.to_thread(self._process.stop, SILENT_S)

    async def _start_again(self) -> None:
        await asyncio.to_thread(self._process.stop)
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(max(2 * self._wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
        try:
            self._process = self._make(self.socket_path)
            await self.open()
        except (MiniInferError, OSError) as error:
            self.failed_starts += 1
            self._on_end(self, f"it could not be started again: {error}")
        else:
            logger.warning("%s serves again", self.name)

    # --- what the engine says -------------------------------------------------------------------------------------

    def take_death(self, reason: str) -> None:
        self.serves.clear()
        self._ended.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._asked_to_end or time.monotonic() - self._since > STEADY_S:
            self._wait_s = 0.0
        if self._asked_to_end:
            self.start_again()
        else:
            self._on_end(self, reason)
