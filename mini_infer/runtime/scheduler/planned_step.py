"""A step while the scheduler plans it, and what its tokens do to their requests when it is booked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from mini_infer.cache.kv_manager import KVManager, PrefixMatch
from mini_infer.core.plan import Admission, Growth, PromptLogprobs, Push, StepPlan, StepResult, Transfer
from mini_infer.core.request import FinishReason, Request, RequestStatus

LOGPROBS_A_STEP = 2**12  # of prompts: they take the host some milliseconds, for which every row of the step waits
_plan_fields = attrgetter(*StepPlan._fields)


class PlannedStep:
    """Rows, and what comes with them, until `plan`; after that, whose rows they are. All of it is the scheduler's.
    `budget` is what is left of the tokens that the step may compute."""

    # As a step begins; what is not told here is as in a StepPlan.
    short_of_blocks = False  # somebody waits for a block of the next token, or has given way for one
    last_transfer = 0  # that was planned by then
    promised = 0  # blocks that will be free soon, and for whom is settled
    num_decode_rows = 0
    num_drafts = 0
    prefix_queried_tokens = 0
    prefix_hit_tokens = 0
    host_hit_tokens = 0
    disk_hit_tokens = 0
    keeps_up = False
    awaits_transfers = False

    def __init__(self, step: int, now: float, budget: int) -> None:
        self.step = step
        self.now = now
        self.budget = budget
        self.logprobs_left = LOGPROBS_A_STEP
        self.rows: list[Request] = []
        self.preempted_since: set[Request] = set()  # after it was planned: their blocks are somebody else's now
        self.req_indices: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.admissions: list[Admission] = []
        self.growths: list[Growth] = []
        self.masks: dict[int, bytes] = {}
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.drafts: dict[int, Sequence[int]] = {}  # row -> tokens
        self.following: list[int] = []
        self.transfers: list[Transfer] = []
        self.pushes: list[Push] = []
        self.preempted: list[str] = []

    def add_decode_rows(self, requests: list[Request]) -> None:
        """The next token of each; they are the step's first rows. A row a request and step: the engine's hottest loop,
        and list comprehensions are the fastest there is."""
        self.rows = requests
        self.num_decode_rows = len(requests)
        self.req_indices = [request.req_index for request in requests]  # type: ignore[misc]  # who runs has one
        self.starts = [request.num_computed_tokens for request in requests]
        self.counts = [1] * len(requests)
        self.samples = [True] * len(requests)
        self.budget -= len(requests)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight += 1

    def mark_following(self) -> None:
        """Rows behind drafts that nobody has read yet. Who has one token in flight, or none, before this step's own had
        no drafts there: the host knows where that one will stand."""
        ahead = [request.num_in_flight - count for request, count in zip(self.rows, self.counts, strict=True)]
        self.following = [row for row, tokens in enumerate(ahead) if tokens > 1]

    def most_of_prompt(self, request: Request) -> int:
        """Of its tokens, in this step."""
        if request.prompt_logprobs is None:
            return self.budget
        return min(self.budget, max(self.logprobs_left, 0) // (1 + (request.params.prompt_logprobs or 0)))

    def add_prompt_row(self, request: Request, count: int) -> None:
        """The next `count` tokens of its prompt. It samples where they complete it."""
        row, start = len(self.rows), request.num_computed_tokens
        completes = start + count == request.num_tokens
        assert request.req_index is not None
        if not request.is_announced:
            request.is_announced = True
            self.admissions.append(
                Admission(
                    request.req_index,
                    request.request_id,
                    request.token_ids.copy(),
                    request.prompt_len,
                    request.block_table.copy(),
                    request.params,
                    request.seed,
                    request.stop_ids,
                    request.adapter,
                    request.adapter_slot,
                )
            )
        if request.export is not None:
            pairs = request.export.pairs(request.block_table, min(start + count, request.prompt_len))
            self.pushes.append(Push(request.export.transfer_id, pairs))
        if request.handover is not None and request.resumed_time is None:
            request.resumed_time = max(self.now, request.handover.arrived)  # it may have come while this was planned
        if request.prompt_logprobs is not None and start + 1 < request.prompt_len:
            followed = min(count, request.prompt_len - 1 - start)
            num_top = request.params.prompt_logprobs or 0
            self.prompt_logprobs.append(PromptLogprobs(row, followed, num_top))
            self.logprobs_left -= followed * (1 + num_top)
        if request.constraint is not None and completes:
            self.masks[row] = request.constraint.mask
        self.rows.append(request)
        self.req_indices.append(request.req_index)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(completes)
        self.budget -= count
        request.num_computed_tokens += count
        request.num_in_flight += completes

    def count_hits(self, request: Request, match: PrefixMatch, loads: Transfer | None, kv: KVManager) -> None:
        """What is cached of a prompt that is computed for the first time: on the device, and what is `loads`."""
        read, loaded = (0, 0) if loads is None else (len(loads.files), len(loads.pairs))
        request.num_cached_tokens = match.num_tokens + loaded * kv.block_size
        if kv.prefix_caching and request.fork_of is None and request.prompt_logprobs is None:
            self.prefix_queried_tokens += request.num_tokens
            self.prefix_hit_tokens += request.num_cached_tokens
            self.host_hit_tokens += (loaded - read) * kv.block_size
            self.disk_hit_tokens += read * kv.block_size

    def sort_decode_rows(self) -> None:
        """Brings rows with fewer drafts before those with more."""
        order = sorted(range(self.num_decode_rows), key=self.counts.__getitem__)
        self.rows = [self.rows[row] for row in order]
        self.req_indices, self.starts, self.counts = (
            [column[row] for row in order] for column in (self.req_indices, self.starts, self.counts)
        )
        place = {row: index for index, row in enumerate(order)}
        self.masks = {place[row]: mask for row, mask in self.masks.items()}
        self.drafts = {place[row]: tokens for row, tokens in self.drafts.items()}
        self.following = [place[row] for row in self.following]

    def plan(self) -> StepPlan:
        return StepPlan._make(_plan_fields(self))


FINISHED = RequestStatus.finished  # up to Python 3.11 looking up an Enum's member takes 0.1 us, too long for each row

# A request, its new tokens, and the plan's row they came from: a plain tuple, since a step makes hundreds.
TokenUpdate: TypeAlias = tuple[Request, list[int], int]


class Ending(NamedTuple):
    request: Request
    reason: FinishReason
    stop_reason: int | str | None  # the stop token or string
    num_dropped: int = 0  # tokens of the same step behind the one that completed the stop string


def book_tokens(
    step: PlannedStep, plan: StepPlan, result: StepResult, now: float, kv: KVManager
) -> tuple[list[TokenUpdate], list[Ending]]:
    """Takes in the step's tokens, without those of requests that ended while it ran. Who ends by them is left to do."""
    for row, entries in result.prompt_logprobs.items():
        prompt_logprobs = step.rows[row].prompt_logprobs
        assert prompt_logprobs is not None
        known = len(prompt_logprobs) - (plan.starts[row] + 1)  # more than none after a preemption
        prompt_logprobs += entries[known:]
    updates: list[TokenUpdate] = []
    endings: list[Ending] = []
    num_plain = 0 if plan.has_drafts else plan.num_decode_rows
    for row, request, token_ids in zip(range(num_plain), step.rows, result.tokens):  # noqa: B905  # zip is to stop
        if request.status is FINISHED:
            continue
        (token,) = token_ids
        request.num_in_flight -= 1
        request.token_ids.append(token)
        request.token_times.append(now)
        request.num_tokens = num_tokens = request.num_tokens + 1
        updates.append((request, token_ids, row))
        if num_tokens >= request.quiet_until or token in request.stop_ids:
            if (reason := _end_of(request, token)) is not None:
                endings.append(Ending(request, reason, _stop_token(request)))
            _commit(request, num_tokens - 1, step, kv)
    for row in range(num_plain, len(step.rows)):
        request, token_ids = step.rows[row], result.tokens[row]
        if request.status is FINISHED:
            continue
        has_drafts = row < plan.num_decode_rows
        if token_ids:
            request.num_in_flight -= plan.counts[row] if has_drafts else 1
            token_ids, reason = _take_tokens(request, token_ids, now)
            updates.append((request, token_ids, row))
            if reason is not None:
                endings.append(Ending(request, reason, _stop_token(request)))
        if has_drafts:  # what a rejected draft wrote is written over before anybody reads it
            # Its blocks stay for the next one. One that was preempted since may have nothing computed any more.
            computed = request.num_tokens - 1 + request.num_in_flight
            request.num_computed_tokens = min(request.num_computed_tokens, computed)
        # Of the token that it has got nothing is computed yet.
        _commit(request, request.num_tokens - 1 if token_ids else plan.starts[row] + plan.counts[row], step, kv)
    return updates, endings


def _take_tokens(request: Request, token_ids: list[int], now: float) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the one that ends the request, and why it does; None where none does."""
    for position, token in enumerate(token_ids):
        request.token_ids.append(token)
        request.token_times.append(now)
        request.num_tokens += 1
        reason = _end_of(request, token)
        if reason is not None:
            return token_ids[: position + 1], reason
    return token_ids, None


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


def _stop_token(request: Request) -> int | None:
    last = request.token_ids[-1]
    return last if last in request.params.stop_token_ids else None


def _commit(request: Request, num_computed: int, step: PlannedStep, kv: KVManager) -> None:
    """So many of the request's tokens are in the cache, unless its blocks are somebody else's by now."""
    if request in step.preempted_since:
        return
    kv.commit(request, num_computed)
    request.look_ahead(kv.block_size)
