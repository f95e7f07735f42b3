"""What the host pays for a step, without a model: the scheduler and the KV manager are driven with made-up tokens.

It is no ablation: nothing is served, and what is timed is one call, not a request.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import correlation, linear_regression
from typing import Any, TypeVar

import numpy as np
from omegaconf import DictConfig

from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count, ExperimentSpec
from experiments.lab.experiment import Findings, Probe
from experiments.lab.judge import stats
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.witness import Timed, wall_s, witnessed
from experiments.lab.show.progress import Steps
from experiments.lab.store.rows import Row
from mini_infer import SamplingParams
from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import Device
from mini_infer.core.config import replace as changed
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.request import Request
from mini_infer.runtime.executor.plan_ring import PlanRing, RingFiles
from mini_infer.runtime.scheduler.scheduler import Scheduler

Made = TypeVar("Made")
VARIANT = "engine"
VOCABULARY = 32_000
PROMPT = 32  # tokens of a running request's prompt, and up to a block more, so that not all fill a block at once
WARMUP_STEPS = 50
STEP_S = 0.001  # between two plans that another rank is told: the model's own time
METRICS = {
    "step_us": Metric("schedule + update, median step", "us", Better.lower),
    "step_p99_us": Metric("schedule + update, P99 step", "us", Better.lower),
    "us_per_request": Metric("schedule + update for one more request", "us", Better.lower),
    "r_squared": Metric("linearity in running requests (R²)", "", Better.higher, share=True),
    "waiting_step_us": Metric("schedule + update beside a queue, median step", "us", Better.lower),
    "match_us": Metric("prefix match, median prompt", "us", Better.lower),
    "told_us": Metric("a plan on its way to another rank, median step", "us", Better.lower),
}


@dataclass(frozen=True)
class OverheadSpec(ExperimentSpec):
    running: tuple[Count, ...] = (16, 64, 128, 256, 512)  # numbers of running requests
    steps: Count = 1000  # timed at each of them; a P99 takes 1,000
    prompt_tokens: tuple[Count, ...] = (512, 1024, 2048, 4096, 8192)  # of prompts that the prefix cache knows
    matches: Count = 50  # timed prompts of each length
    waiting: tuple[Count, ...] = (10, 1_000, 100_000)  # numbers of requests that queue behind running ones
    waiting_running: Count = 256  # which are so many
    rows: tuple[Count, ...] = (1, 64, 256)  # of plans that another rank's process is told

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.running)) < 3:
            raise ConfigError(f"experiment.running needs three sizes or more to fit a line, got {list(self.running)}")


class SchedulerOverhead(Probe):
    reads = (
        *("engine.cache.block_size", "engine.cache.layout", "engine.cache.prefix_caching", "engine.scheduler.policy"),
        *("engine.scheduler.batching", "engine.scheduler.chunked_prefill"),
        *("measure.gates", "measure.repeats", "measure.seed"),
    )
    spec: OverheadSpec
    device = Device.cpu
    generates = True  # for the gate alone
    variants: Mapping[str, str] = {VARIANT: "mini-infer"}
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec = self.spec
        self._rng = np.random.default_rng(self.settings.seed)
        self._running = [Point.of({"running": n}) for n in spec.running]
        self._fit = Point(f"running={min(spec.running)}..{max(spec.running)}", {"fit": "running"})
        lists = ("prompt_tokens", "waiting", "rows")
        others = [Point.of({name: n}) for name in lists for n in getattr(spec, name)]
        self.points = [*self._running, self._fit, *others]
        self.timed = [(VARIANT, point) for point in self.points if point is not self._fit]

    def measure(self, steps: Steps) -> Findings:
        """Tokens that are timed are made up: through this scheduler the shipped model gives each request its own."""
        engine = changed(self.engine, model={"device": "cpu", "dtype": "float32"})
        gates = [ExactGate("cpu").of_probes(VARIANT, engine)] if self.settings.gates else []
        return replace(super().measure(steps), gates=gates)

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        ((varied, count),) = point.values.items()
        if varied == "running":
            times = self._timed_steps(self._busy_scheduler(count))
            return {"step_us": stats.median(times), "step_p99_us": stats.percentile(times, 99)}
        if varied == "waiting":
            scheduler = self._busy_scheduler(self.spec.waiting_running)
            for index, prompt in enumerate(self._prompts([PROMPT] * count)):
                scheduler.add(_request(f"waiting-{index}", prompt, PROMPT + 1))
            return {"waiting_step_us": stats.median(self._timed_steps(scheduler))}
        return {"match_us": self._match(count)} if varied == "prompt_tokens" else {"told_us": self._told(count)}

    def derived(self, found: Sequence[Row]) -> list[tuple[str, Point, dict[str, float | None]]]:
        running = {point.name: point.values["running"] for point in self._running}
        by_running = {running[row.point]: row.value for row in found if row.metric == "step_us" and row.valid}
        x, y = list(by_running), list(by_running.values())
        if len(x) < len(running):
            return []
        slope, r_squared = linear_regression(x, y).slope, correlation(x, y) ** 2
        return [(VARIANT, self._fit, {"us_per_request": slope, "r_squared": r_squared})]

    def _match(self, length: int) -> float:
        """Microseconds, the median. The prompt is computed once by a request that has left; new requests of the same
        prompt look it up."""
        block = self.engine.cache.block_size
        kv = KVManager(length // block + 2, block, length + 1, prefix_caching=True)
        scheduler = self._scheduler(kv, max_num_batched_tokens=max(length, self.engine.scheduler.max_num_seqs))
        (prompt,) = self._prompts([length])
        scheduler.add(_request("first", prompt, length + 1))
        while scheduler.num_unfinished:
            _step(scheduler)
        expected = (length - 1) // block * block
        calls = []
        for index in range(self.spec.matches):
            request = _request(f"again-{index}", prompt, length + 1)
            (match, took), outside = witnessed(partial(_timed, kv.match_prefix, request))
            calls.append((took, outside))
            if match.num_tokens != expected:
                raise RuntimeError(f"a warm cache matched {match.num_tokens} of {expected} tokens")
        return stats.median(self._microseconds(calls))

    def _timed_steps(self, scheduler: Scheduler) -> list[float]:
        """Microseconds of schedule + update in each step; making up the tokens is not counted."""
        running, calls = scheduler.num_running, list[tuple[float, float]]()
        for _ in range(WARMUP_STEPS):
            _step(scheduler)
        for _ in range(self.spec.steps):
            (plan, planning), outside = witnessed(partial(_timed, scheduler.schedule, 0.0))
            (_, booking), more = witnessed(partial(_timed, scheduler.update, plan, _made_up(plan), 0.0))
            calls.append((planning + booking, outside + more))
            if plan.num_rows != running:
                raise RuntimeError(f"a step had {plan.num_rows} rows where {running} requests were running")
        return self._microseconds(calls)

    def _microseconds(self, calls: Sequence[tuple[float, float]]) -> list[float]:
        """That calls took, of which who timed them and a second witness tell the seconds."""
        self.witnessed.append(Timed.of(calls))
        return [1e6 * told for told, _ in calls]

    def _told(self, rows: int) -> float:
        """Microseconds, the median, from the call that tells another rank's process of a step until it has the plan. It
        looks for plans without sleeping, as ranks do on GPUs."""
        scheduler, count = self._busy_scheduler(rows), WARMUP_STEPS + self.spec.steps
        files, (ours, theirs) = RingFiles.create(2), multiprocessing.Pipe()
        rank = multiprocessing.get_context("fork").Process(target=_follow, args=(files, count, theirs), daemon=True)
        rank.start()
        theirs.close()  # so that `recv` ends with the process
        ring = PlanRing(files, 0, 2)
        try:
            ours.recv()  # it is there
            for _ in range(count):
                plan = scheduler.schedule(0.0)
                until = time.perf_counter() + STEP_S
                ring.send((plan, (wall_s(), time.perf_counter())))
                scheduler.update(plan, _made_up(plan), 0.0)
                while time.perf_counter() < until:
                    pass
            calls = ours.recv()
        finally:
            rank.kill()
            rank.join()
            files.close()
        return stats.median(self._microseconds(calls[WARMUP_STEPS:]))

    def _busy_scheduler(self, running: int) -> Scheduler:
        """A scheduler with exactly `running` requests decoding, and room for all of them to the end."""
        cache, block = self.engine.cache, self.engine.cache.block_size
        longest = PROMPT + block + WARMUP_STEPS + self.spec.steps + 2
        blocks = running * -(-longest // block)
        kv = KVManager(blocks, block, longest, layout=cache.layout, prefix_caching=cache.prefix_caching)
        budget = max(self.engine.scheduler.max_num_batched_tokens, running)
        scheduler = self._scheduler(kv, max_num_seqs=running, max_num_batched_tokens=budget)
        for index, prompt in enumerate(self._prompts([PROMPT + i % block for i in range(running)])):
            scheduler.add(_request(f"running-{index}", prompt, longest))
        while scheduler.num_running < running:
            _step(scheduler)
        return scheduler

    def _scheduler(self, kv: KVManager, **changes: Any) -> Scheduler:
        return Scheduler(replace(self.engine.scheduler, **changes), kv, watermark=0.0)

    def _prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        return [self._rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def _request(request_id: str, prompt: list[int], longest: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    return Request(request_id, prompt, params, max_total_tokens=longest)


def _made_up(plan: StepPlan) -> StepResult:
    return StepResult(tokens=[[plan.step % VOCABULARY] if samples else [] for samples in plan.samples])


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, _made_up(plan), 0.0)


def _timed(work: Callable[..., Made], *arguments: Any) -> tuple[Made, float]:
    """What it makes, and the seconds that it takes."""
    start = time.perf_counter()
    made = work(*arguments)
    return made, time.perf_counter() - start


def _follow(files: RingFiles, count: int, answers: Any) -> None:
    """The other rank: says how many seconds each plan took, and so does a second witness."""
    ring = PlanRing(files, 1, 2, awake_s=60.0)
    answers.send(None)
    calls = []
    for _ in range(count):
        _, (_, (begun, sent)) = ring.receive()
        calls.append((time.perf_counter() - sent, wall_s() - begun))
    answers.send(calls)
