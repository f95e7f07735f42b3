"""Keeps Python's garbage collector from charging one measurement for another's objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """Takes everything alive now out of the collector's sight: a full pass over a process that has imported torch
    takes a few tenths of a second, and would fall on whoever happens to trigger it. `gc.collect()` is cheap inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
