"""Graphs that write down what is done to them, and graphs that do again on a CPU what they have captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class RecordingGraph(TorchDispatchMode):
    """Repeats on the same tensors what ran while it captured."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def capture_begin(self, pool: Any = None) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, first in self.operations:
            for old, new in zip(tree_leaves(first), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
