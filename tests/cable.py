"""A TCP connection's way between two engines, which a test can cut or make long."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time


class Cable:
    """
    Args:
        address: of an engine for prompts that listens by TCP.
        delay_s: that whatever goes through takes, either way.

    Attributes:
        address: instead of that one.
        passed: bytes that have come back from there.
        cut_after: so many of them every connection is reset; None: never.
    """

    def __init__(self, address: str, delay_s: float = 0.0) -> None:
        place, _, key = address.removeprefix("tcp://").partition("/")
        host, _, port = place.rpartition(":")
        self._there, self._delay_s = (host, int(port)), delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}/{key}"
        self.passed = 0
        self.cut_after: int | None = None
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._there)
                for ends in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._carry, args=ends, kwargs={"back": ends[0] is far}, daemon=True
                    ).start()

    def _carry(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**14):
                time.sleep(self._delay_s)
                self.passed += back * len(data)
                if back and self.cut_after is not None and self.passed > self.cut_after:
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
