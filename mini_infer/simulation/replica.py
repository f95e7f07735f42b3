"""An engine without text on a virtual clock: the real loop, scheduler and KV manager, over an executor that computes
nothing. Of steps that are all alike it takes as many at once as there are before it is wanted (ahead.py).

    step   step  <-- 57 steps of the same 3 requests, at once -->  step   step
    (a request has come)                                          (one ends)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError, RequestError
from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepRecord, StepResult
from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.scheduler.planned_step import TokenUpdate
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.simulation.ahead import steps_alike, take_steps
from mini_infer.simulation.costs import StepCosts, require_whole_experts
from mini_infer.simulation.executor import TOKEN, SimulatedExecutor, VirtualClock
from mini_infer.speculative.speculator import make_speculator

FEWEST_SKIPPED = 3  # steps, for which it is worth looking
MOST_SKIPPED = 128  # at once: a request may come any moment, and then what lies behind it was looked for in vain
_PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def _hash_blocks(parent: int | str, tokens: Sequence[int], size: int) -> list[int]:
    """As KVManager's, a third of its time: no prompt comes from somebody who would make two of one hash."""
    chained = hash(tuple(parent.encode())) if isinstance(parent, str) else parent
    return [chained := hash((chained, block)) for block in zip(*[iter(tokens)] * size, strict=True)]


def _no_weights() -> Any:
    raise AssertionError("drafts that somebody weighs are refused")


class Ended:
    """Where an engine hands on what its steps bring: nobody reads tokens here, and what counts is who has ended."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def process(self, updates: Sequence[TokenUpdate], result: StepResult) -> list[object]:
        return []

    def post(self, requests: Sequence[Request]) -> None:
        self.requests += [request for request in requests if request.finish_reason is not None]

    def unfinished(self) -> list[Request]:
        return []


class Replica:
    """
    Args:
        observe: is called with every StepRecord.
        skips: takes steps that are alike at once.

    Attributes:
        clock: its own: where several share a time line, each is as far as its last step.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        costs: StepCosts,
        overlap: bool,
        observe: Callable[[StepRecord], None] | None = None,
        skips: bool = True,
    ) -> None:
        parallel, drafts = config.parallel, config.speculation
        if drafts.most and (drafts.rate is None or drafts.has_draft_model or drafts.adaptive):
            raise ConfigError(
                f"speculation.method={drafts.method.value}: a simulated engine has no text, no draft model and nothing "
                "to weigh drafts with. Set speculation.method=synthetic with an acceptance, without a draft, and "
                "speculation.adaptive=false; or speculation.method=none"
            )
        require_whole_experts(parallel)
        self.clock, stages = VirtualClock(), parallel.pipeline
        self.limits = limits
        self._executor = SimulatedExecutor(costs, limits, self.clock, overlap, stages, drafts.rate)
        self._ended = Ended()

        def make() -> Scheduler:
            speculator = make_speculator(drafts, TOKEN + 1, _no_weights)
            kv = KVManager.of(config.cache, limits, hash_blocks=_hash_blocks)
            return Scheduler(config.scheduler, kv, config.cache.watermark, speculator, overlap, stages)

        self.core = EngineCore(make, self._executor, self.clock, self._ended, records_kept=0)  # type: ignore[arg-type]
        if observe is not None:
            self.core.observers.append(observe)
        self._skips = skips and stages == 1
        self._num_added = 0
        self._num_ahead = 0  # steps that are alike, from now on
        self._ends: Sequence[float] = ()  # theirs
        self._alike: Sequence[Request] = ()  # whose steps these are

    @property
    def busy(self) -> bool:
        return self.core.scheduler.num_unfinished > 0

    @property
    def next_event(self) -> float:
        """The earliest moment at which it does something that anybody could see; it is busy."""
        return self._ends[self._num_ahead - 1] if self._num_ahead else self.clock.now

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        now: float,
        priority: int = 0,
        arrival: float | None = None,
    ) -> Request:
        """A request that comes at `now`, and was due then or at an `arrival` before. RequestError where it can never be
        served."""
        total, limits = len(prompt) + output_tokens, self.limits
        if not prompt or output_tokens < 1 or total > limits.max_model_len:
            raise RequestError(
                f"{len(prompt)} prompt and {output_tokens} output tokens do not fit in {limits.max_model_len} tokens "
                f"({limits.reason})"
            )
        self.skip_until(now)
        self.clock.wait_until(now)
        request = Request(
            request_id,
            prompt,
            _PARAMS,
            max_total_tokens=total,
            seed=self._num_added,
            priority=priority,
            arrival_time=now if arrival is None else arrival,
        )
        self._num_added += 1
        self.core.scheduler.add(request)
        return request

    def run(self) -> list[Request]:
        """On to `next_event`, and what comes then: who has ended by it."""
        self.skip_until(float("inf"))
        self.core.step()
        if self._skips and self.busy:
            self._look_ahead()
        ended, self._ended.requests = self._ended.requests, []
        return ended

    def skip_until(self, moment: float) -> None:
        """Takes the steps that begin before `moment`, of those that were looked for: each begins as the one before it
        ends, and the first has begun."""
        num_ahead, self._num_ahead = self._num_ahead, 0
        if not num_ahead or moment <= self.clock.now:
            return
        ends, count = self._ends, num_ahead
        if moment < ends[num_ahead - 1]:
            count = bisect_left(ends, moment, hi=num_ahead) + 1
        take_steps(self.core.scheduler, self._alike, ends[:count], TOKEN)
        self._executor.skip(ends, count)

    def _look_ahead(self) -> None:
        self._alike, most = steps_alike(self.core.scheduler)
        if most < FEWEST_SKIPPED:
            return
        rows, most = len(self._alike), min(most, MOST_SKIPPED)
        context = sum([request.num_computed_tokens for request in self._alike])
        self._ends = self._executor.ends_ahead(rows, range(context + rows, context + rows * (most + 1), rows))
        self._num_ahead = most if self._ends else 0
