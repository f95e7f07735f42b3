"""Work on texts that would hold the event loop up: in threads, so that the streams of the others go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mini_infer.serving.processes.async_engine import QueueFull

T = TypeVar("T")

LONG = 16_384  # characters to encode, or tokens to decode: some milliseconds
VERY_LONG = 2**18  # characters: some tenths of a second
MOST_WAITING = 64  # behind a thread
RETRY_S = 5.0


class Aside:
    """Each thread has a queue of its own, so that nobody waits for what takes much longer than his own work."""

    def __init__(self) -> None:
        self._threads = {cost: ThreadPoolExecutor(1, "texts") for cost in (LONG, VERY_LONG)}
        self._waiting = dict.fromkeys(self._threads, 0)

    async def do(self, cost: int, work: Callable[[], T]) -> T:
        """
        Args:
            cost: in characters to encode. What costs little is done at once.

        Raises:
            QueueFull: too much waits already.
        """
        if cost <= LONG:
            return _sheltered(work)
        queue = VERY_LONG if cost > VERY_LONG else LONG
        if self._waiting[queue] >= MOST_WAITING:
            raise QueueFull(f"{MOST_WAITING} long texts wait to be encoded: try again later", RETRY_S)
        self._waiting[queue] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[queue], _sheltered, work)
        finally:
            self._waiting[queue] -= 1

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _sheltered(work: Callable[[], T]) -> T:
    """A panic of Rust's, as of a tokenizer, becomes an error like any other."""
    try:
        return work()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:  # pyo3's PanicException is no Exception
        raise RuntimeError(f"a library panicked: {panic}") from panic
