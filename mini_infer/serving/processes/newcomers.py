"""Requests on their way into the engine. One with a grammar waits here while a thread compiles it; nobody else does."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mini_infer.core.request import SamplingParams
from mini_infer.serving.processes.connection import Connection
from mini_infer.serving.processes.wire import Add

THREADS = 4  # so that a grammar that is known already passes by one that takes long


class Owner(NamedTuple):
    connection: Connection
    number: int


class Newcomer(NamedTuple):
    owner: Owner
    add: Add
    failure: Exception | None  # what preparing it came to


class Newcomers:
    """
    Args:
        prepare: LLMEngine.prepare.
    """

    def __init__(self, prepare: Callable[[SamplingParams], None]) -> None:
        self._prepare = prepare
        self._ready: dict[Owner, Newcomer] = {}  # oldest first
        self._preparing: dict[Owner, Add] = {}
        self._prepared: deque[Newcomer] = deque()  # the threads append; a deque needs no lock for that
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self.wakes, self._waker = socket.socketpair()  # readable when a thread is done: for `select`
        self.wakes.setblocking(False)
        self._waker.setblocking(False)
        self.num_completions = 0

    def __bool__(self) -> bool:
        """Whether `pop` has one."""
        return bool(self._ready)

    def put(self, owner: Owner, add: Add) -> None:
        self.num_completions += num_completions(add)
        if add.params.get("grammar") is None:
            self._ready[owner] = Newcomer(owner, add, None)
        else:
            self._preparing[owner] = add
            self._threads.submit(self._work, owner, add)

    def fetch_prepared(self) -> None:
        """For when `wakes` is readable."""
        with contextlib.suppress(BlockingIOError):
            self.wakes.recv(4096)
        while self._prepared:
            newcomer = self._prepared.popleft()
            if self._preparing.get(newcomer.owner) is newcomer.add:  # else it has been aborted
                del self._preparing[newcomer.owner]
                self._ready[newcomer.owner] = newcomer

    def pop(self) -> Newcomer:
        """The oldest that is ready."""
        newcomer = self._ready.pop(next(iter(self._ready)))
        self.num_completions -= num_completions(newcomer.add)
        return newcomer

    def discard(self, owner: Owner) -> bool:
        """Whether it was here."""
        newcomer = self._ready.pop(owner, None)
        add = self._preparing.pop(owner, None) if newcomer is None else newcomer.add
        if add is not None:
            self.num_completions -= num_completions(add)
        return add is not None

    def discard_all(self, connection: Connection) -> None:
        for owner in [o for o in (*self._ready, *self._preparing) if o.connection is connection]:
            self.discard(owner)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.wakes.close()
        self._waker.close()

    def _work(self, owner: Owner, add: Add) -> None:
        failure = None
        try:
            self._prepare(SamplingParams(**add.params))
        except Exception as error:
            failure = error
        self._prepared.append(Newcomer(owner, add, failure))
        with contextlib.suppress(OSError):  # full: it is readable then
            self._waker.send(b".")


def num_completions(add: Add) -> int:
    """As far as can be said of what nobody has checked yet."""
    n = add.params.get("n", 1)
    return n if isinstance(n, int) else 1
