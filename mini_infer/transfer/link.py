"""Messages, and bytes behind them, between two engine processes. MessagePack, since they may come from another machine.

Nobody waits for the other side: one thread sends what was put into a queue, another one takes what comes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from mini_infer.transfer.protocol import Message

logger = logging.getLogger(__name__)
_HEAD = struct.Struct("<IQ")  # bytes of the message, and of what follows it
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode([type(message).__name__, *message])


def decode(data: bytearray) -> Message:
    """Raises ValueError where it is no message."""
    try:
        kind, *fields = msgspec.msgpack.decode(data)
        message: Message = msgspec.convert(fields, _KINDS[kind], builtin_types=(bytes,))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no message: {error!r}") from error
    return message


class Link:
    """
    Args:
        take: called with each message and its bytes, in a thread; what it raises ends the link.
        end: called once, in a thread, when nothing will come any more.

    Attributes:
        seconds: that the bytes behind the message which is being taken took to come in.
    """

    def __init__(
        self, sock: socket.socket, take: Callable[[Link, Message, bytearray], None], end: Callable[[Link], None]
    ) -> None:
        self._sock = sock
        self._take, self._end = take, end
        self._unsent: queue.SimpleQueue[tuple[Message, Any, Any] | None] = queue.SimpleQueue()
        self.ended = False
        self.seconds = 0.0

    def start(self) -> None:
        for work in (self._send_all, self._receive_all):
            threading.Thread(target=work, name="kv-link", daemon=True).start()

    def send(self, message: Message, payload: Any = b"", ready: Any = None) -> None:
        """Waits for nothing; to an ended link, does nothing.

        Args:
            payload: a buffer.
            ready: an event of the device behind which the payload can be read.
        """
        if not self.ended:
            self._unsent.put((message, payload, ready))

    def close(self) -> None:
        """It ends, as it does when the other side is gone."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        try:
            while (item := self._unsent.get()) is not None:
                message, payload, ready = item
                if ready is not None:
                    ready.synchronize()
                data, body = encode(message), memoryview(payload).cast("B")
                self._sock.sendall(_HEAD.pack(len(data), len(body)) + data)
                if len(body):
                    self._sock.sendall(body)
        except OSError:
            pass
        finally:  # whatever went wrong: the other side is not to wait for the rest
            self.close()

    def _receive_all(self) -> None:
        try:
            while True:
                length, following = _HEAD.unpack(self._receive(_HEAD.size))
                message = decode(self._receive(length))
                started = time.perf_counter()
                payload = self._receive(following)
                self.seconds = time.perf_counter() - started
                self._take(self, message, payload)
        except (OSError, EOFError):
            pass
        except ValueError:
            logger.exception("a link ends: whoever is at the other end says what nobody understands")
        finally:
            self.ended = True
            self._unsent.put(None)
            self._sock.close()
            self._end(self)

    def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._sock.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data


class Bell:
    """Wakes whoever waits in `select`."""

    def __init__(self) -> None:
        self.sock, self._rope = socket.socketpair()
        self.sock.setblocking(False)
        self._rope.setblocking(False)

    def ring(self) -> None:
        """In any thread."""
        with contextlib.suppress(OSError):  # full: it is readable then
            self._rope.send(b".")

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.sock.recv(4096)

    def close(self) -> None:
        self.sock.close()
        self._rope.close()
