"""Whether the machine kept its speed during a pass: a fixed piece of work, timed before it and after it.

What stays changed shows: a lower clock frequency, a throttled container, a neighbour who keeps the core busy. What
comes and goes does not: the fastest of many short pieces counts, and where that is slower than it should be, the work
is repeated for a while until it is not.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from itertools import pairwise

PIECES = 10
HASHES = 40  # of a block: a millisecond or two
_BLOCK = bytes(32 * 1024)
PATIENCE_S = 1.0  # a busy neighbour is waited for so long
CLOSE = 1.02  # times the wanted time is close enough to stop waiting
MATRIX = 4096  # on a GPU: about 0.2 ms on an H200
PRODUCTS = 8  # timed together
GPU_S = 0.1  # of products: an idle GPU lowers its clock, and takes tens of milliseconds to raise it


@dataclass(frozen=True)
class Speed:
    """Seconds of the fixed work on the host, and on the GPU where one is measured."""

    host_s: float
    gpu_s: float | None = None


class Watch:
    """Clocks of `device` (cpu or cuda) around passes. Each should start at the best speed seen so far."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._best: Speed | None = None

    def before(self) -> Speed:
        return self._note(take(self._device, self._best))

    def drift_since(self, before: Speed) -> float:
        """The relative change; see `drift`."""
        return drift(before, self._note(take(self._device, before)))

    def _note(self, found: Speed) -> Speed:
        if self._best is None or found.host_s < self._best.host_s:
            self._best = found
        return found


def take(device: str, wanted: Speed | None = None) -> Speed:
    """Times the fixed work on `device` (cpu or cuda), and waits up to PATIENCE_S for the speed `wanted`."""
    host_s = _host_work()
    started = time.perf_counter()
    while wanted and host_s > CLOSE * wanted.host_s and time.perf_counter() - started < PATIENCE_S:
        host_s = min(host_s, _host_work())
    return Speed(host_s, _gpu_work() if device == "cuda" else None)


def drift(before: Speed, after: Speed) -> float:
    """The larger relative change, of host or GPU: 0.05 where one took 5 % longer, or 5 % less."""
    changes = [abs(after.host_s / before.host_s - 1)]
    if before.gpu_s and after.gpu_s:
        changes.append(abs(after.gpu_s / before.gpu_s - 1))
    return max(changes)


def _host_work() -> float:
    """The fastest of some equal pieces: one interruption does not show.

    Hashing keeps to registers and the first-level cache. A loop of the interpreter will not do: where its objects
    happen to lie changes its time by 20 %, and serving requests moves them.
    """
    fastest = float("inf")
    for _ in range(PIECES):
        start = time.perf_counter()
        for _ in range(HASHES):
            hashlib.sha256(_BLOCK).digest()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _gpu_work() -> float:
    """The fastest of many matrix products, timed by the device itself."""
    import torch

    matrix = torch.randn(MATRIX, MATRIX, device="cuda").bfloat16()
    product = torch.empty_like(matrix)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]
    fastest, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < GPU_S:
        events[0].record()
        for event in events[1:]:
            torch.mm(matrix, matrix, out=product)
            event.record()
        torch.cuda.synchronize()
        fastest = min(fastest, *(before.elapsed_time(after) / 1e3 for before, after in pairwise(events)))
    return fastest
