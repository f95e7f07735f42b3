"""An executor that computes nothing: it says when a step would have ended, and a virtual clock passes until then.

With overlap, two steps and the host beside them:

    host      plan 1 |plan 2|  waits          |book 1, plan 3|     waits     |book 2 ...
    device           [      step 1            ][          step 2             ][ step 3
    clock     0      h     2h                 end 1                           end 2

In a pipeline each stage computes its share of a step, one step after the other, while the others compute other steps.
Which drafts are accepted is a matter of rate, as with synthetic acceptance on a device, draft by draft the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

import numpy as np

from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.uniforms import SYNTHETIC, hash_seeds, uniforms
from mini_infer.runtime.executor.base import Executor
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
        if moment > self.now:
            self.now = moment


@dataclass(slots=True)
class SimulatedStep:
    plan: StepPlan
    end: float  # on the device
    accepted: list[int] | None  # drafts of each row; None: nobody drafts
    pushed: float  # when the other engines have its blocks

    @property
    def sampling(self) -> list[int]:
        """Request indices of the rows that get tokens."""
        return list(compress(self.plan.req_indices, self.plan.samples))


class SimulatedExecutor(Executor):
    """
    Args:
        clock: the engine's.
        acceptance: rate of drafts.

    Attributes:
        pushed: when the other engines have the blocks of all steps that were collected.
    """

    def __init__(
        self,
        costs: StepCosts,
        limits: Limits,
        clock: VirtualClock,
        overlap: bool,
        stages: int = 1,
        acceptance: float | None = None,
    ) -> None:
        self.costs, self.limits, self.clock, self.overlap, self.stages = costs, limits, clock, overlap, stages
        self._free_at = [0.0] * stages
        self._heat = costs.heat(stages)  # of each stage alike
        self._in_stages: deque[SimulatedStep] = deque(maxlen=stages)
        self._acceptance = None if acceptance is None else Acceptance(acceptance)
        self._copies: deque[tuple[float, int]] = deque()  # (end, transfer id), one after the other
        self._copying_until = 0.0
        self._link_free_at = self.pushed = 0.0
        self._last: SimulatedStep | None = None

    def launch(self, plan: StepPlan) -> SimulatedStep:
        clock = self.clock
        clock.now += self.costs.host_s(len(plan.req_indices))
        for transfer in plan.transfers:
            self._copying_until = max(self._copying_until, clock.now) + self.costs.copy_s(len(transfer.pairs))
            self._copies.append((self._copying_until, transfer.transfer_id))
        end = clock.now
        if plan.pushes:  # from the first layers on
            begin = max(self._link_free_at, end, self._free_at[0])
            self._link_free_at = begin + self.costs.push_s(plan.num_blocks_pushed)
        if plan.req_indices:
            if self.stages > 1:  # the first one waits for tokens of the last one
                own = set(plan.req_indices)
                end = max([end, *(step.end for step in self._in_stages if not own.isdisjoint(step.sampling))])
            work, begin, now = Work.of(plan), max(end, self._free_at[0]), clock.now
            share = self._device_s(work, begin) / self.stages
            for stage, free_at in enumerate(self._free_at):
                self._free_at[stage] = end = max(free_at, end) + share
            if self.overlap and begin > now:  # the end of the step under way is not told before this one is launched
                clock.now += self.costs.launch_s(work)
        accepted = None if self._acceptance is None else self._acceptance.of(plan)
        self._last = SimulatedStep(plan, end, accepted, max(end, self._link_free_at) if plan.pushes else 0.0)
        if self.stages > 1:
            self._in_stages.append(self._last)
        return self._last

    def _device_s(self, work: Work, begin: float) -> float:
        if heat := self._heat.at(begin):
            work = work._replace(heat=heat)
        seconds = self.costs.device_s(work)
        if work.prompt_tokens:
            self._heat.add(begin, seconds / self.stages)
        return seconds

    def look_ahead(self, ends: list[float], rows: int, contexts: range) -> None:
        """Adds to `ends` when the next steps would end if all were of these rows alone, each of which attends to so
        many slots, in one stage. With overlap the first is the one under way, and there is one more. None is added
        where the host is what counts."""
        costs, host, now = self.costs, self.costs.host_s(rows), self.clock.now
        if not self.overlap:
            now = ends[-1] if ends else now
            laps = costs.rows_s(rows, contexts, self._heat, now + host, pause_s=host)
            ends += [now := now + host + lap for lap in laps]
            return
        begin = ends[-1] if ends else max(now + host, self._free_at[0])
        laps = costs.rows_s(rows, contexts, self._heat, begin, pause_s=0.0)
        if ends or laps[0] >= host:
            # The end of a step is read when the next one is launched, and the device goes on without a pause.
            ends[-1:] = accumulate(laps, initial=begin)

    def skip(self, ends: Sequence[float], count: int) -> None:
        """So many of these steps are done. What was launched last stands for the one after them."""
        self.clock.now = ends[count - 1]
        if self.overlap:
            assert self._last is not None
            self._free_at[0] = self._last.end = ends[count]

    def collect(self, handle: SimulatedStep) -> StepResult:
        """A step without rows waits for all copies."""
        clock, plan = self.clock, handle.plan
        clock.wait_until(handle.end if plan.req_indices else self._copying_until)
        self.pushed = max(self.pushed, handle.pushed)
        done = []
        while self._copies and self._copies[0][0] <= clock.now:
            done.append(self._copies.popleft()[1])
        if handle.accepted is None:
            tokens = [_ONE if samples else _NONE for samples in plan.samples]
        else:
            pairs = zip(plan.samples, handle.accepted, strict=True)
            tokens = [[TOKEN] * (accepted + 1) if samples else _NONE for samples, accepted in pairs]
        return StepResult(tokens, transfers_done=tuple(done))


class Acceptance:
    """Which drafts are accepted at a stated rate: by a hash of a request's seed and the draft's place, as
    kernels/rows.py has it."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._keys: dict[int, np.uint64] = {}  # by req_index, like the next
        self._next_starts: dict[int, int] = {}  # where rows with drafts go on: a plan that follows them does not know

    def of(self, plan: StepPlan) -> list[int]:
        """How many of each row."""
        if plan.admissions:
            keys = hash_seeds(np.array([admission.seed for admission in plan.admissions], dtype=np.uint64))
            self._keys |= zip([admission.req_index for admission in plan.admissions], keys, strict=True)
        if not plan.has_drafts:
            return [0] * plan.num_rows
        following, accepted = set(plan.following), []
        for row, index in enumerate(plan.req_indices):
            start = self._next_starts[index] if row in following else plan.starts[row]
            drafts, standing = plan.drafts_of(row), 0
            if drafts:
                places = np.arange(start + 1, start + 1 + drafts, dtype=np.uint64) + np.uint64(SYNTHETIC)
                stands = uniforms(np.full(drafts, self._keys[index]), places) < self._rate
                standing = drafts if stands.all() else int(stands.argmin())
            accepted.append(standing)
            self._next_starts[index] = start + plan.counts[row] - drafts + standing
        return accepted
