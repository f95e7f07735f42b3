"""How many threads a step takes on a CPU.

A step of a small model is some hundred operations of microseconds. Shared among threads each ends with a wait for the
slowest of them, which costs more than sharing saves, and much more where another process keeps one of the cores. So
small steps take one thread. Threads that wait sleep (core/openmp.py), wherever the environment says nothing else: two
spinning ones took tiny-target's 8 rows 10 times as long as one, both cores being busy, and sleeping ones 1.4 times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_WORTH_SHARING = 4 * 10**8  # parameters times tokens


class StepThreads:
    """`asked` threads for every step; None: this rank's share of as many as torch has when this is made, and one for
    small steps of a model that has `num_parameters` on the CPU."""

    def __init__(self, asked: int | None, num_parameters: int | None, ranks: int = 1) -> None:
        self._most = asked or max(1, torch.get_num_threads() // ranks)
        self._many_tokens = 0 if asked or num_parameters is None else -(-_WORTH_SHARING // num_parameters)

    def __call__(self, num_tokens: int) -> AbstractContextManager[None]:
        """The number is the whole process's, and is put back."""
        own = self._most if num_tokens >= self._many_tokens else 1
        return _UNCHANGED if own == torch.get_num_threads() else _with_threads(own)

    def __str__(self) -> str:
        if self._most == 1 or self._many_tokens <= 1:
            return str(self._most)
        return f"{self._most}, and 1 for steps of less than {self._many_tokens} tokens"


_UNCHANGED = nullcontext()


@contextmanager
def _with_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
