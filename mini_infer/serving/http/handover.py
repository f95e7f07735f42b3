"""Connections on their way from the supervisor, who accepts them, to the API process that serves them.

The two ends of a Unix socket. Towards the API process each byte carries one connection; the other way a byte says that
it serves, or that one of its connections has ended. The end of the socket is the end of whoever held it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from mini_infer.core.logs import Complaint

logger = logging.getLogger(__name__)

SERVES, ENDED = b"s", b"e"
CONNECTION = b"c"
AT_ONCE = 4096
RETRY_S = 0.02


class Handover:
    """The API process's end."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._unsaid = b""
        self._stopped = False
        self._complaint = Complaint(logger)

    def start(
        self, take: Callable[[socket.socket], object], make_room: Callable[[], object], on_end: Callable[[], None]
    ) -> None:
        """
        Args:
            take: called with each connection that the supervisor sends from here on.
            make_room: called when there are no descriptors left.
            on_end: there is no supervisor any more.
        """
        self._take, self._make_room, self._on_end = take, make_room, on_end
        self._resume()
        self._say(SERVES)

    def connection_ended(self) -> None:
        self._say(ENDED)

    def stop(self) -> None:
        """No further connections: the supervisor gives them to others."""
        self._stopped = True
        asyncio.get_running_loop().remove_reader(self._channel)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RD)

    def _resume(self) -> None:
        if not self._stopped:
            asyncio.get_running_loop().add_reader(self._channel, self._read)

    def _read(self) -> None:
        while True:
            try:
                os.close(os.dup(self._channel.fileno()))  # a connection for which no descriptor is free would be lost
            except OSError as error:
                self._complaint.say("connections cannot be taken: %s", error)
                self._make_room()
                asyncio.get_running_loop().remove_reader(self._channel)
                asyncio.get_running_loop().call_later(RETRY_S, self._resume)
                return
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, AT_ONCE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            for descriptor in descriptors:
                self._take(socket.socket(fileno=descriptor))
            for _ in range(len(data) - len(descriptors)):  # lost all the same: its client sees it end
                self.connection_ended()
            if not data:
                self.stop()
                self._on_end()
                return

    def _say(self, word: bytes) -> None:
        self._unsaid += word
        if len(self._unsaid) == 1:  # all that is said in one turn of the loop goes together
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        try:
            self._unsaid = self._unsaid[self._channel.send(self._unsaid) :]
        except BlockingIOError:
            pass
        except OSError:  # nobody listens any more
            self._unsaid = b""
        if self._unsaid:
            asyncio.get_running_loop().call_later(RETRY_S, self._flush)


class Channel:
    """The supervisor's end.

    Attributes:
        num_open: connections that were handed over and have not ended.
        serves: whether the process takes connections.
        has_served: whether it ever did.
    """

    def __init__(self, sock: socket.socket, on_serving: Callable[[], None], on_end: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.num_open = 0
        self.serves = False
        self.has_served = False
        self._sock = sock
        self._on_serving = on_serving
        self._on_end = on_end
        asyncio.get_running_loop().add_reader(sock, self._read)

    def give(self, connection: socket.socket) -> bool:
        """Whether it went; not where the process is too busy to fetch what came before, or gone."""
        try:
            socket.send_fds(self._sock, [CONNECTION], [connection.fileno()])
        except BlockingIOError:
            return False
        except OSError:
            self.serves = False
            return False
        self.num_open += 1
        return True

    def close(self) -> None:
        self.serves = False
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.num_open -= data.count(ENDED)
        if SERVES in data:
            self.serves = self.has_served = True
            self._on_serving()
        if not data:
            self.close()
            self._on_end()
