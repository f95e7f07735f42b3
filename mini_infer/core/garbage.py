"""Python's garbage collector in a process that serves: what it does in one go, everybody waits for."""

from __future__ import annotations

import gc


def settle(young_objects: int) -> None:
    """For when all is there that lives as long as the process: the collector never looks at that again. By default it
    looks at all others once they are a quarter as many as start-up has made, which is a pause of 60 ms; now it is a
    quarter of what there was when it last looked.

    Args:
        young_objects: that it looks at in one go, up to a microsecond each. It should not look several times a step, at
            what dies by itself.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: so many there are now
    gc.set_threshold(young_objects, 5, 5)  # what was left of so many looks is looked at again
