"""A second witness of what is timed directly, without requests: the host's clock around it, which knows nothing of how
it was timed. Of passes over requests it is schedule.from_outside."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from time import monotonic as wall_s  # timers read time.perf_counter, and the device's events
from typing import NamedTuple, TypeVar

from experiments.lab.judge import stats

Told = TypeVar("Told")
OUTSIDE_SHARE = 0.2  # of a burst, and more: what the host may add to begin and end it
GPU_US, CPU_US = 150.0, 1.0  # launches, and waiting for the last; two readings of a clock
CLOCKS = 0.02  # of it: the GPU's clock and the host's


class Timed(NamedTuple):
    """Medians over bursts of calls, or the fastest of them."""

    us: float  # a call, as told by who times
    outside_us: float  # the same by the host's clock around the burst
    calls: int  # of a burst
    on_gpu: bool = False  # where it was timed
    beside: int = 0  # calls in a burst that are not among them

    @classmethod
    def of(
        cls,
        bursts: Sequence[tuple[float, float]],
        calls: int = 1,
        *,
        on_gpu: bool = False,
        typical: Callable[[Sequence[float]], float] = stats.median,
    ) -> Timed:
        """Of bursts of so many calls, which took so many seconds as told by who times, and by the host's clock."""
        us, outside_us = (1e6 * typical(own) / calls for own in zip(*bursts, strict=True))
        return cls(us, outside_us, calls, on_gpu)

    @property
    def problem(self) -> str:
        """Why the time does not count; empty where it does."""
        added_us = GPU_US if self.on_gpu else CPU_US
        most = (1 + OUTSIDE_SHARE) * (1 + self.beside / self.calls) * self.us + added_us / self.calls
        if (1 - CLOCKS) * self.us <= self.outside_us <= most:
            return ""
        burst, outside = (1e-3 * self.calls * us for us in (self.us, self.outside_us))
        calls = f"{self.calls} calls are" if self.calls > 1 else "a call is"
        took = f"by the host's clock {'they' if self.calls > 1 else 'it'} took {outside:.3g} ms"
        return f"{calls} said to take {burst:.3g} ms, and {took}"


def witnessed(timer: Callable[[], Told], clock_s: Callable[[], float] = wall_s) -> tuple[Told, float]:
    """What it tells, and the seconds that pass meanwhile by the second witness's clock."""
    start = clock_s()
    return timer(), clock_s() - start


def cpu_s() -> float:
    """CPU time of this process so far, as the system accounts for it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
