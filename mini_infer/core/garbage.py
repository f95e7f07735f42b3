"""Python's garbage collector in a process that serves: what it does in one go, everybody waits for."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000  # more than a step makes that die by themselves; they take a few milliseconds


def settle() -> None:
    """For when all is there that lives as long as the process: the collector never looks at that again.

    By default it looks at young objects twice a step, and at all of them once their number has grown by a quarter of
    what start-up has made: a pause of 60 ms. Now it is a quarter of what there is at the time.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: so many there are now
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
