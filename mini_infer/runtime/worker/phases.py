"""Where the seconds of a start go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Phases:
    """
    Args:
        finish: waits for what a device was given, so that a phase has all of its own work and none of another's.
        clock: seconds.
    """

    def __init__(
        self, finish: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {}  # in the order in which phases were first entered
        self._finish, self._clock, self._started = finish, clock, clock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What runs inside belongs to the phase, which may be entered again, but not inside another."""
        started = self._clock()
        yield
        if self._finish is not None:
            self._finish()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - started

    @property
    def total(self) -> float:
        """Seconds until now, whatever was done in them."""
        return self._clock() - self._started
