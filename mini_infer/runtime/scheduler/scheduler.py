"""The scheduler: which tokens of which requests are computed in the next step.

It counts tokens, not phases. Every request has `num_computed_tokens` chasing `num_tokens`, under one token budget a
step; prefill, chunked prefill, prefix hits, decode and recomputation are all this one chase:

    prefix hit        the counter starts ahead
    chunked prefill   the counter moves by what is left of the budget
    decode            the counter is one behind, and moves by one
    drafts            k of them behind the last token: it moves by 1 + k, and those rejected set it back
    preemption        the counter goes back to zero (recompute), or the blocks move to the host (swap)

    waiting --admit--> prefilling --last prompt token planned--> running --stop--> finished
       ^                   |                                      |
       +---- recompute ----+--------------------------------------+---- swap ----> swapped --room--> (back)

Steps may overlap: a plan can be made before the tokens of the plan before it are booked. A request then has a token
in flight, whose place is known though its value is not, and its next token is planned behind it. What a step computed
for a request that has meanwhile ended is dropped when the step is booked. A request with a grammar sits out the steps
before the booking: what may come next depends on the token in flight.

Drafts, and steps that are planned behind drafts in flight, are draft_plan.py's.

A step serves running requests first, so a decode never waits behind a prompt; then prompts in progress, then
swapped requests, then new ones. Whoever ranks last gives way when blocks run out. No tensors here: the same
scheduler drives a GPU, the dry model and a simulator.
"""

from __future__ import annotations

from bisect import insort
from typing import TypeAlias

from mini_infer.cache.kv_manager import NO_MATCH, KVManager
from mini_infer.core.config import Batching, Policy, Preemption, SchedulerConfig
from mini_infer.core.plan import Admission, Growth, KVUsage, PromptLogprobs, StepPlan, StepResult
from mini_infer.core.request import FinishReason, Request, RequestStatus
from mini_infer.runtime.scheduler.planned_step import PlannedStep
from mini_infer.runtime.scheduler.request_queue import Rank, RequestQueue
from mini_infer.speculative.draft_plan import DraftPlanner
from mini_infer.speculative.speculator import NoSpeculation, Speculator

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
        proposer: Speculator | NoSpeculation | None = None,
        follows: bool = False,
    ) -> None:
        self.config = config
        self.kv = kv
        self._watermark_blocks = int(watermark * kv.num_blocks) if kv.requests_grow else 0
        self._drafts = DraftPlanner(config, kv, proposer or NoSpeculation(), follows, self._watermark_blocks)
        self._by_priority = config.policy is Policy.priority
        self._requests: dict[Request, None] = {}  # all unfinished ones
        self._waiting = RequestQueue(RequestStatus.waiting)
        self._swapped = RequestQueue(RequestStatus.swapped)
        self._prefilling: list[Request] = []  # in rank order, as is _running: the last one is the first to give way
        self._running: list[Request] = []
        self._siblings: dict[Request, list[Request]] = {}  # n > 1: those that wait for their leader's prompt
        self._num_siblings = 0
        self._free_indices = list(range(config.max_num_seqs - 1, -1, -1))
        self._planned: dict[int, PlannedStep] = {}  # planned, and not booked yet
        self._num_added = 0
        self._step = 0
        self._last_update: float | None = None  # None: there was nothing to do since

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. One with `fork_of` waits until its leader's prompt is computed, to share its blocks."""
        request.order = self._num_added
        self._num_added += 1
        self._requests[request] = None
        leader = request.fork_of
        # A static batch computes them side by side instead: who waits for the leader would miss its batch.
        static = self.config.batching is Batching.static
        if leader is not None and not static and leader.status in (RequestStatus.waiting, RequestStatus.prefilling):
            self._siblings.setdefault(leader, []).append(request)
            self._num_siblings += 1
        else:
            self._waiting.push(self._rank(request), request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request, wherever it is and at any moment, and gives back all it holds."""
        if request.status is RequestStatus.finished:  # its last token also completed a stop string
            request.finish_reason, request.stop_reason = reason, stop_reason
            return
        if request.status is RequestStatus.waiting:
            siblings = self._siblings.get(request.fork_of, []) if request.fork_of is not None else []
            if request in siblings:
                siblings.remove(request)
                self._num_siblings -= 1
            else:
                self._waiting.discard(request)
        elif request.status is RequestStatus.swapped:
            self._swapped.discard(request)
        elif request.status is RequestStatus.prefilling:
            self._prefilling.remove(request)
        elif request.status is RequestStatus.running:
            self._running.remove(request)
        self._release(request, reason, stop_reason)
        self._queue_siblings(request)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_siblings

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

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
        left waits for tokens in flight."""
        self._step += 1
        step = PlannedStep(now, self.config)
        following = any(under_way.num_drafts for under_way in self._planned.values())
        if self._planned and (self._drafts.proposer.waits or (following and not self._can_follow())):
            return step.plan(self._step)
        batch_is_open = self.config.batching is Batching.continuous or not (self._running or self._prefilling)

        if self._by_priority and batch_is_open and not following:
            self._yield_to_priority(step)
        everybody_grew = self._schedule_running(step)
        if following:
            step.following = [row for row, (request, _) in enumerate(step.rows) if request.num_in_flight > 2]
        prompts = bool(self._prefilling) or (batch_is_open and everybody_grew and self._could_admit())
        whole_prompts = not self.config.chunked_prefill and bool(self._prefilling or self._next_in_line())
        self._drafts.add_drafts(step, prompts=prompts, whole_prompts=whole_prompts)
        if not following:
            # Whoever was just thrown out must not come straight back.
            self._schedule_prompts(step, admit=batch_is_open and everybody_grew)

        if step.rows or step.swap_out:
            self._planned[self._step] = step
        return step.plan(self._step)

    def _can_follow(self) -> bool:
        """Whether the next step can be planned behind drafts that nobody has read yet: it takes no prompts."""
        return (
            not self._prefilling
            and not self._could_admit()
            and not (self._by_priority and self._next_in_line() is not None)
            and self._drafts.can_follow(self._running, self._planned.values())
        )

    def _schedule_running(self, step: PlannedStep) -> bool:
        """One token for each running request. False when some had to be preempted to make room for others."""
        running, block_size, grow = self._running, self.kv.block_size, self.kv.grow
        req_indices, starts, rows = step.req_indices, step.starts, step.rows
        everybody_grew = True
        index = 0
        while index < len(running):
            request = running[index]
            target = request.num_tokens + request.num_in_flight
            if target >= request.max_total_tokens:  # its last token is in flight
                index += 1
                continue
            constraint = request.constraint
            if constraint is not None and request.num_in_flight:
                index += 1
                continue
            table = request.block_table
            if target > len(table) * block_size:
                first = len(table)
                blocks = grow(request, target)
                if blocks is None and not req_indices and self._planned and not step.preempted:
                    everybody_grew = False  # the step under way may free some: let it be booked first
                    break
                if blocks is None:
                    # It ranks behind this request, or is this request: never one that is in the step already.
                    self._preempt(self._last_ranked(), step)
                    everybody_grew = False
                    continue
                step.growths.append(Growth(_req_index(request), first, blocks))
            if constraint is not None:
                step.masks[len(req_indices)] = constraint.mask
            req_indices.append(request.req_index)  # type: ignore[arg-type]  # a running request has one; no call in this loop
            starts.append(request.num_computed_tokens)
            rows.append((request, request.num_preemptions))
            request.num_computed_tokens += 1
            request.num_in_flight += 1
            index += 1
        step.num_decode_rows = len(req_indices)
        step.counts = [1] * len(req_indices)
        step.samples = [True] * len(req_indices)
        if self.config.chunked_prefill:  # a whole prompt needs the whole budget, or it would never be admitted
            step.budget -= len(req_indices)
        return everybody_grew

    def _schedule_prompts(self, step: PlannedStep, admit: bool) -> None:
        """Prompts in progress and, with `admit`, newcomers: in rank order, as far as the budget goes."""
        static = self.config.batching is Batching.static  # admits its whole batch now, and computes it bit by bit
        in_progress = iter(self._prefilling.copy())
        current = next(in_progress, None)
        while step.budget > 0 or static:
            newcomer = self._next_in_line() if admit and self._free_indices else None
            if newcomer is not None and (current is None or self._rank(newcomer) < self._rank(current)):
                admit = self._take_in(newcomer, step)  # who comes behind one that finds no room waits too
            elif current is not None:
                if self._compute(current, step):
                    self._prefilling.remove(current)
                current = next(in_progress, None)
            else:
                return

    def _take_in(self, request: Request, step: PlannedStep) -> bool:
        if request.status is RequestStatus.swapped:
            admitted = self._swap_in(request, step)
        else:
            admitted = self._admit(request, step)
        if admitted:
            self._enter_batch(request, step)
        return admitted

    def _could_admit(self) -> bool:
        """Whether somebody waits who may find room."""
        return bool(self._free_indices) and self._next_in_line() is not None

    def _next_in_line(self) -> Request | None:
        heads = [head for head in (self._swapped.peek(), self._waiting.peek()) if head is not None]
        head = min(heads, key=self._rank, default=None)
        # One that was preempted while a step of its own was under way comes back when that step's token is known.
        return None if head is not None and head.num_in_flight else head

    def _swap_in(self, request: Request, step: PlannedStep) -> bool:
        pairs = self.kv.swap_in(request, self._keep_free())
        if pairs is None:
            return False
        self._swapped.pop()
        step.swap_in += pairs
        return True

    def _admit(self, request: Request, step: PlannedStep) -> bool:
        match = self.kv.match_prefix(request)
        whole = self.config.batching is Batching.continuous and not self.config.chunked_prefill
        if whole and request.num_tokens - match.num_tokens > step.budget:
            return False
        if not self.kv.admit(request, match, self._keep_free()):
            return False
        self._waiting.pop()
        request.num_computed_tokens = match.num_tokens
        if request.num_cached_tokens is None:  # a preempted request that finds its own blocks again is no hit
            request.num_cached_tokens = match.num_tokens
            if self.kv.prefix_caching and request.fork_of is None and request.prompt_logprobs is None:
                step.prefix_queried_tokens += request.num_tokens
                step.prefix_hit_tokens += match.num_tokens
        return True

    def _enter_batch(self, request: Request, step: PlannedStep) -> None:
        """Gives an admitted request its slot and computes what the budget allows."""
        request.req_index = self._free_indices.pop()
        step.entered.append(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.now
        step.admissions.append(
            Admission(
                request.req_index,
                request.request_id,
                request.token_ids.copy(),
                request.prompt_len,
                request.block_table.copy(),
                request.params,
                request.seed,
                request.stop_ids,
            )
        )
        request.status = RequestStatus.prefilling
        if not self._compute(request, step):
            insort(self._prefilling, request, key=self._rank)

    def _compute(self, request: Request, step: PlannedStep) -> bool:
        """Adds a prefill row, as far as the budget goes; True when it completes the prompt."""
        start = request.num_computed_tokens
        needed = request.num_tokens - start
        count = min(needed, step.budget)
        if count == 0 or (count < needed and not self.config.chunked_prefill):
            return False
        request.num_computed_tokens = start + count
        step.budget -= count
        row = len(step.req_indices)
        if request.prompt_logprobs is not None and start + 1 < request.prompt_len:
            step.prompt_logprobs.append(
                PromptLogprobs(row, min(count, request.prompt_len - 1 - start), request.params.prompt_logprobs or 0)
            )
        if request.constraint is not None and count == needed:
            step.masks[row] = request.constraint.mask
        step.req_indices.append(_req_index(request))
        step.starts.append(start)
        step.counts.append(count)
        step.samples.append(count == needed)
        step.rows.append((request, request.num_preemptions))
        if count < needed:
            return False
        request.num_in_flight += 1
        request.status = RequestStatus.running
        insort(self._running, request, key=self._rank)
        return True

    # --- giving way -----------------------------------------------------------------------------------------------

    def _yield_to_priority(self, step: PlannedStep) -> None:
        """Preempts lower-priority requests for the head of the line, before anything is planned. Nobody gives way
        where that would not be enough."""
        head = self._next_in_line()
        if head is None:
            return
        lower = [r for r in self._running + self._prefilling if r.priority > head.priority]
        match = self.kv.match_prefix(head) if lower and head.status is RequestStatus.waiting else NO_MATCH
        to_gain = sum(len(r.block_table) for r in lower)
        if not lower or not self.kv.can_admit(head, match, self._keep_free() - to_gain):
            return
        while lower and not (self._free_indices and self.kv.can_admit(head, match, self._keep_free())):
            last = max(lower, key=self._rank)
            lower.remove(last)
            self._preempt(last, step)

    def _preempt(self, request: Request, step: PlannedStep) -> None:
        """Takes out the last-ranked request of its queue."""
        queue = self._running if request.status is RequestStatus.running else self._prefilling
        queue.remove(request)
        step.preempted.append(request.request_id)
        request.num_preemptions += 1
        self._free_indices.append(_req_index(request))
        request.req_index = None
        if self.config.preemption is Preemption.swap:
            pairs = self.kv.swap_out(request)
            if pairs is not None:
                step.swap_out += pairs
                step.swapped_out.append(request)
                self._swapped.push(self._rank(request), request)
                return
        self._recompute(request)  # also where the swap space is full

    def _recompute(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = 0
        self._waiting.push(self._rank(request), request)

    def _last_ranked(self) -> Request:
        return max((queue[-1] for queue in (self._running, self._prefilling) if queue), key=self._rank)

    def _rank(self, request: Request) -> Rank:
        """Who goes first: by priority if so configured, then by arrival. Unique."""
        return (request.priority if self._by_priority else 0, request.order)

    def _keep_free(self) -> int:
        """Blocks that admission leaves to the running requests; an idle engine can give a request everything."""
        return self._watermark_blocks if self._running or self._prefilling else 0

    # --- take in a step's tokens ----------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenUpdate]:
        """Books a step's tokens at time `now`, and ends the requests that are done."""
        updates = []
        commit, block_size = self.kv.commit, self.kv.block_size
        num_finished = 0
        planned = self._planned.pop(plan.step).rows
        requests = [request for request, _ in planned]
        self._drafts.proposer.book(
            requests, plan, result, None if self._last_update is None else now - self._last_update
        )
        num_verified = plan.num_decode_rows if plan.has_drafts else 0
        for row, entries in result.prompt_logprobs.items():
            request = planned[row][0]
            assert request.prompt_logprobs is not None
            known = len(request.prompt_logprobs) - (plan.starts[row] + 1)  # more than none after a preemption
            request.prompt_logprobs += entries[known:]
        rows = zip(planned, plan.starts, plan.counts, result.tokens, strict=True)
        for row, ((request, num_preemptions), start, count, token_ids) in enumerate(rows):
            if request.status is FINISHED:  # while the step ran
                continue
            verified = row < num_verified
            if (
                not verified
                and (start + count) // block_size > request.num_committed_blocks
                and request.num_preemptions == num_preemptions  # else its blocks are somebody else's by now
            ):
                commit(request, start + count)
            if not token_ids:
                continue
            request.num_in_flight -= count if verified else 1
            reason = None
            for position, token in enumerate(token_ids):
                request.token_ids.append(token)
                request.token_times.append(now)
                request.num_tokens = num_tokens = request.num_tokens + 1
                if (
                    token not in request.stop_ids
                    and num_tokens < request.max_total_tokens
                    and request.constraint is None
                ):
                    continue  # as nearly all tokens do
                reason = _end_of(request, token)
                if reason is not None:
                    token_ids = token_ids[: position + 1]
                    break
            if verified and request.num_preemptions == num_preemptions:
                # What a rejected draft wrote is written over before anybody reads it. Its blocks stay for the next one.
                request.num_computed_tokens = request.num_tokens - 1 + request.num_in_flight
                commit(request, request.num_tokens - 1)
            if reason is not None:
                stop_reason = token if token in request.params.stop_token_ids else None
                if request.status is RequestStatus.running:  # taken out of the queue below, all at once
                    self._release(request, reason, stop_reason)
                    num_finished += 1
                else:
                    self.finish(request, reason, stop_reason)
            updates.append((request, token_ids, row))
        if num_finished:
            self._running = [r for r in self._running if r.status is RequestStatus.running]
        if self._siblings:
            for request, _, _ in updates:
                self._queue_siblings(request)
        self._last_update = now if self._requests else None
        return updates

    def fail(self, plan: StepPlan) -> list[Request]:
        """Gives up a step that did not run to its end. Ends the requests whose KV it would have written, and returns
        them. Those that it swapped out may not have arrived: they are computed again."""
        step = self._planned.pop(plan.step)
        computed = [request for request, _ in step.rows]
        ended = [r for r in dict.fromkeys(computed + step.entered) if not r.finished]
        for request in ended:
            self.finish(request, FinishReason.error)
        for request in step.swapped_out:
            if request.status is RequestStatus.swapped:
                self._swapped.discard(request)
                self._recompute(request)
        return ended

    def _release(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        del self._requests[request]
        self._drafts.proposer.forget(request)
        self.kv.free(request)
        if request.req_index is not None:
            self._free_indices.append(request.req_index)
            request.req_index = None
        request.status = RequestStatus.finished
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _queue_siblings(self, leader: Request) -> None:
        """The leader's prompt is computed, or never will be: either way its siblings need not wait any longer."""
        for sibling in self._siblings.pop(leader, ()):
            self._num_siblings -= 1
            self._waiting.push(self._rank(sibling), sibling)

    # --- observation ----------------------------------------------------------------------------------------------

    def usage(self) -> KVUsage:
        return self.kv.usage(self._running + self._prefilling)

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, slots and blocks agree."""
        active = self._running + self._prefilling
        for queue, status in (
            (self._running, RequestStatus.running),
            (self._prefilling, RequestStatus.prefilling),
        ):
            assert all(r.status is status for r in queue), (
                f"a request in the {status.value} queue is not {status.value}"
            )
            assert queue == sorted(queue, key=self._rank), f"the {status.value} queue is not in rank order"
        req_indices = [_req_index(r) for r in active] + self._free_indices
        assert sorted(req_indices) == list(range(self.config.max_num_seqs)), "a slot is lost or in two places"
        counts = len(active) + self.num_waiting + self.num_swapped
        assert counts == len(self._requests), f"{len(self._requests)} unfinished requests, but {counts} in the queues"
        for request in self._requests:
            assert request.num_tokens == len(request.token_ids)
            assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
            assert 0 <= request.num_in_flight <= sum(1 + step.num_drafts for step in self._planned.values())
            if request not in active:
                assert not request.block_table, f"{request} holds blocks outside the batch"
        self.kv.check_integrity(active)


def _end_of(request: Request, token: int) -> FinishReason | None:
    """Takes the request's last token into its grammar, and says why the request ends there; None where it does not."""
    reason = None
    if request.constraint is not None:
        reason = request.constraint.accept(token)
        request.ended_by_token = reason is FinishReason.stop and request.constraint.is_end(token)
    if reason is FinishReason.error:
        return reason
    if token in request.stop_ids and request.num_tokens > request.min_total_tokens:
        request.ended_by_token = True
        return FinishReason.stop
    if reason is None and request.num_tokens >= request.max_total_tokens:
        return FinishReason.length
    return reason


def _req_index(request: Request) -> int:
    assert request.req_index is not None
    return request.req_index
