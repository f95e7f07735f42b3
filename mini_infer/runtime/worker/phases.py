"""Where the seconds of a start go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Phases:
    """Seconds by phase, in the order in which they were first entered. A phase may be entered again, which adds to it;
    inside another phase it is a part of that one (`load/fill`), counted in both.

    Args:
        finish: waits for what has been given to a device, so that a phase has its own work and no other's.
        clock: seconds.
    """

    def __init__(
        self, finish: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._finish, self._clock, self._path = finish, clock, ""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer = self._path
        self._path = path = f"{outer}/{name}" if outer else name
        started = self._clock()
        self.seconds.setdefault(path, 0.0)
        try:
            yield
            self._finish()
        finally:
            self.seconds[path] += self._clock() - started
            self._path = outer
