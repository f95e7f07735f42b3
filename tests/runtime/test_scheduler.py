"""What the scheduler plans, case by case. Tokens are made up: token k of every request is k."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from file_names import FileNames
from integrity import check_scheduler

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import Layout, SchedulerConfig
from mini_infer.core.plan import Draft, StepPlan, StepResult, Transfer
from mini_infer.core.request import FinishReason, Request, RequestStatus, SamplingParams
from mini_infer.runtime.scheduler.planned_step import PlannedStep, TokenUpdate
from mini_infer.runtime.scheduler.scheduler import MOST_SHARE, Scheduler
from mini_infer.speculative.speculator import NoSpeculation

BLOCK = 4


class Bench:
    """A scheduler that is stepped by hand, checked after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        prefix_caching: bool = False,
        host_prefixes: bool = False,
        files: FileNames | None = None,
        **config,
    ) -> None:
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
        layout = settings.pop("layout", Layout.paged)
        max_len = settings.pop("max_model_len", 64)
        watermark = settings.pop("watermark", 0.0)
        kv = KVManager(
            num_blocks,
            BLOCK,
            max_len,
            layout=layout,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
            host_prefixes=host_prefixes,
            files=files,
        )
        transfer_steps = settings.pop("transfer_steps", 0)
        speculator, follows = settings.pop("speculator", None), settings.pop("follows", False)
        stages = settings.pop("stages", 1)
        self.scheduler = Scheduler(SchedulerConfig(**settings), kv, watermark, speculator, follows, stages)
        self.clock = 0.0
        self.transfer_steps = transfer_steps
        self.transfers: dict[int, int] = {}  # under way, by id: how many bookings until they have ended
        self.added: list[Request] = []

    def add(
        self,
        name: str,
        prompt: int | list[int],
        max_tokens: int = 8,
        priority: int = 0,
        fork_of: Request | None = None,
        arrival: float = 0.0,
    ) -> Request:
        tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=max_tokens, stop_token_ids=(999,)),
            max_total_tokens=len(tokens) + max_tokens,
            priority=priority,
            arrival_time=arrival,
            fork_of=fork_of,
        )
        self.scheduler.add(request)
        self.added.append(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, FinishReason.abort)

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.clock)
        check_scheduler(self.scheduler)
        return plan

    def book(self, plan: StepPlan, tokens: dict[int, list[int]] | None = None) -> list[TokenUpdate]:
        self.clock += 1.0
        result = [(tokens or {}).get(row, [7]) if samples else [] for row, samples in enumerate(plan.samples)]
        self.transfers.update({transfer.transfer_id: self.transfer_steps for transfer in plan.transfers})
        done = tuple(i for i, left in self.transfers.items() if left == 0 or not plan.req_indices)
        self.transfers = {i: left - 1 for i, left in self.transfers.items() if i not in done}
        updates = self.scheduler.update(plan, StepResult(result, transfers_done=done), self.clock)
        check_scheduler(self.scheduler)
        return updates

    def step(self) -> StepPlan:
        plan = self.plan()
        self.book(plan)
        return plan

    def overlapped(self, steps: int) -> Iterator[StepPlan]:
        """Each plan is made before the one before it is booked."""
        under_way: deque[StepPlan] = deque()
        for _ in range(steps):
            plan = self.plan()
            if not plan.empty:
                under_way.append(plan)
            yield plan
            if len(under_way) > (not plan.empty):
                self.book(under_way.popleft())
        while under_way:
            self.book(under_way.popleft())


class ManyDrafts(NoSpeculation):
    """As many drafts as there may be, written on the device. Remembers whether prompts were expected beside them."""

    most = 2

    def __init__(self) -> None:
        self.prompts: list[bool] = []

    def plan(self, requests: Sequence[Request], prompts: bool = False) -> dict[int, Draft]:
        self.prompts.append(prompts)
        return {place: Draft(self.most) for place, _ in enumerate(requests)}


def test_prompt_is_computed_in_chunks_under_the_budget_and_decodes_go_first() -> None:
    bench = Bench(max_num_batched_tokens=16)
    a = bench.add("a", 4)
    bench.step()
    b = bench.add("b", 30)
    plan = bench.step()
    assert (plan.num_decode_rows, plan.counts, plan.samples) == (1, [1, 15], [True, False])
    assert b.status is RequestStatus.prefilling
    assert a.num_output_tokens == 2
    plan = bench.step()
    assert (plan.starts, plan.counts, plan.samples) == ([5, 15], [1, 15], [True, True])
    assert b.status is RequestStatus.running
    assert b.num_output_tokens == 1


@pytest.mark.parametrize("stages", [2, 3])
def test_prompts_are_spread_over_the_steps_of_all_stages(stages: int) -> None:
    """Those that wait, those in progress, and what other stages compute already count; a few tokens are not split."""
    bench = Bench(stages=stages, max_num_batched_tokens=4096, num_blocks=1024, max_model_len=4096)
    for name in "abc":
        bench.add(name, 400)
    plans = [bench.plan() for _ in range(stages)]
    assert [plan.num_prefill_tokens for plan in plans] == [1200 // stages] * stages
    for plan in plans:
        bench.book(plan)
    bench.add("d", 100)
    assert bench.plan().num_prefill_tokens == 100
    one = Bench(max_num_batched_tokens=4096, num_blocks=1024, max_model_len=4096)
    one.add("a", 400)
    assert one.plan().num_prefill_tokens == 400


def test_a_pipeline_is_soon_full_however_much_waits() -> None:
    bench = Bench(stages=2, max_num_batched_tokens=8192, num_blocks=8192, max_model_len=8192)
    for name in "abc":
        bench.add(name, 4000)
    assert [bench.plan().num_prefill_tokens for _ in range(3)] == [MOST_SHARE] * 3


def test_whole_prompts_wait_for_a_step_that_has_room_for_them() -> None:
    bench = Bench(max_num_batched_tokens=16, chunked_prefill=False)
    bench.add("a", 10)
    bench.add("b", 10)
    bench.add("c", 16)
    assert bench.step().counts == [10]
    assert bench.step().counts == [1, 10]
    assert bench.step().counts == [16], "those that decode sit out a step: it would be more than the budget"
    assert bench.step().counts == [1, 1, 1]


def test_whole_prompts_in_a_row_leave_every_other_step_to_those_that_decode() -> None:
    bench = Bench(max_num_batched_tokens=16, chunked_prefill=False)
    bench.add("a", 4, max_tokens=20)
    bench.step()
    for name in "bcd":
        bench.add(name, 15, max_tokens=20)
    counts = [bench.step().counts for _ in range(5)]
    assert counts == [[1, 15], [1, 15], [1, 1, 1], [1, 15], [1, 1, 1, 1]], "as few sit out as must"


def test_whole_prompts_of_a_static_batch_keep_to_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=16, chunked_prefill=False, batching="static")
    for name in "ab":
        bench.add(name, 16, max_tokens=20)
    assert [bench.step().counts for _ in range(3)] == [[16], [16], [1, 1]]


def test_static_batch_admits_the_next_requests_only_when_all_of_it_is_done() -> None:
    bench = Bench(batching="static", max_num_seqs=2)
    bench.add("a", 4, max_tokens=1)
    b = bench.add("b", 4, max_tokens=4)
    c = bench.add("c", 4)
    assert len(bench.step().req_indices) == 2
    while not b.finished:
        assert bench.step().counts == [1]
        assert c.status is RequestStatus.waiting
    assert [a.request_id for a in bench.step().admissions] == ["c"]


def test_continuous_batch_fills_a_slot_as_soon_as_it_is_free() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add("a", 4, max_tokens=1)
    bench.add("b", 4, max_tokens=4)
    bench.add("c", 4)
    bench.step()
    assert [a.request_id for a in bench.step().admissions] == ["c"]


def test_last_arrival_gives_way_and_is_computed_again() -> None:
    bench = Bench(num_blocks=4, max_model_len=16)
    a, b = bench.add("a", 7), bench.add("b", 7)
    bench.step()
    bench.step()  # both tables are full: 8 tokens each
    plan = bench.step()
    assert plan.preempted == ["b"]
    assert len(plan.req_indices) == 1
    assert (b.status, b.num_computed_tokens, b.block_table) == (RequestStatus.waiting, 0, [])
    assert b.num_preemptions == 1
    while not a.finished:
        bench.step()
    plan = bench.step()
    assert plan.admissions[0].token_ids == b.token_ids[:9], "prompt and the output so far"
    assert (plan.starts, plan.counts) == ([0], [9])


def test_swapped_request_goes_on_where_it_was() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, preemption="swap", num_host_blocks=4)
    a, b = bench.add("a", 7), bench.add("b", 7)
    bench.step()
    bench.step()
    plan = bench.step()
    assert plan.preempted == ["b"]
    (out,) = plan.transfers
    assert out.to_host
    assert [host for _, host in out.pairs] == [0, 1]
    assert b.status is RequestStatus.swapped
    while not a.finished:
        assert not bench.step().transfers
    plan = bench.step()
    (back,) = plan.transfers
    assert not back.to_host
    assert [host for host, _ in back.pairs] == [0, 1]
    assert [device for _, device in back.pairs] == b.block_table[:2]
    assert not plan.req_indices, "its blocks are on their way"
    plan = bench.step()
    assert (plan.starts, plan.counts) == ([8], [1]), "nothing is computed twice"


def test_blocks_stay_taken_until_their_transfer_has_ended() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, preemption="swap", num_host_blocks=4, transfer_steps=2)
    a, b = bench.add("a", 7), bench.add("b", 7)
    bench.step()
    bench.step()
    plan = bench.plan()
    assert plan.preempted == ["b"]
    assert not plan.req_indices, "a waits for b's blocks"
    assert bench.scheduler.usage().used_blocks == 4
    bench.book(plan)  # nothing else to do: it has waited for the transfer
    assert bench.step().counts == [1]
    while not a.finished:
        bench.step()
    plans = []
    while b.num_output_tokens < 3:
        plans.append(bench.step())
    assert [(bool(p.transfers), p.counts) for p in plans] == [(True, []), (False, [1])]


def test_nobody_waits_for_a_transfer_who_has_something_to_compute() -> None:
    bench = Bench(num_blocks=8, max_model_len=32, preemption="swap", num_host_blocks=4, transfer_steps=3)
    a, b, c = (bench.add(name, 7, max_tokens=20) for name in "abc")
    for request in (a, b, c):
        request.max_total_tokens = 20
    seen = set()
    while not (a.finished and b.finished and c.finished):
        plan = bench.step()
        seen.add((bool(plan.req_indices), bool(bench.transfers)))
        assert not plan.empty
    assert (True, True) in seen
    assert [r.num_output_tokens for r in (a, b, c)] == [13, 13, 13]


def test_a_plan_without_rows_waits_for_transfers_that_earlier_plans_started() -> None:
    bench = Bench(
        num_blocks=4, max_model_len=16, preemption="swap", num_host_blocks=4, transfer_steps=9, max_num_seqs=2
    )
    a, b = bench.add("a", 7, max_tokens=8), bench.add("b", 7, max_tokens=8)
    bench.step()
    bench.step()
    bench.step()
    assert bench.scheduler.num_swapped == 1
    bench.step()
    bench.abort(a)
    plans = [bench.step() for _ in range(3)]
    assert b.num_output_tokens > 2
    assert not any(plan.empty for plan in plans)


@pytest.mark.parametrize("state", ["swapped", "loading"])
@pytest.mark.parametrize("fate", ["abort", "fail", "launched and failed"])
def test_whoever_goes_while_its_blocks_move_leaves_them_to_the_copies(state: str, fate: str) -> None:
    bench = Bench(num_blocks=4, max_model_len=16, preemption="swap", num_host_blocks=4)
    a, b = bench.add("a", 7), bench.add("b", 7)
    bench.step()
    bench.step()
    plan = bench.plan()
    if state == "loading":
        bench.book(plan)
        while not a.finished:
            bench.step()
        plan = bench.plan()
    assert b.status.value == state
    used = bench.scheduler.usage()
    if fate == "abort":
        bench.abort(b)
        check_scheduler(bench.scheduler)
        assert bench.scheduler.usage() == used, "the copies may still go on"
        bench.book(plan)
    else:
        assert bench.scheduler.fail(plan) == []
        check_scheduler(bench.scheduler)
        assert (b.status, b.num_computed_tokens) == (RequestStatus.waiting, 0)
        assert bench.scheduler.usage().used_blocks == used.used_blocks
        if fate == "launched and failed":
            bench.transfers = {transfer.transfer_id: 0 for transfer in plan.transfers}
        while not b.finished:
            bench.step()
    while not a.finished:
        bench.step()
    usage = bench.scheduler.usage()
    assert (usage.used_blocks, usage.used_slots, usage.host_blocks_used) == (0, 0, 0)


def test_urgent_request_takes_the_place_of_one_that_is_swapping_in() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, policy="priority", preemption="swap", num_host_blocks=4)
    low = bench.add("low", 11, max_tokens=5, priority=2)
    bench.step()
    bench.add("high", 13, max_tokens=1, priority=1)
    plan = bench.plan()
    while low.status is not RequestStatus.loading:
        bench.book(plan)
        plan = bench.plan()
    high = bench.add("higher", 13, max_tokens=1, priority=0)
    second = bench.plan()
    assert second.preempted == ["low"]
    assert low.status is RequestStatus.swapped
    assert not second.admissions, "its blocks are still being written"
    bench.book(plan)
    if not second.empty:
        bench.book(second)
    while not low.finished:
        bench.step()
    assert high.finished
    assert (low.num_output_tokens, low.num_preemptions) == (5, 2)
    assert bench.scheduler.usage().host_blocks_used == 0


def test_nobody_starves_in_a_full_pool_while_steps_overlap() -> None:
    """There is a step under way whenever the next one is planned, as long as a long prompt is computed."""
    bench = Bench(num_blocks=52, max_model_len=208, max_num_batched_tokens=8)
    a = bench.add("a", 7, max_tokens=40)
    bench.step()
    bench.add("long", 200, max_tokens=8)
    assert all(0 in plan.req_indices or 7 in plan.req_indices for plan in bench.overlapped(20))
    assert a.num_output_tokens == 21


def test_who_finds_no_room_waits_for_blocks_that_are_about_to_be_given_back() -> None:
    bench = Bench(num_blocks=4, max_model_len=16)
    a, b = bench.add("a", 7, max_tokens=8), bench.add("b", 7, max_tokens=2)
    plans = bench.overlapped(12)
    rows = [len(next(plans).req_indices) for _ in range(3)]
    assert rows == [2, 2, 0], "b's last token is in flight"
    for _ in plans:
        pass
    assert (a.finished, b.finished) == (True, True)
    assert a.num_preemptions == b.num_preemptions == 0


def test_full_swap_space_falls_back_to_recompute() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, preemption="swap", num_host_blocks=1)
    bench.add("a", 7)
    b = bench.add("b", 7)
    for _ in range(3):
        bench.step()
    assert (b.status, b.num_computed_tokens) == (RequestStatus.waiting, 0)


def test_priority_goes_first_in_the_queue() -> None:
    bench = Bench(policy="priority", max_num_seqs=1)
    bench.add("first", 4, max_tokens=2)
    bench.step()
    bench.add("low", 4, priority=5)
    bench.add("high", 4, priority=0)
    bench.step()
    assert [a.request_id for a in bench.step().admissions] == ["high"]


def test_short_prompts_pass_a_long_one_until_it_has_aged() -> None:
    """40 tokens weigh as much as four seconds of waiting, 4 tokens as much as 0.4."""
    bench = Bench(policy="shortest", ageing_tokens_per_s=10.0, max_num_seqs=1)
    bench.add("first", 4, max_tokens=3)
    bench.step()
    bench.add("long", 40, max_tokens=1, arrival=1.0)
    bench.add("short", 4, max_tokens=1, arrival=4.5)
    bench.add("late", 4, max_tokens=1, arrival=4.7)
    admitted = []
    while bench.scheduler.num_unfinished:
        admitted += [a.request_id for a in bench.step().admissions]
    assert admitted == ["short", "long", "late"]


def test_a_short_prompt_overtakes_a_long_one_in_progress() -> None:
    bench = Bench(policy="shortest", max_num_batched_tokens=8, num_blocks=200, max_model_len=400)
    long = bench.add("long", 300)
    bench.step()
    short = bench.add("short", 8)
    bench.step()
    assert (short.num_output_tokens, long.num_computed_tokens) == (1, 8)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_urgent_request_takes_the_place_of_the_least_urgent(preemption: str) -> None:
    bench = Bench(policy="priority", max_num_seqs=2, preemption=preemption, num_host_blocks=16)
    bench.add("middle", 4, priority=1)
    bench.add("low", 4, priority=2)
    bench.step()
    bench.add("high", 4, priority=0)
    plan = bench.step()
    assert plan.preempted == ["low"]
    assert [a.request_id for a in plan.admissions] == ["high"]
    assert plan.counts == [1, 4]
    bench.add("equal", 4, priority=1)
    assert bench.step().preempted == [], "an equal does not push anyone out"


def test_urgent_request_does_not_wait_behind_a_swapped_one() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, policy="priority", preemption="swap", num_host_blocks=8)
    bench.add("a", 7, priority=3)
    bench.add("b", 7, priority=3)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.num_swapped == 1
    bench.add("urgent", 3, priority=0)
    assert "urgent" in [a.request_id for a in bench.step().admissions]


def test_urgent_prompt_overtakes_a_prompt_in_progress() -> None:
    bench = Bench(policy="priority", max_num_batched_tokens=8, num_blocks=200, max_model_len=400)
    low = bench.add("low", 300, priority=5)
    bench.step()
    high = bench.add("high", 8, priority=0)
    plan = bench.step()
    assert [a.request_id for a in plan.admissions] == ["high"]
    assert high.num_output_tokens == 1
    bench.step()
    assert low.num_computed_tokens > 8, "and goes on beside it"


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    bench = Bench(num_blocks=10, max_model_len=40, policy="priority")
    bench.add("high", 20, priority=0, max_tokens=15)
    bench.add("low", 4, priority=2)
    bench.step()
    big = bench.add("big", 30, priority=1)
    plan = bench.step()
    assert plan.preempted == []
    assert big.status is RequestStatus.waiting


def test_a_shared_block_is_gained_once_and_by_the_last_of_those_that_share_it() -> None:
    bench = Bench(num_blocks=10, max_model_len=40, policy="priority")
    leader = bench.add("x", 9, priority=2)
    bench.step()
    for _ in range(3):
        bench.add("x", 9, priority=2, fork_of=leader)
    bench.step()  # 2 shared blocks and one each
    assert bench.scheduler.usage().used_blocks == 6
    bench.add("high", 15, max_tokens=12, priority=0)
    bench.step()
    big = bench.add("big", 31, priority=1)
    assert bench.step().preempted == [], "8 blocks are needed, and 6 would be gained"
    assert big.status is RequestStatus.waiting


def test_as_many_give_way_as_share_the_blocks_that_are_needed() -> None:
    bench = Bench(num_blocks=6, max_model_len=24, policy="priority")
    leader = bench.add("x", 9, priority=2)
    bench.step()
    for _ in range(3):
        bench.add("x", 9, priority=2, fork_of=leader)
    bench.step()
    bench.add("high", 8, priority=0)
    plan = bench.step()
    assert plan.preempted == ["x", "x"], "each gives back its own block"
    assert [a.request_id for a in plan.admissions] == ["high"]


@pytest.mark.parametrize("chunked", [True, False])
def test_who_finds_no_room_turns_no_drafts_off(chunked: bool) -> None:
    speculator = ManyDrafts()
    bench = Bench(num_blocks=14, max_model_len=56, chunked_prefill=chunked, speculator=speculator)
    bench.add("a", 8, max_tokens=40)
    bench.step()
    bench.add("big", 55, max_tokens=1)
    assert bench.step().num_drafts == 2
    assert speculator.prompts == [True, False]


def test_drafts_may_take_the_blocks_that_a_newcomer_would_have_had() -> None:
    bench = Bench(num_blocks=6, max_model_len=24, speculator=ManyDrafts())
    bench.add("a", 10, max_tokens=4)
    bench.step()
    b = bench.add("b", 12, max_tokens=1)
    assert bench.step().num_drafts == 2
    assert b.status is RequestStatus.waiting, "a block is left too few"
    while not b.finished:
        assert bench.step().req_indices, "somebody gets on in every step"


def test_steps_follow_drafts_that_are_not_read_while_somebody_waits_in_vain() -> None:
    bench = Bench(num_blocks=14, max_model_len=56, speculator=ManyDrafts(), follows=True)
    bench.add("a", 8, max_tokens=40)
    bench.step()
    bench.add("big", 55, max_tokens=1)
    assert [plan.num_rows for plan in bench.overlapped(5)] == [1] * 5


def test_fcfs_ignores_priorities() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("first", 4, priority=9)
    bench.add("second", 4, priority=0)
    assert [a.request_id for a in bench.step().admissions] == ["first"]
    assert bench.step().preempted == []


def test_watermark_leaves_room_to_grow_but_never_starves_an_idle_engine() -> None:
    bench = Bench(num_blocks=4, watermark=0.5, max_model_len=16)
    bench.add("a", 8)
    b = bench.add("b", 4)
    bench.step()
    assert b.status is RequestStatus.waiting, "one block is left, and two are to be kept"
    bench = Bench(num_blocks=4, watermark=0.5, max_model_len=16)
    whole = bench.add("whole", 15, max_tokens=1)
    bench.step()
    assert whole.finished


def test_watermark_means_nothing_where_requests_cannot_grow() -> None:
    bench = Bench(num_blocks=8, watermark=0.5, max_model_len=16, layout=Layout.contiguous)
    for name in ("a", "b"):
        bench.add(name, 4)
    assert len(bench.step().admissions) == 2, "both regions are given out"


def test_prefix_hit_starts_the_counter_ahead() -> None:
    bench = Bench(prefix_caching=True)
    bench.add("a", 10)
    bench.step()
    b = bench.add("b", [*range(8), 50, 51, 52])
    plan = bench.step()
    assert (plan.starts[1], plan.counts[1]) == (8, 3)
    assert (plan.prefix_queried_tokens, plan.prefix_hit_tokens) == (11, 8)
    assert b.num_cached_tokens == 8


def test_preempted_request_that_finds_its_own_blocks_is_no_prefix_hit() -> None:
    bench = Bench(num_blocks=4, max_model_len=16, prefix_caching=True)
    bench.add("a", list(range(7)))
    b = bench.add("b", list(range(100, 107)))
    hits = 0
    while not b.finished:
        hits += bench.step().prefix_hit_tokens
    assert b.num_preemptions == 1
    assert hits == 0
    assert b.num_cached_tokens == 0


def test_siblings_wait_for_the_leaders_prompt_and_share_its_blocks() -> None:
    bench = Bench(max_num_batched_tokens=8)
    leader = bench.add("x#0", 10)
    siblings = [bench.add(f"x#{i}", 10, fork_of=leader) for i in (1, 2)]
    other = bench.add("other", 2)
    plan = bench.step()
    assert [a.request_id for a in plan.admissions] == ["x#0"]
    plan = bench.step()
    assert [a.request_id for a in plan.admissions] == ["x#0", "other"][1:], "they hold nobody up"
    assert other.num_output_tokens == 1
    bench.step()
    assert all(s.block_table[:2] == leader.block_table[:2] for s in siblings)
    assert all(s.block_table[2] != leader.block_table[2] for s in siblings)
    assert all(s.num_cached_tokens == 8 for s in siblings)


def test_nobody_takes_the_place_of_a_sibling_that_waits_for_its_leader() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=2)
    leader = bench.add("x", 10)
    sibling = bench.add("x", 10, fork_of=leader)
    other = bench.add("other", 2)
    bench.step()
    bench.step()
    assert other.status is RequestStatus.waiting, "it would take the last slot"
    bench.step()
    assert sibling.num_output_tokens == 1


def test_nobody_takes_the_block_of_a_sibling_that_waits_for_its_leader() -> None:
    bench = Bench(max_num_batched_tokens=8, num_blocks=4, max_model_len=16)
    leader = bench.add("x", 10, max_tokens=2)
    sibling = bench.add("x", 10, max_tokens=2, fork_of=leader)
    other = bench.add("other", 2)
    bench.step()
    bench.step()
    assert other.status is RequestStatus.waiting, "it would take the last block"
    bench.step()
    assert sibling.num_output_tokens == 1


def test_siblings_of_a_static_batch_run_beside_their_leader() -> None:
    bench = Bench(batching="static", max_num_seqs=4)
    leader = bench.add("x", 10)
    for _ in range(2):
        bench.add("x", 10, fork_of=leader)
    assert bench.step().counts == [10, 10, 10]


def test_preempted_sibling_finds_its_own_blocks_where_they_are_more() -> None:
    kv = KVManager(32, BLOCK, 64)
    leader = Request("x", list(range(9)), SamplingParams(), max_total_tokens=40)
    kv.admit(leader)
    kv.commit(leader, 9)
    sibling = Request("x", list(range(30)), SamplingParams(), max_total_tokens=40, fork_of=leader)
    kv.admit(sibling)
    kv.commit(sibling, 28)
    kv.free(sibling)
    assert kv.match_prefix(sibling).num_tokens == 28


def test_aborted_waiting_requests_are_forgotten() -> None:
    bench = Bench(policy="priority", max_num_seqs=1)
    bench.add("head", 4, priority=0)
    for _ in range(1000):
        bench.abort(bench.add("gone", 4, priority=1))
    bench.add("last", 4, priority=1)
    assert len(bench.scheduler.line._line) == 2
    assert bench.scheduler.num_waiting == 2


def test_siblings_of_an_aborted_leader_go_on_alone() -> None:
    bench = Bench()
    leader = bench.add("x#0", 10)
    sibling = bench.add("x#1", 10, fork_of=leader)
    bench.abort(leader)
    assert bench.step().counts == [10]
    assert sibling.num_output_tokens == 1


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "swapped", "sibling", "planned"])
def test_abort_in_every_state_gives_everything_back(state: str) -> None:
    bench = Bench(num_blocks=6, max_model_len=24, preemption="swap", num_host_blocks=8, max_num_batched_tokens=8)
    victim: Request | None = None
    if state == "swapped":
        a, b = bench.add("a", 7), bench.add("b", 15)
        while not bench.scheduler.num_swapped:
            bench.step()
        victim = next(r for r in (a, b) if r.status is RequestStatus.swapped)
    elif state == "sibling":
        victim = bench.add("x#1", 4, fork_of=bench.add("x#0", 4))
    else:
        victim = bench.add("v", 4 if state in ("running", "planned") else 12)
        plan = None if state == "waiting" else bench.plan()
        if state == "planned":  # it goes while its step runs: the step's token for it is dropped
            bench.abort(victim)
            assert bench.book(plan) == []
        elif plan is not None:
            bench.book(plan)
    if state not in ("planned", "sibling"):
        assert victim.status.value == state
    bench.abort(victim)
    check_scheduler(bench.scheduler)
    assert victim is not None
    assert victim.finish_reason is FinishReason.abort
    assert not victim.block_table
    for request in bench.added:
        if not request.finished:
            bench.abort(request)
    check_scheduler(bench.scheduler)
    usage = bench.scheduler.usage()
    assert usage.used_blocks == usage.host_blocks_used == 0
    assert not bench.plan().req_indices


def test_request_ends_by_stop_token_length_and_not_before_min_tokens() -> None:
    bench = Bench()
    a = bench.add("a", 4, max_tokens=3)
    bench.step()
    bench.book(bench.plan(), {0: [999]})
    assert (a.finish_reason, a.stop_reason, a.output_token_ids) == (FinishReason.stop, 999, [7, 999])
    b = bench.add("b", 4, max_tokens=2)
    bench.step()
    bench.step()
    assert (b.finish_reason, b.stop_reason, b.num_output_tokens) == (FinishReason.length, None, 2)
    c = bench.add("c", 4)
    c.min_total_tokens = 6
    for expected in (False, False, True):
        bench.book(bench.plan(), {0: [999]})
        assert c.finished is expected


def test_failed_step_ends_its_own_requests_only() -> None:
    bench = Bench(max_num_seqs=1)
    a, b = bench.add("a", 4), bench.add("b", 4)
    plan = bench.plan()
    assert bench.scheduler.fail(plan) == [a]
    check_scheduler(bench.scheduler)
    assert a.finish_reason is FinishReason.error
    bench.step()
    assert b.num_output_tokens == 1


def test_rows_follow_drafts_of_the_step_before_and_not_their_own() -> None:
    step = PlannedStep(3, 0.0, 100)
    #                   tokens in flight, and how many of them are this step's
    in_flight = {"drafted before": (3 + 1, 1), "drafts now alone": (3, 3), "both": (6, 3), "one before": (1 + 3, 3)}
    step.rows = [Request(name, [1], SamplingParams(), max_total_tokens=9) for name in in_flight]
    for request, (tokens, _) in zip(step.rows, in_flight.values(), strict=True):
        request.num_in_flight = tokens
    step.counts = [own for _, own in in_flight.values()]
    step.mark_following()
    assert [list(in_flight)[row] for row in step.following] == ["drafted before", "both"]


def test_plan_is_a_plain_record() -> None:
    bench = Bench()
    bench.add("a", 4)
    plan = bench.plan()
    with pytest.raises(AttributeError):
        plan.step = 3  # type: ignore[misc]
    assert plan._asdict()["counts"] == [4]


def test_scheduler_and_cache_bookkeeping_need_no_torch() -> None:
    code = "import sys, mini_infer.runtime.scheduler.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- prefixes in host memory ----------------------------------------------------------------------------------------


def returning(priority: int = 0, **config) -> tuple[Bench, Request]:
    """A prompt of 12 tokens that was computed and evicted, and that somebody asks for again."""
    bench = Bench(num_blocks=6, max_model_len=24, prefix_caching=True, num_host_blocks=16, host_prefixes=True, **config)
    for first in (0, 100):
        bench.add("before", [first + i for i in range(12 if first == 0 else 20)], max_tokens=1)
        while bench.scheduler.num_unfinished:
            bench.step()
    bench.add("last", [200], max_tokens=1)  # what is left to be saved is
    while bench.scheduler.num_unfinished:
        bench.step()
    bench.transfer_steps = config.get("transfer_steps", 0)
    return bench, bench.add("again", list(range(13)), max_tokens=4, priority=priority)


def test_a_prompt_comes_back_from_host_memory_while_others_go_on() -> None:
    bench, again = returning()
    bench.transfer_steps = 2
    other = bench.add("other", [300, 301], max_tokens=8)
    plan = bench.step()
    assert again.status is RequestStatus.loading
    assert (plan.prefix_hit_tokens, plan.host_hit_tokens) == (12, 12)
    assert plan.num_blocks_moved(to_host=False, of_prefixes=True) == 3
    assert plan.req_indices == [other.req_index]
    while again.status is RequestStatus.loading:
        plan = bench.step()
        assert plan.req_indices == [other.req_index]
    assert again.status is RequestStatus.prefilling
    plan = bench.step()
    assert (plan.starts[-1], plan.counts[-1]) == (12, 1)
    assert again.num_cached_tokens == 12
    while bench.scheduler.num_unfinished:
        bench.step()
    for transfer_id in bench.scheduler.kv.transfers.local:  # of blocks that the last steps have filled
        bench.scheduler.kv.end_transfer(transfer_id)
    assert bench.scheduler.usage().host_blocks_used == 0


def test_one_that_is_loading_alone_is_waited_for() -> None:
    bench, again = returning()
    bench.transfer_steps = 9
    plan = bench.step()
    assert not plan.empty
    assert not plan.req_indices
    assert again.status is RequestStatus.prefilling


def test_what_is_computed_sooner_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, again = returning()
    monkeypatch.setattr(bench.scheduler._loads.costs, "loading_pays", lambda *known: False)
    plan = bench.step()
    assert again.status is RequestStatus.running
    assert plan.counts == [13 - (again.num_cached_tokens or 0)]
    assert plan.host_hit_tokens == 0


@pytest.mark.parametrize("way", ["abort", "failure", "preemption"])
def test_one_that_is_loading_may_go_at_any_moment(way: str) -> None:
    bench, again = returning(1, policy="priority")
    bench.transfer_steps = 3
    other = bench.add("other", [300, 301], max_tokens=12)
    plan = bench.plan()
    assert again.status is RequestStatus.loading
    if way == "abort":
        bench.abort(again)
    elif way == "failure":
        bench.scheduler.fail(plan)
        check_scheduler(bench.scheduler)
        assert again.status is RequestStatus.waiting
        assert other.finished
    if way != "failure":
        bench.book(plan)
    if way == "preemption":
        bench.add("urgent", [400 + i for i in range(17)], max_tokens=1, priority=-1)
        assert again.request_id in bench.step().preempted
        assert again.status is RequestStatus.waiting
    while bench.scheduler.num_unfinished:
        bench.step()
    for transfer_id in bench.scheduler.kv.transfers.local:
        bench.scheduler.kv.end_transfer(transfer_id)
    usage = bench.scheduler.usage()
    assert (usage.used_blocks, usage.host_blocks_used) == (0, 0)
    assert way == "abort" or again.num_output_tokens == 4


def writing() -> tuple[Bench, StepPlan, Transfer, tuple[int, ...]]:
    """A step that begins to write to files: its plan, that transfer, and the ids of the other ones."""
    bench, again = returning(files=FileNames())
    bench.abort(again)
    bench.add("beside", [300], max_tokens=1)
    plan = bench.plan()
    (write,) = [transfer for transfer in plan.transfers if transfer.files]
    return bench, plan, write, tuple(one.transfer_id for one in plan.transfers if one is not write)


def test_what_is_being_written_to_files_is_kept_while_somebody_waits_for_a_load() -> None:
    bench, plan, write, done = writing()
    scheduler = bench.scheduler
    scheduler.update(plan, StepResult([[7]], transfers_done=done), 1.0)
    once_more = bench.add("once more", list(range(13)))
    plan = bench.plan()
    assert not plan.req_indices
    assert once_more.status is RequestStatus.loading
    done = tuple(transfer.transfer_id for transfer in plan.transfers)
    scheduler.update(plan, StepResult([], transfers_done=done), 2.0)
    assert once_more.status is RequestStatus.prefilling
    assert scheduler.kv.transfers.local == [write.transfer_id], "its blocks are still read"
    check_scheduler(scheduler)
    bench.abort(once_more)
    bench.add("later", [400], max_tokens=1)
    scheduler.update(bench.plan(), StepResult([[7]], transfers_done=(write.transfer_id,)), 3.0)
    assert write.transfer_id not in scheduler.kv.transfers


@pytest.mark.parametrize("end", ["named", "alone"])
def test_what_a_failed_step_was_to_write_to_files_is_kept_until_that_has_ended(end: str) -> None:
    """Its threads go on: blocks with other content by then would be in files of the old hashes."""
    bench, plan, write, done = writing()
    scheduler = bench.scheduler
    scheduler.fail(plan)
    bench.add("next", [301], max_tokens=1)
    plan = bench.plan()
    later = tuple(transfer.transfer_id for transfer in plan.transfers)
    scheduler.update(plan, StepResult([[7]], transfers_done=done + later), 1.0)
    once_more = bench.add("once more", list(range(13)))
    plan = bench.plan()
    assert not plan.req_indices
    done = tuple(transfer.transfer_id for transfer in plan.transfers)
    scheduler.update(plan, StepResult([], transfers_done=done), 2.0)
    assert once_more.status is RequestStatus.prefilling
    assert scheduler.kv.transfers.local == [write.transfer_id]
    host = scheduler.kv._host
    free = host.allocate(host.num_free)
    assert free is not None
    assert not {block for block, _ in write.files} & set(free), "nobody else gets them"
    host.release(free)
    if end == "named":
        bench.abort(once_more)
        bench.add("later", [400], max_tokens=1)
        scheduler.update(bench.plan(), StepResult([[7]], transfers_done=(write.transfer_id,)), 3.0)
    else:
        assert scheduler.kv.transfers.ended_by_waiting(write.transfer_id - 1) == []
        assert scheduler.kv.transfers.ended_by_waiting(write.transfer_id) == [write.transfer_id]
        scheduler.kv.end_transfer(write.transfer_id)
    assert write.transfer_id not in scheduler.kv.transfers
