"""The second witness of a pass's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item


def lead_s(items: Sequence[Item]) -> float:
    """Seconds from the start of a schedule to its first arrival."""
    return min((item.arrival_s or 0.0 for item in items if item.follows is None), default=0.0)


def from_outside(
    serve: Callable[[Sequence[Item], int], Served],
    items: Sequence[Item],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Served:
    """A pass, timed by somebody who knows nothing of requests and tokens. Whoever is nearer to it has the last word."""
    start = clock()
    served = serve(items, concurrency)
    took = clock() - start - lead_s(items)
    return served if served.outside_s is not None else replace(served, outside_s=took)
