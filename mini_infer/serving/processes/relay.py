"""Connections handed on between two machines:

    who connects here  --->  Relay  --- TCP, opened by a key --->  Relay  --->  who listens there

A Unix socket here stands for one there. Nothing is encrypted; the key keeps out whoever else is on the network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from mini_infer.transfer.address import require_key, watched

_PIECE = 2**16  # bytes
_NAP_S = 0.05  # behind an accept that failed: this process may have too many files open


class Relay:
    """Joins whoever connects to a connection that `connect` makes.

    Args:
        listener: which it closes.
        connect: may raise OSError, which closes the connection that it was for.
        key: with which connections begin here; None: they need none.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket], key: bytes | None = None) -> None:
        self._listener, self._connect, self._key = listener, connect, key
        self._closed = False
        _in_thread(self._accept)

    def close(self) -> None:
        """Connections that there are stay."""
        self._closed = True
        _close(self._listener)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near = self._listener.accept()[0]
            except OSError:
                time.sleep(_NAP_S)
            else:
                _in_thread(self._join, near)

    def _join(self, near: socket.socket) -> None:
        try:
            if self._key is not None:
                require_key(self._key, near)
                watched(near)
            far = self._connect()
        except OSError:
            _close(near)
            return
        _in_thread(_pump, far, near)
        _pump(near, far)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Until either end is closed; then the other is, too."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
    _close(source)
    _close(sink)


def _close(sock: socket.socket) -> None:
    """Also wakes who waits at it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _in_thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()
