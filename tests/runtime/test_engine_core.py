"""The engine's loop, without text and without torch, on an executor that is a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import SchedulerConfig
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.request import FinishReason, Request, SamplingParams
from mini_infer.runtime.engine_core import EngineCore
from mini_infer.runtime.scheduler.scheduler import Scheduler, TokenUpdate


class Counting:
    """An executor whose tokens count up, and whose clock moves on by a second a step."""

    def __init__(self, overlap: bool, stages: int = 1) -> None:
        self.overlap, self.stages = overlap, stages
        self.now = 0.0
        self.in_flight: list[StepPlan] = []
        self.most_in_flight = 0
        self.behind_itself = 0  # steps with a request that another stage is still at
        self.few = True  # there may be such steps

    def launch(self, plan: StepPlan) -> StepPlan:
        self.in_flight.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        shares = [set(plan.req_indices) for plan in self.in_flight[-self.stages :]]
        if len(set().union(*shares)) < sum(map(len, shares)):
            assert self.overlap, "stages compute steps of different requests"
            assert self.few, "there are other requests"
            self.behind_itself += 1
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        assert self.in_flight.pop(0) is handle, "steps are collected in the order in which they were launched"
        self.now += 1
        ends = [start + count for start, count in zip(handle.starts, handle.counts, strict=True)]
        return StepResult([[end] if samples else [] for end, samples in zip(ends, handle.samples, strict=True)])


class Posted:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def process(self, updates: Sequence[TokenUpdate], result: StepResult) -> list:
        return []

    def post(self, requests: Sequence[Request]) -> None:
        self.requests += [request for request in requests if request.finished]

    def unfinished(self) -> list[Request]:
        return []


def core_of(executor: Counting, posted: Posted, records_kept: int = 0) -> EngineCore:
    def make_scheduler() -> Scheduler:
        settings = {"follows": executor.overlap, "stages": executor.stages}
        return Scheduler(SchedulerConfig(max_num_seqs=8), KVManager(256, 4, 128), **settings)

    return EngineCore(make_scheduler, executor, lambda: executor.now, posted, records_kept)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_loop_runs_on_any_executor_and_clock(overlap: bool, stages: int) -> None:
    executor, posted = Counting(overlap, stages), Posted()
    core = core_of(executor, posted, records_kept=100)
    params = SamplingParams(max_tokens=5)
    for name in "abc":
        core.scheduler.add(Request(name, [0] * 6, params, max_total_tokens=11))
    while core.scheduler.num_unfinished:
        core.step()
    assert [r.request_id for r in posted.requests] == ["a", "b", "c"]
    for request in posted.requests:
        assert (request.output_token_ids, request.finish_reason) == ([6, 7, 8, 9, 10], FinishReason.length)
        gaps = [b - a for a, b in zip(request.token_times, request.token_times[1:], strict=False)]
        assert stages > 1 or gaps == [1] * 4
    assert executor.most_in_flight == stages + overlap
    assert sum(record.sampled_tokens for record in core.records) == 15


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_alone_in_a_pipeline_goes_behind_itself_where_steps_overlap(overlap: bool, stages: int) -> None:
    executor, posted = Counting(overlap, stages), Posted()
    core = core_of(executor, posted)
    core.scheduler.add(Request("a", [0] * 6, SamplingParams(max_tokens=9), max_total_tokens=15))
    while core.scheduler.num_unfinished:
        core.step()
    assert posted.requests[0].output_token_ids == list(range(6, 15))
    assert executor.most_in_flight == (stages if overlap else 1)
    assert executor.behind_itself == (8 if overlap else 0), "every token but the first"
    # With others, stages have these to compute.
    for name in "bcd":
        core.scheduler.add(Request(name, [0] * 6, SamplingParams(max_tokens=40), max_total_tokens=46))
    for _ in range(10):
        core.step()
    executor.few = False
    for _ in range(20):
        core.step()


@pytest.mark.parametrize(("stages", "running"), [(2, 1), (3, 2), (4, 2), (4, 6)])
def test_those_of_a_pipeline_that_go_behind_themselves_take_turns(stages: int, running: int) -> None:
    executor, posted = Counting(True, stages), Posted()
    core = core_of(executor, posted)
    requests = [Request(str(i), [0] * 6, SamplingParams(max_tokens=100), max_total_tokens=106) for i in range(running)]
    for request in requests:
        core.scheduler.add(request)
    for _ in range(60):
        core.step()
    tokens = [request.num_output_tokens for request in requests]
    assert min(tokens) > 0.9 * max(tokens) > 5


def test_it_imports_no_torch() -> None:
    code = "import sys, mini_infer.runtime.engine_core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
