"""Accepting connections, also when descriptors run out: no error a connection, and no turning in circles."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

BACKLOG = 2048
AT_ONCE = 64  # connections accepted before anything else gets a turn
RETRY_S = 0.02
COMPLAINT_S = 10.0  # between two lines of the log that say the same


class Acceptor:
    """
    Args:
        listener: bound, and not listening yet.
        place: takes a connection; False where nobody can yet, and it is asked again.
        make_room: called when there are no descriptors left.
    """

    def __init__(
        self, listener: socket.socket, place: Callable[[socket.socket], bool], make_room: Callable[[], object]
    ) -> None:
        self._listener = listener
        self._place = place
        self._make_room = make_room
        self._unplaced: socket.socket | None = None  # a connection that nobody can take yet
        self._complained = -COMPLAINT_S
        self.listening = False

    def listen(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self.listening = True
        self._resume()

    def stop(self) -> None:
        if self.listening:
            self.listening = False
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        if self._unplaced is not None:
            self._unplaced.close()
            self._unplaced = None

    def _resume(self) -> None:
        if self.listening:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            if self._unplaced is not None:  # no event of the listener's tells of it: it may be the only one
                self._accept()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                if self._unplaced is None:
                    self._unplaced = self._listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors are left, say
                if time.monotonic() - self._complained > COMPLAINT_S:
                    self._complained = time.monotonic()
                    logger.error("connections cannot be accepted: %s", error)
                self._make_room()
                self._pause()
                return
            if not self._place(self._unplaced):
                self._pause()
                return
            self._unplaced = None

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(RETRY_S, self._resume)
