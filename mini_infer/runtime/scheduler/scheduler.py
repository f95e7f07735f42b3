"""The scheduler: which tokens of which requests are computed in the next step.

It counts tokens, not phases: prefill, chunks of it, prefix hits, decode, drafts and recomputation are all ways in which
a request's `num_computed_tokens` chases its `num_tokens`, under one token budget a step (docs/architecture.md).

    waiting --admit--> prefilling --last prompt token planned--> running --stop--> finished
       ^                |      ^                                    |
       +-- recompute ---+------|------------------------------------+--- swap ---> swapped
                               +-- its blocks are there --- loading <---- room -------+
                               +-- its KV has come ------- receiving <---- admit, where another engine computes it

A newcomer, too, may be loading first: what host memory and files hold of its prompt, where that is there sooner than it
would be computed. Blocks move beside the steps: until the copies have ended a swapped request's device blocks stay
taken, and one that is loading is not computed.

Steps may overlap: a request with a token in flight, whose place is known though its value is not, has its next token
planned behind it. What was computed for a request that has meanwhile ended is dropped. One with a grammar sits out the
steps before the booking: what may come next depends on the token in flight.

In a pipeline of several stages as many steps are computed at a time, each with its share of the running requests: one
that is in another stage sits out. Where steps overlap and nothing else is to be computed, it goes behind itself: its
token reaches the first stage sooner than the host reads it and plans again.

admission.py has who waits, who is computed, who is next and who gives way; planned_step.py a step's rows, and what its
tokens do to their requests; prefix_loads.py which prefixes are loaded; elsewhere.py what other engines compute;
speculative/draft_plan.py drafts. No tensors: the same scheduler drives a GPU, a dry model
and a simulator.
"""

from __future__ import annotations

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.config import Batching, Preemption, SchedulerConfig
from mini_infer.core.plan import Growth, KVUsage, StepPlan, StepResult
from mini_infer.core.request import FinishReason, Request, RequestStatus
from mini_infer.runtime.scheduler.admission import AdmissionControl, Batch, Newcomer, WaitingLine
from mini_infer.runtime.scheduler.elsewhere import Elsewhere
from mini_infer.runtime.scheduler.planned_step import PlannedStep, TokenUpdate, book_tokens
from mini_infer.runtime.scheduler.policies import place_of
from mini_infer.runtime.scheduler.prefix_loads import PrefixLoads
from mini_infer.speculative.draft_plan import add_drafts, can_follow
from mini_infer.speculative.speculator import NoSpeculation
from mini_infer.transfer.protocol import NoReceiver

# Prompt tokens of a step in a pipeline. Fewer take no less time, since all weights are read for them; more are computed
# no faster, and the stages behind wait longer for the first of them.
LEAST_SHARE, MOST_SHARE = 128, 2048


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        watermark: float = 0.01,  # share of the pool that admission leaves free for running requests to grow
        speculator: NoSpeculation | None = None,
        follows: bool = False,  # a step may be launched before drafts of the one before it are read
        stages: int = 1,  # steps that are computed at a time, of different requests as far as there are several
        receiver: NoReceiver | None = None,  # of prompts that other engines compute
        num_adapters: int = 0,  # that requests of one batch can have between them
    ) -> None:
        self.config = config
        self.kv = kv
        self._watermark_blocks = int(watermark * kv.num_blocks) if kv.least_blocks == 1 else 0  # where requests grow
        self.speculator, self._follows = speculator or NoSpeculation(), follows
        self._stages = stages
        self.place = place_of(config.policy)
        self._static = config.batching is Batching.static
        self._requests: dict[Request, None] = {}  # all unfinished ones
        # A static batch computes siblings side by side.
        self.line = WaitingLine(siblings_wait=not self._static)
        self.batch = Batch(config.max_num_seqs, num_adapters)
        self.admission = AdmissionControl(config, self.line, self.batch, kv, self._watermark_blocks)
        self.planned: dict[int, PlannedStep] = {}  # planned, and not booked yet
        self._num_added = 0
        self._step = 0
        self._decodes_sat_out = False  # in the step before, for a whole prompt
        self._last_update: float | None = None  # None: there was nothing to do since
        self._loads = PrefixLoads(kv)
        self._elsewhere = Elsewhere(kv, receiver or NoReceiver())

    # --- requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. One with `fork_of` waits until its leader's prompt is computed, to share its blocks."""
        self._num_added += 1
        request.rank = self.place(request, self.config), self._num_added
        self._requests[request] = None
        self.line.add(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request, wherever it is and at any moment, and gives back all it holds."""
        if not request.finished:  # else its last token also completed a stop string
            self._elsewhere.cancel(request)
            (self.batch.leave if request in self.batch else self.line.discard)(request)
            request.status = RequestStatus.finished
            self.kv.free(request)
            del self._requests[request]
            self.speculator.forget(request)
            self.line.release_siblings(request)
        request.finish_reason, request.stop_reason = reason, stop_reason

    @property
    def num_waiting(self) -> int:
        return len(self.line) - self.line.num_swapped

    @property
    def num_swapped(self) -> int:
        return self.line.num_swapped + len(self.batch.loading)

    @property
    def num_receiving(self) -> int:
        return len(self.batch.receiving)

    @property
    def num_prefilling(self) -> int:
        return len(self.batch.prefilling)

    @property
    def num_running(self) -> int:
        return len(self.batch.running)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    # --- plan a step --------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plans the next step, at time `now`. The plan is empty only when no request is left, or when all that is
        left waits for tokens in flight or for another engine. One without rows may start transfers, or wait for
        them."""
        self.exchange()
        self._step += 1
        step = PlannedStep(self._step, now, self.config.max_num_batched_tokens)
        planned = list(self.planned.values())
        split = max(0, len(planned) - self._stages + 1)
        before, beside = planned[:split], planned[split:]  # beside: in other stages, they end after this one begins
        following = any(in_flight.num_drafts for in_flight in before)
        if before and (self.speculator.waits or (following and not self._can_follow())):
            return step.plan()
        if (saved := self.kv.tiers.save()) is not None:
            step.transfers.append(saved)
        admits = not (self._static and len(self.batch))
        for victim in self.admission.victims() if admits and not following else ():
            self._preempt(victim, step)
        self._schedule_running(step, self._most_decodes(admits), beside)
        # Whoever was just thrown out must not come straight back.
        newcomer = self.admission.newcomer() if admits and not step.short_of_blocks else None
        prompts = newcomer is not None or bool(self.batch.prefilling)
        drafts = self.speculator.plan(step.rows, prompts)
        step.keeps_up = self.speculator.keeps_up
        if drafts and (self.config.chunked_prefill or not prompts):  # a whole prompt may take all that is left
            add_drafts(step, drafts, self.kv, self._watermark_blocks)
        if following:
            step.mark_following()
        elif prompts:
            if self._stages > 1 and self.config.chunked_prefill and not self._static:
                step.budget = min(step.budget, self._even_share(step, beside))
            # Drafts may have taken the blocks that were there for the newcomer.
            self._schedule_prompts(step, self.admission.newcomer() if newcomer and step.num_drafts else newcomer)
        if step.rows and (written := self.kv.tiers.write()) is not None:
            step.transfers.append(written)
        idle = not (step.rows or step.transfers or self.planned)
        here = len(self._requests) > len(self.batch.receiving)  # others wait for another engine, whoever else writes
        step.awaits_transfers = idle and here and bool(self.kv.transfers.local)
        step.last_transfer = self.kv.transfers.num_started
        self._elsewhere.tell(self.planned)
        plan = step.plan()
        if not plan.empty:
            self.planned[step.step] = step
        return plan

    def exchange(self) -> None:
        """Tells other engines what is wanted of them, and takes in what has come."""
        for request, has_blocks in self._elsewhere.arrivals():
            if has_blocks:
                self.batch.move(request, RequestStatus.prefilling)
            else:
                self.batch.leave(request)
                self._recompute(request)
        self._elsewhere.tell(self.planned)

    def _can_follow(self) -> bool:
        """Whether the next step can be planned behind drafts that nobody has read yet: it takes no prompts."""
        return (
            self._follows
            and not self.batch.prefilling
            and self.admission.newcomer() is None
            and not self.admission.victims()
            and can_follow(self.speculator, self.kv, self.batch.running, self.planned.values())
        )

    def _most_decodes(self, admits: bool) -> int:
        """Running requests that the step may serve: all, unless a prompt that has to be computed whole comes next, and
        fits into no step beside them. Then they sit out every other step, as many as must."""
        num_running = len(self.batch.running)
        if self.config.chunked_prefill:
            return num_running
        prefilling = self.batch.prefilling
        newcomer = self.admission.newcomer() if admits and not prefilling else None
        if self._decodes_sat_out or not (prefilling or newcomer):
            self._decodes_sat_out = False
            return num_running
        missing = newcomer.missing_tokens if newcomer else prefilling[0].num_tokens - prefilling[0].num_computed_tokens
        room = self.config.max_num_batched_tokens - missing
        self._decodes_sat_out = room < num_running
        return min(room, num_running)

    def _schedule_running(self, step: PlannedStep, most: int, beside: list[PlannedStep]) -> None:
        """One token for each of the `most` first running requests that can have it, and are in no step `beside`."""
        running = self.batch.running
        if self._stages > 1:
            most = min(most, -(-len(running) // self._stages))  # all stages get about as many
            others = {request for step in beside for request in step.rows}
            running = [request for request in running if request not in others] or self._behind_themselves(running)
        running = running[:most]
        sit_out: set[Request] = set()
        masked = False
        for request in [r for r in running if r.num_tokens + r.num_in_flight > r.grow_after]:
            if request.status is not RequestStatus.running:
                continue  # it has just given way to one before it
            target = request.num_tokens + request.num_in_flight
            waits_for_token = request.constraint is not None and request.num_in_flight > 0
            # At its limit its last token is in flight.
            if target >= request.max_total_tokens or waits_for_token or not self._grow(request, target, step):
                sit_out.add(request)
            masked = masked or request.constraint is not None
        if sit_out or step.short_of_blocks:
            running = [r for r in running if r not in sit_out and r.status is RequestStatus.running]
        step.add_decode_rows(running)
        if masked:
            step.masks = {row: r.constraint.mask for row, r in enumerate(running) if r.constraint is not None}

    def _behind_themselves(self, running: list[Request]) -> list[Request]:
        """Those of `running`, which all are in other stages, that have nobody to leave the first stage to: whose last
        step was the earliest first. None behind drafts, of which the host does not know how many stand."""
        if not (running and self._follows) or self.speculator.most or len(self.planned) == self._stages:
            return []
        if self.batch.prefilling or self.admission.newcomer() is not None:
            return []
        last = {request: step.step for step in self.planned.values() for request in step.rows}
        return sorted(running, key=last.__getitem__)

    def _grow(self, request: Request, target: int, step: PlannedStep) -> bool:
        """Gives a running request a block for its next token where it needs one, if others must give way for it. False
        where it waits for blocks that are about to be free, or has given way itself."""
        first = len(request.block_table)
        while (blocks := self.kv.grow(request, target)) is None:
            step.short_of_blocks = True
            # Whoever may soon end or not: it counts what is sure to come, so that nobody waits in vain.
            ending = [r for r in self.batch.running if r.num_tokens + r.num_in_flight >= r.max_total_tokens]
            if self.kv.num_free_without(ending) > step.promised:
                step.promised += 1
                return False
            last = self.batch.last()
            self._preempt(last, step)  # it ranks behind this request, or is this request
            if last is request:
                return False
        if blocks:
            assert request.req_index is not None
            step.growths.append(Growth(request.req_index, first, blocks))
        request.look_ahead(self.kv.block_size)
        return True

    def _even_share(self, step: PlannedStep, beside: list[PlannedStep]) -> int:
        """Prompt tokens for a step that should take each stage as long as those beside it, since whoever is ready first
        waits: what there is of prompts goes evenly into as many steps as there are stages (as gLLM throttles tokens,
        arXiv:2504.14775). So all stages compute at a long prompt, too. What caches hold of those that wait counts as
        theirs."""
        there = sum(request.num_tokens - request.num_computed_tokens for request in self.batch.prefilling)
        there += sum(sum(other.counts[other.num_decode_rows :]) for other in beside)
        there += self.line.num_tokens(len(self.batch.free_indices), MOST_SHARE * self._stages)
        return min(MOST_SHARE, max(LEAST_SHARE, -(-there // self._stages)))

    def _schedule_prompts(self, step: PlannedStep, newcomer: Newcomer | None) -> None:
        """Prompts in progress and newcomers: in rank order, as far as the budget goes."""
        in_progress = iter(self.batch.prefilling.copy())
        current = next(in_progress, None)
        while step.budget > 0 or self._static:  # a static batch is admitted now, and computed bit by bit
            if newcomer and (current is None or newcomer.request.rank < current.rank):
                admitted = self._admit(newcomer, step)  # who comes behind one that finds no room waits too
                newcomer = self.admission.newcomer() if admitted and (step.budget > 0 or self._static) else None
            elif current is not None:
                self._compute(current, step)
                current = next(in_progress, None)
            else:
                return

    def _compute(self, request: Request, step: PlannedStep) -> None:
        """Some of a prompt, as far as the budget goes."""
        needed = request.num_tokens - request.num_computed_tokens
        count = min(needed, step.most_of_prompt(request) if self.config.chunked_prefill else step.budget)
        if count == needed or (count > 0 and self.config.chunked_prefill):
            step.add_prompt_row(request, count)
        if count == needed:
            self.batch.move(request, RequestStatus.running)

    # --- admission ------------------------------------------------------------------------------------------------

    def _admit(self, newcomer: Newcomer, step: PlannedStep) -> bool:
        """Gives the next in line its place in the batch, and computes what the budget allows. False where it has to be
        computed whole, which the budget does not allow."""
        request, match = newcomer
        whole = not (self.config.chunked_prefill or self._static)
        if whole and newcomer.missing_tokens > step.budget:
            return False
        self.line.admit_head()
        loads = None
        if request.status is RequestStatus.swapped:
            step.transfers.append(self.kv.swap_in(request))
            status = RequestStatus.loading
        else:
            self.kv.admit(request, match)
            request.num_computed_tokens = match.num_tokens
            status = RequestStatus.prefilling
            if (loads := self._loads.start(request, step.now)) is not None:
                step.transfers.append(loads)
                status = RequestStatus.loading
            elif self._elsewhere.ask(request, len(self.batch.running), step.step):
                status = RequestStatus.receiving
        self.batch.join(request, status)
        if request.num_cached_tokens is None:  # a preempted request that finds its own blocks again is no hit
            step.count_hits(request, match, loads, self.kv)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.now
        if status is RequestStatus.prefilling:
            self._compute(request, step)
        return True

    # --- giving way -----------------------------------------------------------------------------------------------

    def _preempt(self, request: Request, step: PlannedStep) -> None:
        """Takes a request out of the batch. Its blocks go to the host or, also where swap space is full, are lost."""
        status = request.status
        self._elsewhere.cancel(request)
        self.batch.leave(request)
        step.preempted.append(request.request_id)
        request.num_preemptions += 1
        for in_flight in self.planned.values():
            in_flight.preempted_since.add(request)
        if status is RequestStatus.loading and self.kv.is_swapped(request):
            self.kv.undo_swap_in(request)
        else:
            has_kv = status is RequestStatus.prefilling or status is RequestStatus.running
            swaps = has_kv and self.config.preemption is Preemption.swap
            transfer = self.kv.swap_out(request) if swaps else None
            if transfer is None:
                self._recompute(request)
                return
            step.transfers.append(transfer)
        self.line.push(request, RequestStatus.swapped)

    def _recompute(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.line.push(request, RequestStatus.waiting)

    # --- take in a step's tokens ----------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenUpdate]:
        """Books a step's tokens at time `now`, and ends the requests that are done."""
        step = self.planned.pop(plan.step)
        if result.transfers_done or not plan.req_indices:
            self._end_transfers(step, plan, result, now)
        prompts = step.rows[plan.num_decode_rows :]
        if prompts:
            self._loads.costs.computed(plan.num_tokens, now - max(step.now, self._last_update or step.now))
        seconds = None if self._last_update is None else now - self._last_update
        self.speculator.book(step.rows, plan, result, seconds)
        updates, endings = book_tokens(step, plan, result, now, self.kv)
        for ending in endings:
            self.finish(*ending[:3])
        for request in prompts:
            if request.num_output_tokens:
                self.line.release_siblings(request)
        self._last_update = now if self._requests else None
        return updates

    def _end_transfers(self, step: PlannedStep, plan: StepPlan, result: StepResult, now: float) -> None:
        ended = set(result.transfers_done)
        if not plan.req_indices:
            # Those not made by then never will be.
            ended.update(self.kv.transfers.ended_by_waiting(step.last_transfer))
        for transfer_id in sorted(ended):
            failed = result.failed.get(transfer_id, ())
            moved = self.kv.end_transfer(transfer_id, failed)
            if moved is not None and moved.status is RequestStatus.loading:
                # Of one that was swapped no block is committed.
                loaded = moved.num_committed_blocks * self.kv.block_size
                moved.num_computed_tokens = max(moved.num_computed_tokens, loaded)
                if failed:
                    moved.num_cached_tokens = min(moved.num_cached_tokens or 0, moved.num_computed_tokens)
                # What a prefix in host memory or files has left may be another engine's to compute.
                asked = loaded and self._elsewhere.ask(moved, len(self.batch.running), self._step + 1)
                self.batch.move(moved, RequestStatus.receiving if asked else RequestStatus.prefilling)
            self._loads.ended(transfer_id, now)

    def fail(self, plan: StepPlan) -> list[Request]:
        """Gives up a step that did not run to its end. Ends the requests whose KV it would have written, and returns
        them. What it transferred may not have arrived: that is computed again, in other blocks, since the copies may
        still go on."""
        step = self.planned.pop(plan.step)
        ended = [request for request in step.rows if not request.finished]
        for request in ended:
            self.finish(request, FinishReason.error)
        for moved in self.kv.distrust(step.transfers):
            if moved in self.batch:
                self.batch.leave(moved)
            self._recompute(moved)
        return ended

    def drop(self, plan: StepPlan) -> None:
        """Forgets a step that nobody waits for: its requests have all ended. Its transfers may go on: their blocks are
        free when a later step says that they have ended."""
        del self.planned[plan.step]

    # --- observation ----------------------------------------------------------------------------------------------

    def usage(self) -> KVUsage:
        return self.kv.usage(self.batch.requests())
