"""The engine process's end of a connection to an API process. Nothing in it waits."""

from __future__ import annotations

import socket

import msgspec

from mini_infer.serving.link.wire import (
    Command,
    Delta,
    Event,
    FrameReader,
    FrameWriter,
    Outputs,
    command_decoder,
    merge,
)
from mini_infer.serving.stats import Stats

RECEIVED_AT_ONCE = 2**18  # bytes between two steps: at most about a millisecond of decoding


class Connection:
    """What is said is kept until `flush`, and while the other side does not read it is merged: memory is bounded by
    the requests under way, not by the tokens they make."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.name = name
        self.closed = False
        self.deltas: list[Delta] = []
        self.notices: list[Event] = []
        self.stats: Stats | None = None  # the latest, if not sent yet
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._unsent = memoryview(b"")

    def receive(self) -> list[Command]:
        """The commands that have come. Raises ConnectionError when there will be no more."""
        try:
            data = self.sock.recv(RECEIVED_AT_ONCE)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("closed by the other side")
        try:
            return [command_decoder.decode(frame) for frame in self._reader.feed(data)]
        except msgspec.MsgspecError as error:
            raise ConnectionAbortedError(f"it sent what is no command: {error}") from error

    def flush(self) -> bool:
        """Sends what can be sent at once; whether that is all. Raises ConnectionError when nobody is there."""
        while self._unsent or self._encode():
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                self._merge()
                return False
            self._unsent = self._unsent[sent:]
        return True

    def close(self) -> None:
        self.closed = True
        self.sock.close()

    def _encode(self) -> bool:
        events: list[Event] = self.notices
        if self.deltas:
            events.append(Outputs(self.deltas))
        if self.stats is not None:
            events.append(self.stats)
        self._unsent = memoryview(b"".join(map(self._writer.frame, events)))
        self.deltas, self.notices, self.stats = [], [], None
        return bool(events)

    def _merge(self) -> None:
        """One delta a completion."""
        merged: dict[tuple[int, int], Delta] = {}
        for delta in self.deltas:
            merge(merged, (delta.number, delta.index), delta)
        self.deltas = list(merged.values())
