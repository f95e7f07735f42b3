"""What a step's tokens do to their requests."""

from __future__ import annotations

from mini_infer.core.plan import StepResult
from mini_infer.core.request import FinishReason, Request
from mini_infer.runtime.scheduler.planned_step import PlannedStep


def take_tokens(request: Request, token_ids: list[int], now: float) -> tuple[list[int], FinishReason | None]:
    """Appends new tokens. Returns them up to the one that ends the request, and why it does; None where none does."""
    for position, token in enumerate(token_ids):
        request.token_ids.append(token)
        request.token_times.append(now)
        request.num_tokens += 1
        reason = end_of(request, token)
        if reason is not None:
            return token_ids[: position + 1], reason
    return token_ids, None


def end_of(request: Request, token: int) -> FinishReason | None:
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


def next_event(request: Request, block_size: int) -> int:
    """As Request.quiet_until. A grammar reads every token."""
    if request.constraint is not None:
        return 0
    return min((request.num_committed_blocks + 1) * block_size + 1, request.max_total_tokens)


def take_prompt_logprobs(step: PlannedStep, result: StepResult) -> None:
    for row, entries in result.prompt_logprobs.items():
        prompt_logprobs = step.rows[row].prompt_logprobs
        assert prompt_logprobs is not None
        known = len(prompt_logprobs) - (step.starts[row] + 1)  # more than none after a preemption
        prompt_logprobs += entries[known:]
