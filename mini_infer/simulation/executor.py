"""An executor that computes nothing: it says when a step would have ended, and a virtual clock passes until then.

With overlap, two steps and the host beside them:

    host      plan 1 |plan 2|  waits          |book 1, plan 3|     waits     |book 2 ...
    device           [      step 1            ][          step 2             ][ step 3
    clock     0      h     2h                 end 1                           end 2
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.worker.limits import Limits
from mini_infer.simulation.costs import StepCosts, Work

TOKEN = 1  # whatever would have been sampled
_ONE, _NONE = [TOKEN], list[int]()  # nobody writes to a result


class VirtualClock:
    """Seconds. Time passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(slots=True)
class SimulatedStep:
    plan: StepPlan
    end: float  # on the device


class SimulatedExecutor(Executor):
    """
    Args:
        clock: the engine's.
    """

    def __init__(self, costs: StepCosts, limits: Limits, clock: VirtualClock, overlap: bool) -> None:
        self.costs, self.limits, self.clock, self.overlap = costs, limits, clock, overlap
        self.free_at = 0.0  # the device
        self._copies: deque[tuple[float, int]] = deque()  # (end, transfer id), one after the other
        self._copying_until = 0.0
        self._last: SimulatedStep | None = None

    def launch(self, plan: StepPlan) -> SimulatedStep:
        clock = self.clock
        clock.now += self.costs.host_s(len(plan.req_indices))
        for transfer in plan.transfers:
            self._copying_until = max(self._copying_until, clock.now) + self.costs.copy_s(len(transfer.pairs))
            self._copies.append((self._copying_until, transfer.transfer_id))
        if plan.req_indices:
            self.free_at = max(self.free_at, clock.now) + self.costs.device_s(Work.of(plan))
        self._last = SimulatedStep(plan, self.free_at)
        return self._last

    def shift(self, seconds: float) -> None:
        """The step that was launched last stands for a later one, which ends in so many seconds."""
        assert self._last is not None
        self.free_at = self._last.end = self.clock.now + seconds

    def collect(self, handle: SimulatedStep) -> StepResult:
        """A step without rows waits for all copies."""
        clock, plan = self.clock, handle.plan
        clock.wait_until(handle.end if plan.req_indices else self._copying_until)
        done = []
        while self._copies and self._copies[0][0] <= clock.now:
            done.append(self._copies.popleft()[1])
        return StepResult([_ONE if samples else _NONE for samples in plan.samples], transfers_done=tuple(done))
