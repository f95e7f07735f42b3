"""What a step's tokens do to their requests."""

from __future__ import annotations

from typing import TypeAlias

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.request import FinishReason, Request, RequestStatus
from mini_infer.runtime.scheduler.planned_step import PlannedStep

FINISHED = RequestStatus.finished  # up to Python 3.11 looking up an Enum's member takes 0.1 us, too long for each row

# A request, its new tokens, and the plan's row they came from: a plain tuple, since a step makes hundreds.
TokenUpdate: TypeAlias = tuple[Request, list[int], int]
Ending: TypeAlias = tuple[Request, FinishReason, int | None]  # with the stop token that ended it


def book_tokens(
    step: PlannedStep, plan: StepPlan, result: StepResult, now: float, kv: KVManager
) -> tuple[list[TokenUpdate], list[Ending]]:
    """Takes in the step's tokens, without those of requests that ended while it ran. Who ends by them is left to do."""
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
                endings.append((request, reason, _stop_token(request)))
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
                endings.append((request, reason, _stop_token(request)))
        if has_drafts and request not in step.preempted_since:
            # What a rejected draft wrote is written over before anybody reads it. Its blocks stay for the next one.
            request.num_computed_tokens = request.num_tokens - 1 + request.num_in_flight
        _commit(request, request.num_tokens - 1 if has_drafts else plan.starts[row] + plan.counts[row], step, kv)
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
    if request.constraint is None and request.num_tokens < request.max_total_tokens:  # a grammar reads every token
        fills_block = (request.num_committed_blocks + 1) * kv.block_size + 1
        request.quiet_until = min(fills_block, request.max_total_tokens)


def book_prompt_logprobs(step: PlannedStep, result: StepResult) -> None:
    for row, entries in result.prompt_logprobs.items():
        prompt_logprobs = step.rows[row].prompt_logprobs
        assert prompt_logprobs is not None
        known = len(prompt_logprobs) - (step.starts[row] + 1)  # more than none after a preemption
        prompt_logprobs += entries[known:]
