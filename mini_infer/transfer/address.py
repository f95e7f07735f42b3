"""Where a process listens for others: a Unix socket of its machine, or TCP, which a key opens.

/tmp/mini-infer-x1/engine-0-prompts
tcp://10.0.0.3:41234/4f1c62...        the key, which keeps out whoever else is on the network; nothing is encrypted
tcp://[fd00::3]:41234/4f1c62...
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
from typing import NamedTuple

KEY_BYTES = 32
BACKLOG = 16
_TCP = "tcp://"
_KEY_S = 5.0  # in which a connection says its key
_CONNECT_S = 2.0  # else nobody is there; an engine's streams wait meanwhile
# A machine that is lost says nothing: its connections end after about 15 s.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5, socket.TCP_USER_TIMEOUT: 15_000}


def listen(host: str) -> socket.socket:
    """On a free port of it, IPv4 or IPv6. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family, backlog=BACKLOG)


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def connect_with(key: bytes, address: tuple[str, int]) -> socket.socket:
    """To whoever listens there with the same key. Raises OSError where nobody does, or a machine that is lost says
    nothing."""
    sock = socket.create_connection(address, _CONNECT_S)
    sock.sendall(key)
    sock.settimeout(None)
    return watched(sock)


def require_key(key: bytes, sock: socket.socket) -> None:
    """Raises OSError where the connection does not begin with it."""
    sock.settimeout(_KEY_S)
    said = b""
    while len(said) < KEY_BYTES and (piece := sock.recv(KEY_BYTES - len(said))):
        said += piece
    if not hmac.compare_digest(said, key):
        raise PermissionError("a connection without the key")
    sock.settimeout(None)


def reach(address: str) -> socket.socket:
    """Raises OSError where nobody listens."""
    if address.startswith(_TCP):
        place, _, key = address.removeprefix(_TCP).partition("/")
        host, _, port = place.rpartition(":")
        return connect_with(bytes.fromhex(key), (host.strip("[]"), int(port)))
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


class Door(NamedTuple):
    """A listening socket, and what others reach it by."""

    listener: socket.socket
    address: str
    key: bytes | None

    @classmethod
    def open(cls, where: str) -> Door:
        """
        Args:
            where: the path of a Unix socket, or tcp://HOST, where that is a name or an address: then on a free port.
        """
        if where.startswith(_TCP):
            host, key = where.removeprefix(_TCP).strip("[]"), new_key()
            listener = listen(host)
            host = f"[{host}]" if ":" in host else host
            return cls(listener, f"{_TCP}{host}:{listener.getsockname()[1]}/{key.hex()}", key)
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            os.unlink(where)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(where)
        listener.listen(BACKLOG)
        return cls(listener, where, None)

    def admit(self, sock: socket.socket) -> socket.socket:
        """Someone who has connected. Raises OSError where they may not come in."""
        if self.key is None:
            return sock
        try:
            require_key(self.key, sock)
        except OSError:
            sock.close()
            raise
        return watched(sock)


def watched(sock: socket.socket) -> socket.socket:
    """Of TCP: it sends without waiting for more, and ends soon after the machine at its other end is lost."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock
