"""The order in which requests begin: a few in a pass of the event loop, and clients in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 8  # requests that begin in a pass: some milliseconds


class Turns:
    """However many requests come at one moment, streams have their turn between any AT_ONCE of them, and a client who
    sends one waits for no more than one of each other client's. All of them begin as fast as the loop can: nothing is
    put off while there is time."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], object]]] = {}  # by client; whose turn it is, first
        self._passing = False

    def take(self, client: str, begin: Callable[[], object]) -> None:
        """`begin` is called in a coming pass of the event loop; those of one `client` (an address) in their order."""
        self._waiting.setdefault(client, deque()).append(begin)
        if not self._passing:
            self._pass_later()

    def _pass_later(self) -> None:
        self._passing = bool(self._waiting)
        if self._passing:
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        for _ in range(AT_ONCE):
            if not self._waiting:
                break
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            asyncio.get_running_loop().call_soon(line.popleft())  # one that fails is nobody else's fault
            if line:
                self._waiting[client] = line
        self._pass_later()
