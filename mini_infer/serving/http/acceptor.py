"""Accepting connections, also when descriptors run out: no error a connection, and no turning in circles. And how many
of these there may be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable

from mini_infer.core.logs import Complaint

logger = logging.getLogger(__name__)

BACKLOG = 2048
AT_ONCE = 16  # connections accepted before anything else gets a turn
RETRY_S = 0.02
WANTED = 65_536  # open files
RESERVED = 64  # for what is no connection


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
        self._complaint = Complaint(logger)
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
                self._complaint.say("connections cannot be accepted: %s", error)
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


def room_for_connections() -> int:
    """As many as this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else max(soft - RESERVED, 1)


def allow_many_open_files() -> None:
    """Raises this process's own limit towards the one that the system sets it.

    Many systems start programs with 256 or 1,024, for old ones that can do no more, and let them ask for a lot.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS says that there is no limit, and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
