"""Random histories of the scheduler alone, with made-up tokens and under every mechanism: whoever can get on does so
within a bounded number of steps, and nobody loses its place."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from integrity import check_scheduler

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import Layout, SchedulerConfig
from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import FinishReason, Request, RequestStatus, SamplingParams
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.speculative.speculator import NoSpeculation

BLOCK = 4
LONGEST = 120
STOP = 9
ACTIVE = (RequestStatus.running, RequestStatus.prefilling, RequestStatus.loading)


@dataclass(frozen=True)
class Arrival:
    tick: int
    prompt: int
    max_tokens: int
    n: int
    priority: int
    constrained: bool
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    tick=st.integers(0, 30),
    prompt=st.one_of(st.integers(1, 12), st.integers(1, LONGEST - 1)),
    max_tokens=st.integers(1, 30),
    n=st.sampled_from([1, 1, 3]),
    priority=st.integers(0, 2),
    constrained=st.sampled_from([False, False, True]),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
)


@dataclass(frozen=True)
class Machine:
    max_num_seqs: int
    spare_tokens: int  # of the budget, beside a token a running request
    spare_blocks: int  # of the pool, beside the longest request's
    watermark: float
    layout: str
    prefix_caching: bool
    priority: bool
    overlap: bool
    transfer_steps: int
    host_blocks: int
    drafts: int
    on_device: bool  # the drafts are made there, and steps follow them unread
    seed: int


machines = st.builds(
    Machine,
    max_num_seqs=st.integers(1, 5),
    spare_tokens=st.integers(1, 12),
    spare_blocks=st.integers(0, 20),
    watermark=st.sampled_from([0.0, 0.1]),
    layout=st.sampled_from(["paged", "paged", "contiguous"]),
    prefix_caching=st.booleans(),
    priority=st.booleans(),
    overlap=st.sampled_from([True, True, False]),
    transfer_steps=st.integers(0, 3),
    host_blocks=st.integers(1, 60),
    drafts=st.sampled_from([0, 0, 3]),
    on_device=st.booleans(),
    seed=st.integers(0, 2**16),
)


class Anything:
    """A grammar that allows every token."""

    mask = b""

    def accept(self, token_id: int) -> FinishReason | None:
        return None

    def is_end(self, token_id: int) -> bool:
        return False


class SomeDrafts(NoSpeculation):
    def __init__(self, machine: Machine, chance: random.Random) -> None:
        self.most, self.needs_tokens, self._chance = machine.drafts, not machine.on_device, chance

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return bool(self.most) and self.needs_tokens and self._chance.random() < 0.5

    def plan(self, requests: Sequence[Request], prompts: bool = False) -> dict[int, Draft]:
        lengths = [0 if r.constraint is not None else self._chance.randint(0, self.most) for r in requests]
        return {place: Draft(length) for place, length in enumerate(lengths) if length}


class History:
    """An engine without a model, and how long each request has waited without a reason."""

    def __init__(self, machine: Machine, **config: object) -> None:
        self.machine = machine
        self.chance = random.Random(machine.seed)
        budget = machine.max_num_seqs + machine.spare_tokens
        if not config["chunked_prefill"]:
            budget = LONGEST
        self.config = SchedulerConfig(
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=budget,
            policy="priority" if machine.priority else "fcfs",  # type: ignore[arg-type]
            **config,  # type: ignore[arg-type]
        )
        self.kv = KVManager(
            LONGEST // BLOCK + machine.spare_blocks,
            BLOCK,
            LONGEST,
            layout=Layout(machine.layout),
            prefix_caching=machine.prefix_caching,
            num_host_blocks=machine.host_blocks if config["preemption"] == "swap" else 0,
        )
        drafts = SomeDrafts(machine, self.chance)
        self.scheduler = Scheduler(self.config, self.kv, machine.watermark, drafts, follows=machine.on_device)
        self.in_flight: deque[StepPlan] = deque()
        self.transfers: dict[int, int] = {}  # by id: how many steps until they have ended
        self.requests: list[Request] = []
        self.waited: Counter[Request] = Counter()
        self.first_waited = 0

    def add(self, number: int, arrival: Arrival) -> None:
        leader = None
        for index in range(arrival.n):
            request = Request(
                f"r{number}#{index}",
                [number % 2] * arrival.prompt,  # half of them share a prefix
                SamplingParams(stop_token_ids=(STOP,)),
                max_total_tokens=min(arrival.prompt + arrival.max_tokens, LONGEST),
                priority=arrival.priority,
                fork_of=leader,
                constraint=Anything() if arrival.constrained else None,
            )
            leader = leader or request
            self.scheduler.add(request)
            self.requests.append(request)

    def abort(self, number: int) -> None:
        for request in self.requests:
            if request.request_id.startswith(f"r{number}#") and not request.finished:
                self.scheduler.finish(request, FinishReason.abort)

    def tick(self) -> None:
        """As EngineCore.step."""
        before = {request: request.status for request in self.requests if not request.finished}
        plan = self.scheduler.schedule()
        check_scheduler(self.scheduler)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        now_in = {request for request in before if before[request] not in ACTIVE and request.status in ACTIVE}
        self.check_places(now_in)
        self.count_waiting(plan, before, now_in)
        if not plan.empty:
            self.in_flight.append(plan)
        if len(self.in_flight) > (self.machine.overlap and not plan.empty):
            booked = self.in_flight.popleft()
            self.scheduler.update(booked, self.result(booked), 0.0)
            check_scheduler(self.scheduler)
        elif plan.empty:
            assert not self.scheduler.num_unfinished, "nothing is planned, and nothing is in flight"

    def result(self, plan: StepPlan) -> StepResult:
        tokens = []
        for row, samples in enumerate(plan.samples):
            count = self.chance.randint(1, 1 + plan.drafts_of(row)) if samples else 0
            tokens.append([STOP if self.chance.random() < 0.03 else 7 for _ in range(count)])
        for under_way in (plan, *self.in_flight):
            for transfer in under_way.transfers:
                self.transfers.setdefault(transfer.transfer_id, self.machine.transfer_steps)
        done = [i for i, left in self.transfers.items() if left == 0 or (left > 0 and not plan.req_indices)]
        self.transfers = {i: -1 if i in done else max(left - 1, -1) for i, left in self.transfers.items()}
        return StepResult(tokens, transfers_done=tuple(done))

    # --- what is expected -----------------------------------------------------------------------------------------

    def rank(self, request: Request) -> tuple[float, int]:
        return (request.priority if self.machine.priority else 0, request.rank[1])

    def patience(self, first: bool) -> int:
        """Steps that somebody may be held up by tokens in flight, by a long prompt, and by blocks on their way. Of
        those who are first neither to run nor to come in, each may wait for one before it that takes the blocks."""
        steps = 6 + 2 * self.machine.transfer_steps
        return steps if first else steps * self.machine.max_num_seqs

    def siblings_ahead(self, rank: tuple[float, int]) -> int:
        """Siblings that wait for the prompt of a leader in the batch."""
        return sum(
            leader is not None
            and request.status is RequestStatus.waiting
            and request.first_scheduled_time is None
            and leader.first_scheduled_time is not None
            and not leader.finished
            and leader.num_output_tokens == 0
            and self.rank(request) < rank
            for request in self.requests
            for leader in [request.fork_of]
        )

    def check_places(self, admitted: set[Request]) -> None:
        if self.config.batching == "static":
            return
        for request in admitted:
            ahead = self.siblings_ahead(self.rank(request))
            assert len(self.scheduler.batch.free_indices) >= ahead, f"{request} has taken a sibling's place"
            assert self.kv.num_free >= ahead * self.kv.least_blocks, f"{request} has taken a sibling's block"

    def fits(self, request: Request, active: list[Request]) -> bool:
        """Whether the first in line has room, if all that rank lower by priority give way, and all blocks that move
        have arrived. Of blocks that it could share it knows nothing."""
        lower = [r for r in active if self.machine.priority and r.priority > request.priority]
        others = {block for r in active if r not in lower for block in r.block_table}
        gained = {block for r in lower for block in r.block_table} - others
        ahead = self.siblings_ahead(self.rank(request))
        grows = self.kv.least_blocks == 1
        needed = -(-request.num_tokens // BLOCK) if grows else self.kv.least_blocks
        watermark = int(self.machine.watermark * self.kv.num_blocks) if grows and active else 0
        free = self.kv.num_free + len(gained) - ahead * self.kv.least_blocks - watermark
        return len(active) - len(lower) + ahead < self.config.max_num_seqs and needed <= free

    def count_waiting(self, plan: StepPlan, before: dict[Request, RequestStatus], admitted: set[Request]) -> None:
        unfinished = sorted(before, key=self.rank)
        active = [r for r in unfinished if r.status in ACTIVE]
        computed = {r for r in active if r.req_index in plan.req_indices} | admitted
        prompts = [r for r in active if r.status is RequestStatus.prefilling]
        moving = {r for r in active if r.status is not RequestStatus.prefilling} | set(prompts[:1])
        line = [r for r in unfinished if r.status not in ACTIVE and (r.fork_of is None or self.leader_is_done(r))]
        open_batch = self.config.batching == "continuous" or not active
        ahead = prompts and line and self.rank(prompts[0]) < self.rank(line[0])
        if line and open_batch and not ahead and self.fits(line[0], active):
            moving.add(line[0])
        for request in unfinished:
            self.waited[request] = 0 if request in computed or request not in moving else self.waited[request] + 1
            bound = self.patience(first=request in (unfinished[0], *line[:1]))
            assert self.waited[request] <= bound, f"{request} has waited {self.waited[request]} steps"

    def leader_is_done(self, request: Request) -> bool:
        leader = request.fork_of
        assert leader is not None
        return leader.finished or leader.num_output_tokens > 0 or request.first_scheduled_time is not None


CROWDED = Machine(
    max_num_seqs=2,
    spare_tokens=2,
    spare_blocks=2,
    watermark=0.0,
    layout="paged",
    prefix_caching=False,
    priority=False,
    overlap=True,
    transfer_steps=3,
    host_blocks=60,
    drafts=0,
    on_device=False,
    seed=0,
)
SHORT_AND_LONG = [
    Arrival(tick, prompt, 30, n=1, priority=0, constrained=False, abort_after=None)
    for tick, prompt in ((0, 7), (0, 7), (1, 119))
]


@pytest.mark.parametrize(
    ("batching", "chunked", "preemption"),
    list(itertools.product(["continuous", "static"], [True, False], ["recompute", "swap"])),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@example(machine=CROWDED, traffic=SHORT_AND_LONG[1:])  # the long prompt fills the pool for many steps
@example(machine=replace(CROWDED, max_num_seqs=3, spare_blocks=20), traffic=SHORT_AND_LONG)  # or leaves no budget
@given(machine=machines, traffic=st.lists(arrivals, min_size=1, max_size=10))
def test_whoever_can_get_on_does(
    batching: str, chunked: bool, preemption: str, machine: Machine, traffic: list[Arrival]
) -> None:
    history = History(machine, batching=batching, chunked_prefill=chunked, preemption=preemption)
    for tick in itertools.count():
        for number, arrival in enumerate(traffic):
            if tick == arrival.tick:
                history.add(number, arrival)
            if arrival.abort_after is not None and tick == arrival.tick + arrival.abort_after:
                history.abort(number)
        history.tick()
        if tick > 50 and not history.scheduler.num_unfinished:
            break
        assert tick < 5000, "it never ends"
    assert all(request.finished for request in history.requests)
