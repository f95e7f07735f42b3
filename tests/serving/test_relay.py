"""Connections that are handed on between machines: with the key, and until either end is closed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from mini_infer.serving.processes.relay import Relay
from mini_infer.transfer.address import KEY_BYTES, connect_with, new_key


@pytest.fixture
def far() -> Iterator[socket.socket]:
    """Who listens at the far end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def near() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connected(listener: socket.socket) -> socket.socket:
    sock = socket.create_connection(listener.getsockname())
    sock.settimeout(10)
    return sock


def read(sock: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count and (piece := sock.recv(count - len(said))):
        said += piece
    return said


def test_a_relay_ends_with_either_end(near: socket.socket, far: socket.socket) -> None:
    relay = Relay(near, lambda: connected(far))
    for first_to_end in (0, 1):
        ends = connected(near), far.accept()[0]
        for one, other in (ends, ends[::-1]):
            one.sendall(b"x" * 10**5)
            assert read(other, 10**5) == b"x" * 10**5
        ends[first_to_end].close()
        assert ends[1 - first_to_end].recv(1) == b""
    far.close()
    assert connected(near).recv(1) == b""  # nobody is at the other end
    address = near.getsockname()
    relay.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_who_has_no_key_is_not_let_through(near: socket.socket, far: socket.socket) -> None:
    key = new_key()
    relay = Relay(near, lambda: connected(far), key)
    for wrong in (b"\0" * KEY_BYTES, key[:-1], b""):
        with connected(near) as sock:
            sock.sendall(wrong)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    with connect_with(key, near.getsockname()) as sock:
        sock.sendall(b"x")
        accepted, _ = far.accept()
        assert accepted.recv(2) == b"x"  # and nothing before it
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # a machine that is lost says nothing
    relay.close()


class Listener:
    """Of a process that has too many files open when the first one connects."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._failures = listener, [OSError(errno.EMFILE, "too many open files")]

    def accept(self) -> tuple[socket.socket, object]:
        if self._failures:
            raise self._failures.pop()
        return self._listener.accept()

    def shutdown(self, how: int) -> None:
        self._listener.shutdown(how)

    def close(self) -> None:
        self._listener.close()


def test_a_failed_accept_is_not_the_end(near: socket.socket, far: socket.socket) -> None:
    relay = Relay(Listener(near), lambda: connected(far))  # type: ignore[arg-type]
    with connected(near) as sock:
        sock.sendall(b"x")
        assert far.accept()[0].recv(1) == b"x"
    relay.close()
