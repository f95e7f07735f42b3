"""What each key has taken, counted once for all API processes of a server."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mini_infer.serving.keys import Key

MINUTE_S = 60.0
MUTEX = 2**30  # the byte of the file whose lock is held while its numbers change; those of rows lie before it
OPEN_RETRY_S = 1.0


class Exceeded(Exception):
    """A key has taken what it may.

    Attributes:
        retry_after: seconds until it may take more.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Accounts:
    """The accounts of all keys, in a file that the API processes of a server map.

    A rate is kept as one number, the time at which its bucket of a minute's amount will be full again (the generic cell
    rate algorithm); what is open has a number for each process, since a process that is killed takes its requests with
    it. The kernel's lock on a process's row tells that it lives: whoever comes after it finds the row free, and empties
    it.

    Args:
        file: descriptor of the file that they share; None: this process is the only one.
        processes: that may share it.
        clock: seconds, the same for all processes of the machine.
    """

    def __init__(
        self, keys: Sequence[Key], file: int | None, processes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._clock = clock
        rows = 2 * processes  # one that takes another's place may come before that one has gone
        self._width = 2 + rows  # numbers of a key: requests, tokens, and a row's completions that are open
        size = 8 * self._width * max(1, len(keys))
        self._file = file
        if file is not None:
            os.ftruncate(file, size)
        self._numbers = memoryview(mmap.mmap(-1 if file is None else file, size)).cast("d")
        self._row = 2 + self._free_row(rows)
        with self._changing():
            for key in range(len(keys)):
                self._numbers[key * self._width + self._row] = 0

    def take(self, key: int, prompt_tokens: int, completions: int) -> None:
        """Counts a request, or raises Exceeded and counts nothing."""
        limits, start, now = self._keys[key], key * self._width, self._clock()
        with self._changing():
            full_at = [max(now, self._numbers[start]), max(now, self._numbers[start + 1])]
            if limits.max_open is not None:
                taken = round(sum(self._numbers[start + 2 : start + self._width]))
                if taken and taken + completions > limits.max_open:
                    raise Exceeded(f"{taken} completions are open, and max_open is {limits.max_open}", OPEN_RETRY_S)
            rate = limits.requests_per_minute
            if rate is not None:
                wait = full_at[0] + MINUTE_S / rate - now - max(MINUTE_S, MINUTE_S / rate)
                if wait > 0:
                    raise Exceeded(f"requests_per_minute is {rate:g}", wait)
                full_at[0] += MINUTE_S / rate
            rate = limits.tokens_per_minute
            if rate is not None:
                wait = full_at[1] - now - MINUTE_S
                if wait >= 0:
                    raise Exceeded(f"tokens_per_minute is {rate:g}", wait)
                full_at[1] += prompt_tokens * MINUTE_S / rate
            self._numbers[start], self._numbers[start + 1] = full_at
            self._numbers[start + self._row] += completions

    def give_back(self, key: int, generated_tokens: int, completions: int) -> None:
        """Completions that `take` counted have ended."""
        rate, start = self._keys[key].tokens_per_minute, key * self._width
        with self._changing():
            self._numbers[start + self._row] -= completions
            if rate is not None:
                full_at = max(self._clock(), self._numbers[start + 1])
                self._numbers[start + 1] = full_at + generated_tokens * MINUTE_S / rate

    def _free_row(self, rows: int) -> int:
        if self._file is None:
            return 0
        for row in range(rows):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                continue
            return row
        raise RuntimeError(f"all {rows} rows of the keys' accounts are held by processes that live")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, MUTEX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, MUTEX)
