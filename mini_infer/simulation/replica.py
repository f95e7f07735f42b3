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
from mini_infer.core.config import EngineConfig, HandOver
from mini_infer.core.errors import RequestError
from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepRecord, StepResult
from mini_infer.core.request import Export, Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.scheduler.planned_step import TokenUpdate
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.simulation.ahead import steps_alike, take_steps
from mini_infer.simulation.apart import SimulatedReceiver
from mini_infer.simulation.costs import StepCosts, require_simulated
from mini_infer.simulation.executor import TOKEN, SimulatedExecutor, VirtualClock
from mini_infer.speculative.speculator import make_speculator

FEWEST_SKIPPED = 3  # steps, for which it is worth looking
NEVER = float("inf")
LOOKED_AHEAD = 32  # steps at a time: a request may come any moment, and then what lies behind it was looked for in vain
_PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def _hash_blocks(parent: bytes | str, tokens: Sequence[int], size: int) -> list[bytes]:
    """As KVManager's, in less time: no prompt comes from somebody who would make two of one hash."""
    chained = parent.encode() if isinstance(parent, str) else parent
    blocks = zip(*[iter(tokens)] * size, strict=True)
    return [chained := hash((chained, block)).to_bytes(8, "little", signed=True) for block in blocks]


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
        computes_prompts: for others, and nothing else.
        receiver: of prompts that others compute; None where it computes all of its own.
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
        require_simulated(config)
        self.clock, stages = VirtualClock(), parallel.pipeline
        self.limits = limits
        self._executor = SimulatedExecutor(costs, limits, self.clock, overlap, stages, drafts.rate)
        self._ended = Ended()
        self.block_size, self.computes_prompts = config.cache.block_size, parallel.prefill > 0
        always = parallel.hand_over is HandOver.always
        self.receiver = receiver = SimulatedReceiver(self.clock, always) if parallel.decode else None

        def make() -> Scheduler:
            speculator = make_speculator(drafts, TOKEN + 1, _no_weights)
            kv = KVManager.of(config.cache, limits, hash_blocks=_hash_blocks)
            return Scheduler(config.scheduler, kv, config.cache.watermark, speculator, overlap, stages, receiver)

        self.core = EngineCore(make, self._executor, self.clock, self._ended, 0, receiver)  # type: ignore[arg-type]
        if observe is not None:
            self.core.observers.append(observe)
        self._skips = skips and stages == 1
        self._num_added = 0
        self._alike: Sequence[Request] = ()  # whose steps are alike, from now on
        self._num_alike = 0  # how many of them there are
        self._num_ahead = 0  # of how many of these it is known when they end
        self._context = 0  # that the next one behind these attends to
        self._ends: list[float] = []

    @property
    def busy(self) -> bool:
        """Whether it has something to do before something comes from outside."""
        return self.core.scheduler.num_unfinished > 0 and not self.core.waits

    @property
    def next_event(self) -> float:
        """The earliest moment at which it does something that anybody could see; NEVER where it is not busy."""
        if self._num_ahead:
            return self._ends[self._num_ahead - 1]
        return self.clock.now if self.busy else NEVER

    @property
    def pushed(self) -> float:
        """When the engines that it computes prompts for have the KV of its steps so far."""
        return self._executor.pushed

    def push_s(self, request: Request) -> float:
        """What the copies of a prompt that it has computed for another take, in all."""
        return 0.0 if request.export is None else self._executor.costs.push_s(len(request.export.blocks))

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        now: float,
        priority: int = 0,
        arrival: float | None = None,
        prefill_at: str | None = None,
        export: Export | None = None,
    ) -> Request:
        """A request that comes at `now`, and was due then or at an `arrival` before. RequestError where it can never be
        served. `prefill_at` and `export` are a Request's."""
        total, limits = len(prompt) + output_tokens, self.limits
        if not prompt or output_tokens < 1 or total > limits.max_model_len:
            raise RequestError(
                f"{len(prompt)} prompt and {output_tokens} output tokens do not fit in {limits.max_model_len} tokens "
                f"({limits.reason})"
            )
        self._wake(now)
        request = Request(
            request_id,
            prompt,
            _PARAMS,
            max_total_tokens=total,
            seed=self._num_added,
            priority=priority,
            arrival_time=now if arrival is None else arrival,
            prefill_at=prefill_at,
            export=export,
        )
        self._num_added += 1
        self.core.scheduler.add(request)
        return request

    def cancel(self, request: Request, now: float) -> None:
        """Nobody needs it any more; it has not ended."""
        self._wake(now)
        self.core.abort([request])

    def hear(self, transfer_id: int, computed: Request | None, copying: float, now: float) -> None:
        """As SimulatedReceiver.end."""
        assert self.receiver is not None
        self._wake(now)
        self.receiver.end(transfer_id, computed, copying)

    def _wake(self, now: float) -> None:
        """Something comes from outside."""
        self.skip_until(now)
        self.clock.wait_until(now)
        self.core.waits = False

    def run(self) -> list[Request]:
        """On to `next_event`, and what comes then: who has ended by it."""
        if self._num_ahead < self._num_alike:
            self._look_ahead()
            return []
        self.skip_until(NEVER)
        self.core.step()
        if self._skips and self.busy:
            self._find_alike()
        ended, self._ended.requests = self._ended.requests, []
        return ended

    def skip_until(self, moment: float) -> None:
        """Takes the steps that begin before `moment`, of those that were looked for: each begins as the one before it
        ends, and the first has begun."""
        count, self._num_ahead, self._num_alike = self._num_ahead, 0, 0
        if not count or moment <= self.clock.now:
            return
        ends = self._ends
        if moment < ends[count - 1]:
            count = bisect_left(ends, moment, hi=count) + 1
        take_steps(self.core.scheduler, self._alike, ends[:count], TOKEN)
        self._executor.skip(ends, count)

    def _find_alike(self) -> None:
        self._alike, most = steps_alike(self.core.scheduler, int(self._executor.overlap))
        if most >= FEWEST_SKIPPED:
            self._num_alike, self._ends = most, []
            self._context = sum([request.num_computed_tokens for request in self._alike]) + len(self._alike)
            self._look_ahead()

    def _look_ahead(self) -> None:
        rows, more = len(self._alike), min(LOOKED_AHEAD, self._num_alike - self._num_ahead)
        contexts = range(self._context, self._context + rows * more, rows)
        self._executor.look_ahead(self._ends, rows, contexts)
        self._context, self._num_ahead = contexts.stop, self._num_ahead + more
        if not self._ends:
            self._num_alike = self._num_ahead = 0
