"""Triton kernels compiled all at once, before the first of them is launched.

Triton compiles a kernel's variant when it is first called, one after the other, while a start needs some sixty of them:

    as it is        call, compile, launch | call, compile, launch | call, ...
    inside here     call, call, call, ... | wait      threads:  compile | compile | compile | ...

Most of a compilation is LLVM and ptxas, which do not hold Python's lock. What is compiled lands in Triton's cache on
disk as ever, so that a second start only reads it, in parallel too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mini_infer.core.cores import usable_cores


@contextlib.contextmanager
def compiled_in_parallel(num_threads: int | None = None) -> Iterator[None]:
    """Triton kernels that are called inside are compiled and not launched; leaving waits until they all are.

    What torch does inside, it does. Since no kernel writes its result, new tensors are zeros: a token, a position and a
    slot that exist, where a later operation looks something up. Without Triton, and under its interpreter, nothing is
    different inside. Calls have to come from the thread that entered.

    Args:
        num_threads: that compile; default: one for each core of this process.

    Raises:
        Exception: on leaving, the first error of a compilation.
    """
    try:
        from triton import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    launch: Callable[..., Any] = JITFunction.run
    caller = threading.get_ident()

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        here = threading.get_ident() == caller  # what others launch meanwhile is none of ours
        return launch(kernel, *args, grid=grid, warmup=warmup or here, **kwargs)

    with (
        ThreadPoolExecutor(num_threads or usable_cores()) as pool,
        AsyncCompileMode(pool),
        _ZerosForNew(),
    ):
        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch


class _ZerosForNew(TorchDispatchMode):
    """New tensors of the operations inside are zeros, where torch would leave what was in memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler, which would take a start more than a second to import, meets none of them."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in _EMPTY else result


_EMPTY = frozenset(
    {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
)
