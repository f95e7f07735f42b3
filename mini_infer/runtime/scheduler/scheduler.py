"""The scheduler: which tokens of which requests are computed in the next step.

It counts tokens, not phases. Every request has `num_computed_tokens` chasing `num_tokens`, under one token budget a
step; prefill, chunked prefill, prefix hits, decode and recomputation are all this one chase:

    prefix hit        the counter starts ahead
    chunked prefill   the counter moves by what is left of the budget
    decode            the counter is one behind, and moves by one
    drafts            k of them behind the last token: it moves by 1 + k, and those rejected set it back
    preemption        the counter goes back to zero (recompute), or the blocks move to the host (swap)

    waiting --admit--> prefilling --last prompt token planned--> running --stop--> finished
       ^                |      ^                                    |
       +-- recompute ---+------|------------------------------------+--- swap ---> swapped
                               +-- its blocks are there -- swapping_in <-- room ------+

Blocks move beside the steps. Until the copies have ended a swapped request's device blocks stay taken, and one that is
swapping in is not computed.

Steps may overlap: a plan can be made before the tokens of the plan before it are booked. A request then has a token
in flight, whose place is known though its value is not, and its next token is planned behind it. What a step computed
for a request that has meanwhile ended is dropped when the step is booked. A request with a grammar sits out the steps
before the booking: what may come next depends on the token in flight.

Drafts, and steps that are planned behind drafts in flight, are draft_plan.py's.

A step serves running requests first, so a decode never waits behind a prompt; then prompts in progress, swapped
requests and new ones, in rank order. Where prompts are computed whole, one that is too long to stand beside those that
decode has every other step to itself. Whoever ranks last gives way when blocks run out, unless enough of them are about
to be given back. No tensors here: the same scheduler drives a GPU, the dry model and a simulator.

The rest of it: waiting_line.py has who waits and whose turn it is, planned_step.py a step's rows, booking.py what a
step's tokens do to their requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import TypeAlias

from mini_infer.cache.kv_manager import KVManager, PrefixMatch
from mini_infer.core.config import Batching, Policy, Preemption, SchedulerConfig
from mini_infer.core.plan import Growth, KVUsage, StepPlan, StepResult
from mini_infer.core.request import FinishReason, Request, RequestStatus
from mini_infer.runtime.scheduler.booking import end_of, next_event, take_prompt_logprobs, take_tokens
from mini_infer.runtime.scheduler.planned_step import PlannedStep
from mini_infer.runtime.scheduler.request_queue import Rank
from mini_infer.runtime.scheduler.waiting_line import WaitingLine
from mini_infer.speculative.draft_plan import DraftPlanner
from mini_infer.speculative.speculator import NoSpeculation

FINISHED = RequestStatus.finished  # up to Python 3.11 looking up an Enum's member takes 0.1 us, too long for each row

# A request, its new tokens, and the plan's row they came from: a plain tuple, since a step makes hundreds.
TokenUpdate: TypeAlias = tuple[Request, list[int], int]


class Scheduler:
    """
    Args:
        watermark: share of the pool that admission leaves free, so that running requests can grow for a while
            before somebody has to be preempted.
        proposer: of drafts for running requests.
        follows: as of DraftPlanner.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        watermark: float = 0.01,
        proposer: NoSpeculation | None = None,
        follows: bool = False,
    ) -> None:
        self.config = config
        self.kv = kv
        self._watermark_blocks = int(watermark * kv.num_blocks) if kv.requests_grow else 0
        self._drafts = DraftPlanner(config, kv, proposer or NoSpeculation(), follows, self._watermark_blocks)
        self._by_priority = config.policy is Policy.priority
        self._static = config.batching is Batching.static
        self._requests: dict[Request, None] = {}  # all unfinished ones
        # A static batch computes siblings side by side.
        self._line = WaitingLine(self._rank, self._may_come, siblings_wait=not self._static)
        # The batch, each in rank order: the last one is the first to give way.
        self._prefilling: list[Request] = []
        self._running: list[Request] = []
        self._swapping_in: list[Request] = []
        self._batch = {
            RequestStatus.prefilling: self._prefilling,
            RequestStatus.running: self._running,
            RequestStatus.swapping_in: self._swapping_in,
        }
        self._free_indices = list(range(config.max_num_seqs - 1, -1, -1))
        self._planned: dict[int, PlannedStep] = {}  # planned, and not booked yet
        self._num_added = 0
        self._step = 0
        self._decodes_sat_out = False  # in the step before, for a whole prompt
        self._last_update: float | None = None  # None: there was nothing to do since

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. One with `fork_of` waits until its leader's prompt is computed, to share its blocks."""
        request.order = self._num_added
        self._num_added += 1
        self._requests[request] = None
        self._line.add(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request, wherever it is and at any moment, and gives back all it holds."""
        if request.status is not FINISHED:  # else its last token also completed a stop string
            if request.status in self._batch:
                self._leave_batch(request)
            else:
                self._line.discard(request)
            request.status = FINISHED
            self.kv.free(request)
            del self._requests[request]
            self._drafts.proposer.forget(request)
            self._line.release_siblings(request)
        request.finish_reason, request.stop_reason = reason, stop_reason

    @property
    def num_waiting(self) -> int:
        return len(self._line) - self._line.num_swapped

    @property
    def num_swapped(self) -> int:
        return self._line.num_swapped + len(self._swapping_in)

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    # --- plan a step --------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plans the next step, at time `now`. The plan is empty only when no request is left, or when all that is
        left waits for tokens in flight. One without rows may start transfers, or wait for them."""
        self._step += 1
        step = PlannedStep(self._step, now, self.config.max_num_batched_tokens)
        following = any(in_flight.num_drafts for in_flight in self._planned.values())
        if self._planned and (self._drafts.proposer.waits or (following and not self._can_follow())):
            return step.plan()
        admits = not (self._static and any(self._batch.values()))
        if self._by_priority and admits and not following:
            self._yield_to_priority(step)
        everybody_grew = self._schedule_running(step, most=self._most_decodes(admits))
        admits = admits and everybody_grew  # whoever was just thrown out must not come straight back
        prompts = bool(self._prefilling) or (admits and self._newcomer() is not None)
        self._drafts.add_drafts(step, prompts=prompts)
        if following:
            step.following = [row for row, request in enumerate(step.rows) if request.num_in_flight > 2]
        elif prompts:
            self._schedule_prompts(step, admits)
        idle = not (step.rows or step.transfers or self._planned)
        step.awaits_transfers = idle and bool(self._requests and self.kv.transfers)
        plan = step.plan()
        if not plan.empty:
            self._planned[step.number] = step
        return plan

    def _can_follow(self) -> bool:
        """Whether the next step can be planned behind drafts that nobody has read yet: it takes no prompts."""
        return (
            not self._prefilling
            and self._newcomer() is None
            and not self._victims()
            and self._drafts.can_follow(self._running, self._planned.values())
        )

    def _most_decodes(self, admits: bool) -> int:
        """Running requests that the step may serve: all, unless a prompt that has to be computed whole comes next, and
        fits into no step beside them. Then they sit out every other step, as many as must."""
        if self.config.chunked_prefill:
            return len(self._running)
        request = self._prefilling[0] if self._prefilling else None
        if request is None and admits:
            request = self._newcomer()
        if request is None or self._decodes_sat_out:
            self._decodes_sat_out = False
            return len(self._running)
        num_there = request.num_computed_tokens if request.block_table else self.kv.match_prefix(request).num_tokens
        room = self.config.max_num_batched_tokens - (request.num_tokens - num_there)
        self._decodes_sat_out = room < len(self._running)
        return min(room, len(self._running))

    def _schedule_running(self, step: PlannedStep, most: int) -> bool:
        """One token for each of the `most` first running requests that can have it. False when there were not enough
        blocks for all of them."""
        running = self._running[:most]
        num_preempted = len(step.preempted)
        sit_out: set[Request] = set()
        masked = short = False
        for request in [r for r in running if r.num_tokens + r.num_in_flight > r.grow_after]:
            if request.status is not RequestStatus.running:
                continue  # it has just given way to one before it
            target = request.num_tokens + request.num_in_flight
            waits_for_token = request.constraint is not None and request.num_in_flight > 0
            if target >= request.max_total_tokens or waits_for_token:  # or its last token is in flight
                sit_out.add(request)
            elif not self._grow(request, target, step):
                sit_out.add(request)
                short = True
            masked = masked or request.constraint is not None
        short = short or len(step.preempted) > num_preempted
        if sit_out or short:
            running = [r for r in running if r not in sit_out and r.status is RequestStatus.running]
        step.add_decode_rows(running)
        if masked:
            step.masks = {row: r.constraint.mask for row, r in enumerate(running) if r.constraint is not None}
        return not short

    def _grow(self, request: Request, target: int, step: PlannedStep) -> bool:
        """Gives a running request a block for its next token where it needs one, if others must give way for it. False
        where it waits for blocks that are about to be free, or has given way itself."""
        first = len(request.block_table)
        while (blocks := self.kv.grow(request, target)) is None:
            # Whoever may soon end or not: it counts what is sure to come, so that nobody waits in vain.
            ending = [r for r in self._running if r.num_tokens + r.num_in_flight >= r.max_total_tokens]
            if self.kv.num_free_without(ending) > step.promised:
                step.promised += 1
                return False
            last = max((queue[-1] for queue in self._batch.values() if queue), key=self._rank)
            self._preempt(last, step)  # it ranks behind this request, or is this request
            if last is request:
                return False
        if blocks:
            step.growths.append(Growth(_req_index(request), first, blocks))
        if request.constraint is None:
            capacity = len(request.block_table) * self.kv.block_size
            request.grow_after = min(capacity, request.max_total_tokens - 1)
        return True

    def _schedule_prompts(self, step: PlannedStep, admits: bool) -> None:
        """Prompts in progress and, with `admits`, newcomers: in rank order, as far as the budget goes."""
        place = 0
        while step.budget > 0 or self._static:  # a static batch is admitted now, and computed bit by bit
            current = self._prefilling[place] if place < len(self._prefilling) else None
            head = self._line.head() if admits else None
            if head is not None and (current is None or self._rank(head) < self._rank(current)):
                admits = self._admit(head, step)  # who comes behind one that finds no room waits too
            elif current is None:
                return
            elif self._compute(current, step):
                del self._prefilling[place]
                insort(self._running, current, key=self._rank)
            else:
                place += 1

    def _compute(self, request: Request, step: PlannedStep) -> bool:
        """Adds a prefill row, as far as the budget goes; True when it completes the prompt."""
        needed = request.num_tokens - request.num_computed_tokens
        count = min(needed, step.budget)
        if count == 0 or (count < needed and not self.config.chunked_prefill):
            return False
        step.add_prompt_row(request, count)
        if count == needed:
            request.status = RequestStatus.running
        return count == needed

    # --- admission ------------------------------------------------------------------------------------------------

    def _newcomer(self) -> Request | None:
        """The next in line, if there is room for it now."""
        head = self._line.head()
        return head if head is not None and self.room_for(head) is not None else None

    def room_for(self, request: Request, without: list[Request] | None = None) -> PrefixMatch | None:
        """Whether a request that waits could be admitted: the prefix that it would share, or None. Whoever asks what a
        newcomer may bring (admission, priorities, drafts, steps behind drafts in flight) asks this.

        Args:
            without: what would be if these requests had given way.
        """
        num_ahead = self._line.num_siblings_before(request)
        if len(self._free_indices) + len(without or ()) <= num_ahead:
            return None
        return self.kv.room_for(request, self._keep_free(num_ahead), without)

    def _keep_free(self, num_siblings: int) -> int:
        """Blocks that admission leaves to the running requests and to siblings ahead, each of which needs no block but
        its last. An idle engine can give a request everything."""
        watermark = self._watermark_blocks if any(self._batch.values()) else 0
        return watermark + num_siblings * self.kv.least_blocks

    def _admit(self, request: Request, step: PlannedStep) -> bool:
        """Gives the next in line its place in the batch, if there is room for it."""
        match = self.room_for(request)
        whole = not (self.config.chunked_prefill or self._static)
        if match is None or (whole and request.num_tokens - match.num_tokens > step.budget):
            return False
        self._line.admit_head(request)
        if request.status is RequestStatus.swapped:
            step.transfers.append(self.kv.swap_in(request))
            request.status = RequestStatus.swapping_in
        else:
            self.kv.admit(request, match)
            request.num_computed_tokens = match.num_tokens
            request.status = RequestStatus.prefilling
        if request.num_cached_tokens is None:  # a preempted request that finds its own blocks again is no hit
            request.num_cached_tokens = match.num_tokens
            if self.kv.prefix_caching and request.fork_of is None and request.prompt_logprobs is None:
                step.prefix_queried_tokens += request.num_tokens
                step.prefix_hit_tokens += match.num_tokens
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.now
        request.req_index = self._free_indices.pop()
        insort(self._batch[request.status], request, key=self._rank)
        return True

    def _may_come(self, request: Request) -> bool:
        """One that was preempted while a step of its own was in flight comes back when that step's token is known, and
        one that is on its way to the host when it is there."""
        return not (request.num_in_flight or self.kv.is_under_way(request))

    # --- giving way -----------------------------------------------------------------------------------------------

    def _yield_to_priority(self, step: PlannedStep) -> None:
        """Preempts lower-priority requests for the head of the line, before anything is planned."""
        for victim in self._victims():
            self._preempt(victim, step)

    def _victims(self) -> list[Request]:
        """Requests of lower priority that have to give way, and are enough, for the head of the line to find room."""
        head = self._line.head() if self._by_priority else None
        if head is None or self._newcomer() is not None:
            return []
        lower = [r for queue in self._batch.values() for r in queue if r.priority > head.priority]
        lower.sort(key=self._rank, reverse=True)
        enough = bisect_left(range(len(lower) + 1), True, key=lambda n: self.room_for(head, lower[:n]) is not None)
        return lower[:enough] if enough <= len(lower) else []

    def _preempt(self, request: Request, step: PlannedStep) -> None:
        """Takes a request out of the batch. Its blocks go to the host or, also where swap space is full, are lost."""
        was_swapping_in = request.status is RequestStatus.swapping_in
        self._leave_batch(request)
        step.preempted.append(request.request_id)
        request.num_preemptions += 1
        for in_flight in self._planned.values():
            in_flight.preempted_since.add(request)
        if was_swapping_in:
            self.kv.undo_swap_in(request)
            self._line.push(request, RequestStatus.swapped)
            return
        transfer = self.kv.swap_out(request) if self.config.preemption is Preemption.swap else None
        if transfer is None:
            self._recompute(request)
        else:
            step.transfers.append(transfer)
            self._line.push(request, RequestStatus.swapped)

    def _recompute(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = 0
        self._line.push(request, RequestStatus.waiting)

    def _leave_batch(self, request: Request) -> None:
        self._batch[request.status].remove(request)
        self._free_indices.append(_req_index(request))
        request.req_index, request.is_announced = None, False
        request.grow_after = request.quiet_until = 0

    def _rank(self, request: Request) -> Rank:
        """Who goes first: by priority if so configured, then by arrival. Unique."""
        return (request.priority if self._by_priority else 0, request.order)

    # --- take in a step's tokens ----------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenUpdate]:
        """Books a step's tokens at time `now`, and ends the requests that are done."""
        step = self._planned.pop(plan.step)
        # Whoever collects a step without rows waits for all transfers: those not made by then never will be.
        self._end_transfers(result.transfers_done if plan.req_indices else self.kv.transfers)
        seconds = None if self._last_update is None else now - self._last_update
        self._drafts.proposer.book(step.rows, plan, result, seconds)
        take_prompt_logprobs(step, result)
        updates: list[TokenUpdate] = []
        num_plain = 0 if plan.has_drafts else plan.num_decode_rows
        for row, request, token_ids in zip(range(num_plain), step.rows, result.tokens):  # noqa: B905  # zip is to stop
            if request.status is FINISHED:  # while the step ran
                continue
            (token,) = token_ids
            request.num_in_flight -= 1
            request.token_ids.append(token)
            request.token_times.append(now)
            request.num_tokens = num_tokens = request.num_tokens + 1
            updates.append((request, token_ids, row))
            if num_tokens >= request.quiet_until or token in request.stop_ids:
                self._book(request, num_tokens - 1, end_of(request, token), step)
        for row in range(num_plain, len(step.rows)):
            request, token_ids = step.rows[row], result.tokens[row]
            if request.status is FINISHED:
                continue
            has_drafts = row < plan.num_decode_rows
            reason = None
            if token_ids:
                request.num_in_flight -= plan.counts[row] if has_drafts else 1
                token_ids, reason = take_tokens(request, token_ids, now)
                updates.append((request, token_ids, row))
            if has_drafts and request not in step.preempted_since:
                # What a rejected draft wrote is written over before anybody reads it. Its blocks stay for the next one.
                request.num_computed_tokens = request.num_tokens - 1 + request.num_in_flight
            num_computed = request.num_tokens - 1 if has_drafts else plan.starts[row] + plan.counts[row]
            self._book(request, num_computed, reason, step)
            if token_ids and not has_drafts:
                self._line.release_siblings(request)
        self._last_update = now if self._requests else None
        return updates

    def _end_transfers(self, transfer_ids: Iterable[int]) -> None:
        for transfer_id in transfer_ids:
            request = self.kv.end_transfer(transfer_id)
            if request is not None and request.status is RequestStatus.swapping_in:
                self._swapping_in.remove(request)
                request.status = RequestStatus.prefilling
                insort(self._prefilling, request, key=self._rank)

    def _book(self, request: Request, num_computed: int, reason: FinishReason | None, step: PlannedStep) -> None:
        """After a step: so many of the request's tokens are in the cache, and it may have ended."""
        if request not in step.preempted_since:
            self.kv.commit(request, num_computed)
            request.quiet_until = next_event(request, self.kv.block_size)
        if reason is not None:
            last = request.token_ids[-1]
            self.finish(request, reason, last if last in request.params.stop_token_ids else None)

    def fail(self, plan: StepPlan) -> list[Request]:
        """Gives up a step that did not run to its end. Ends the requests whose KV it would have written, and returns
        them. What it transferred may not have arrived: that is computed again, in other blocks, since the copies may
        still go on."""
        step = self._planned.pop(plan.step)
        ended = [request for request in step.rows if not request.finished]
        for request in ended:
            self.finish(request, FinishReason.error)
        for moved in self.kv.moved_by(step.transfers):
            (self._leave_batch if moved.status in self._batch else self._line.discard)(moved)
            self._recompute(moved)
        return ended

    def drop(self, plan: StepPlan) -> None:
        """Forgets a step that nobody waits for: its requests have all ended. Its transfers may go on: their blocks are
        free when a later step says that they have ended."""
        del self._planned[plan.step]

    # --- observation ----------------------------------------------------------------------------------------------

    def usage(self) -> KVUsage:
        return self.kv.usage(self._running + self._prefilling + self._swapping_in)

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, indices and blocks agree."""
        active = self._running + self._prefilling + self._swapping_in
        for status, queue in self._batch.items():
            assert all(r.status is status for r in queue), f"a request that is not {status.value} is among those"
            assert queue == sorted(queue, key=self._rank), f"those {status.value} are not in rank order"
        req_indices = [_req_index(r) for r in active] + self._free_indices
        assert sorted(req_indices) == list(range(self.config.max_num_seqs)), "a req_index is lost or in two places"
        counts = len(active) + len(self._line)
        assert counts == len(self._requests), f"{len(self._requests)} unfinished requests, but {counts} in the queues"
        for request in self._requests:
            assert request.num_tokens == len(request.token_ids)
            assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
            assert 0 <= request.num_in_flight <= sum(1 + step.num_drafts for step in self._planned.values())
            if request not in active:
                assert not request.block_table, f"{request} holds blocks outside the batch"
        self.kv.check_integrity(active)


def _req_index(request: Request) -> int:
    assert request.req_index is not None
    return request.req_index
