"""Graphs that write down what is done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoggingGraph:
    def __init__(self, log: list[str], number: int, fails: str, error: Callable[[str], Exception]) -> None:
        self._log, self._number, self._fails, self._error = log, number, fails, error

    def _do(self, what: str) -> None:
        self._log.append(f"{what} {self._number}")
        if what == self._fails:
            raise self._error(f"cannot {what}")

    def capture_begin(self, pool: Any = None) -> None:
        assert pool == "pool"
        self._do("begin")

    def capture_end(self) -> None:
        self._do("end")

    def replay(self) -> None:
        self._do("replay")


def numbered(
    log: list[str],
    fails: Callable[[int], str] = lambda number: "",
    error: Callable[[str], Exception] = RuntimeError,
) -> Callable[[], LoggingGraph]:
    """Makes graphs 0, 1, ... of which each fails at what `fails` names."""
    numbers = iter(range(100))

    def new_graph() -> LoggingGraph:
        number = next(numbers)
        return LoggingGraph(log, number, fails(number), error)

    return new_graph
