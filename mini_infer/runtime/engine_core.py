"""EngineCore: the loop schedule -> launch -> collect -> update -> observe.

It knows a scheduler, an executor and a clock: no tensors, no text, no API. So the same loop drives a GPU, several, the
dry model and a simulated clock. With an executor that overlaps, what is collected is not the step just launched but the
one before it: the device computes a step while the host books the last one and plans the next one.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from mini_infer.core.plan import KVUsage, StepPlan, StepRecord, StepResult, count_drafts
from mini_infer.core.request import FinishReason, Request, RequestStatus
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.scheduler.planned_step import Ending, TokenUpdate
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.transfer.protocol import NoReceiver

if TYPE_CHECKING:  # the loop knows no text
    from mini_infer.runtime.text.output import OutputProcessor

NO_USAGE = KVUsage(0, 0, 0, 0, 0, 0)  # where nobody reads it
_row_of = itemgetter(2)  # of a TokenUpdate


class EngineCore:
    def __init__(
        self,
        make_scheduler: Callable[
            [], Scheduler
        ],  # without requests; asked again after an error in the bookkeeping itself
        executor: Executor,
        clock: Callable[[], float],  # as LLMEngine's, like records_kept
        outputs: OutputProcessor,  # takes in what steps bring, and says which requests end by what their tokens mean
        records_kept: int,
        receiver: NoReceiver | None = None,  # of prompts that other engines compute
    ) -> None:
        self.receiver = receiver or NoReceiver()
        self.waits = False  # there is nothing to do before something comes from outside: a request, or KV
        self.scheduler = make_scheduler()
        self.executor = executor
        self.clock = clock
        self.records: deque[StepRecord] = deque(maxlen=records_kept)
        self.observers: list[Callable[[StepRecord], None]] = []  # each is called with every StepRecord
        self._make_scheduler = make_scheduler
        self._outputs = outputs
        self._in_flight: deque[_InFlightStep] = deque()  # oldest first; with overlap or stages some stay
        self._ended: list[Request] = []  # aborted or failed since the last StepRecord
        self._unlaunched: list[_InFlightStep] = []  # since then: computed nothing, and yet did something
        self._start = 0.0  # of the first step since the last StepRecord
        self._seconds = [0.0, 0.0, 0.0]  # that the host has scheduled, executed and updated since then

    def abort(self, requests: Sequence[Request]) -> None:
        """Ends requests at any moment. Their end is posted by `post_ended`."""
        for request in requests:
            self.scheduler.finish(request, FinishReason.abort)
        self.scheduler.exchange()

    def post_ended(self, requests: Sequence[Request]) -> None:
        """Tells of requests that ended outside a step, here and in the next StepRecord."""
        self._ended += requests
        self._outputs.post(requests)

    def reset(self) -> None:
        """Forgets all KV, as after a use of the executor that wrote where it pleased. RuntimeError where requests are
        unfinished."""
        self.require_idle()
        self._end_transfers()
        self.scheduler = self._make_scheduler()

    def require_idle(self) -> None:
        """Raises RuntimeError where requests are unfinished; nothing is in flight afterwards."""
        if self.scheduler.num_unfinished:
            raise RuntimeError("the engine has unfinished requests: this is possible only while it has none")
        self.drop_in_flight()

    def drop_in_flight(self) -> None:
        """What is still under way computes tokens for requests that have ended meanwhile. Nobody waits for them, unless
        another engine may be the next to write to their blocks: no stream puts that behind these steps."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if self.receiver.choice is None:
                self.scheduler.drop(step.plan)
                continue
            try:
                result = self.executor.collect(step.handle)
            except BaseException:
                self.scheduler.fail(step.plan)
                raise
            self.scheduler.update(step.plan, result, self.clock())

    def step(self) -> None:
        """Runs one step. An error of the executor ends the requests of its plan and is raised; one in the bookkeeping
        ends all of them."""
        start = self.clock()
        executing: StepPlan | None = None  # what the executor is at
        try:
            evictions = self.scheduler.kv.num_evictions
            plan = self.scheduler.schedule(start)
            kv = self.scheduler.usage() if self._observed else NO_USAGE
            evictions = self.scheduler.kv.num_evictions - evictions
            planned, empty = self.clock(), plan.empty
            if not empty:
                executing = plan
                self._in_flight.append(_InFlightStep(plan, self.executor.launch(plan), kv, evictions))
                executing = None
            # Steps that wait for the one after them, unless there is none.
            waiting = 0 if empty else self.executor.stages - 1 + self.executor.overlap
            step = self._in_flight.popleft() if len(self._in_flight) > waiting else None
            executing = step.plan if step else None
            result = self.executor.collect(step.handle) if step else StepResult([])
            executing, executed = None, self.clock()
            updates = self.scheduler.update(step.plan, result, executed) if step else []
            endings = self._outputs.process(updates, result)
            for ending in endings:
                self.scheduler.finish(*ending[:3])
            self._outputs.post([request for request, _, _ in updates])
        except BaseException:
            if executing is None:
                self._start_over()
            else:
                # Only the KV of its requests is unknown now: blocks become shareable once their step is booked.
                self.post_ended(self.scheduler.fail(executing))
            raise
        if not self.scheduler.num_unfinished:
            self.drop_in_flight()
        self.waits = empty and step is None and not self._in_flight
        end = self.clock()
        seconds = self._seconds
        if not any(seconds):
            self._start = start
        seconds[0] += planned - start
        seconds[1] += executed - planned
        seconds[2] += end - executed
        if empty and (plan.preempted or plan.prefix_queried_tokens):
            self._unlaunched.append(_InFlightStep(plan, None, kv, evictions))
        if step or self._ended:
            # Where nothing was read, what was just launched is told of when it is.
            self._observe(step or _InFlightStep(StepPlan(plan.step), None, kv, 0), result, updates, endings, end)

    @property
    def _observed(self) -> bool:
        """Whether anybody would read a StepRecord."""
        return bool(self.observers or self.records.maxlen)

    def _start_over(self) -> None:
        """After an error or an interrupt in the bookkeeping itself nothing in it can be trusted."""
        lost = self._outputs.unfinished()
        for request in lost:
            request.status, request.finish_reason = RequestStatus.finished, FinishReason.error
        with contextlib.suppress(Exception):  # the executor may be what has failed
            self._end_transfers()
        self.scheduler = self._make_scheduler()
        self._in_flight.clear()
        self.post_ended(lost)

    def _end_transfers(self) -> None:
        """Before blocks are given to others by somebody who knows of no copies: those under way end with a step that
        has no rows, those from other engines when these say so."""
        self.receiver.abandon()
        for _ in range(2):  # copies, and then what is written to files
            self.executor.collect(self.executor.launch(StepPlan(0)))

    def _observe(
        self,
        step: _InFlightStep,
        result: StepResult,
        updates: Sequence[TokenUpdate],
        endings: Sequence[Ending],
        end: float,
    ) -> None:
        (schedule_s, execute_s, update_s), self._seconds = self._seconds, [0.0, 0.0, 0.0]
        ended, self._ended = self._ended, []
        unlaunched, self._unlaunched = self._unlaunched, []
        if not self._observed:
            return
        plan, scheduler = step.plan, self.scheduler
        told = [*unlaunched, step]
        drafted, accepted = ((), ()) if step.handle is None else count_drafts(plan, result)
        decode_tokens = bisect_left(updates, plan.num_decode_rows, key=_row_of)  # updates are in the order of rows
        reach, context, pairs = plan.prompt_attention
        num_dropped = sum(ending.num_dropped for ending in endings)
        in_step = [request for request, _, _ in updates if request.finish_reason is not None]
        by_text = [r for r in in_step if r.finish_reason is FinishReason.error]
        record = StepRecord(
            step=plan.step,
            start_time=self._start,
            end_time=end,
            schedule_s=schedule_s,
            execute_s=execute_s,
            update_s=update_s,
            prefill_tokens=plan.num_prefill_tokens,
            decode_tokens=decode_tokens,
            sampled_tokens=sum([len(token_ids) for _, token_ids, _ in updates]) - num_dropped,
            num_running=scheduler.num_running,
            num_prefilling=scheduler.num_prefilling,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            kv=step.kv,
            prefix_queried_tokens=sum(each.plan.prefix_queried_tokens for each in told),
            prefix_hit_tokens=sum(each.plan.prefix_hit_tokens for each in told),
            evictions=sum(each.evictions for each in told),
            preempted=tuple(name for each in told for name in each.plan.preempted),
            swapped_out_blocks=plan.num_blocks_moved(to_host=True, of_prefixes=False),
            swapped_in_blocks=plan.num_blocks_moved(to_host=False, of_prefixes=False),
            finished=_names(r for r in in_step if r.finish_reason is not FinishReason.error),
            aborted=_names(r for r in ended if r.finish_reason is FinishReason.abort),
            failed=_names(r for r in [*ended, *by_text] if r.finish_reason is FinishReason.error),
            drafted=drafted,
            accepted=accepted,
            draft_s=result.draft_s,
            dropped_rows=plan.num_decode_rows - decode_tokens,
            expert_tokens=result.expert_tokens,
            rank_tokens=result.rank_tokens,
            expert_traffic=result.expert_traffic,
            decode_context=plan.decode_context,
            prompt_reach=reach,
            prompt_context=context,
            prompt_pairs=pairs,
            host_hit_tokens=plan.host_hit_tokens,
            disk_hit_tokens=plan.disk_hit_tokens,
            saved_blocks=plan.num_blocks_moved(to_host=True, of_prefixes=True),
            loaded_blocks=plan.num_blocks_moved(to_host=False, of_prefixes=True),
            written_blocks=plan.num_files(written=True),
            read_blocks=plan.num_files(written=False),
            lost_blocks=sum(map(len, result.failed.values())),
        )
        self.records.append(record)
        for observer in self.observers:
            observer(record)


class _InFlightStep(NamedTuple):
    """A step that was launched and is not booked yet."""

    plan: StepPlan
    handle: Any  # the executor's; None: it has no rows
    kv: KVUsage
    evictions: int


def _names(requests: Iterable[Request]) -> tuple[str, ...]:
    return tuple(request.request_id for request in requests)
