"""Drafts in a step's plan: how many stand behind each running request's token, and what is planned behind drafts that
are not read yet.

Drafts in flight leave open where a request will stand. The next step may follow all the same: it takes for granted
that they are accepted, and the device, which knows, starts each row where it really stands. Where the host must know (a
prompt is to be admitted, blocks are short, drafts are looked up in the text), the whole batch waits: it would fall into
two halves that take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.plan import Draft, Growth
from mini_infer.core.request import Request
from mini_infer.runtime.scheduler.planned_step import PlannedStep
from mini_infer.speculative.speculator import NoSpeculation


def can_follow(
    speculator: NoSpeculation, kv: KVManager, running: Sequence[Request], planned: Collection[PlannedStep]
) -> bool:
    """Whether a step of the running requests alone can be planned while drafts of theirs are in flight, in `planned`
    steps: no request's sampling may depend on where it is, and nobody may have to give way."""
    blocks = len(running) * (2 + speculator.most // kv.block_size)  # more than they can grow by
    return (
        not speculator.needs_tokens
        and kv.num_free >= blocks
        and all(step.num_decode_rows == len(step.rows) for step in planned)
        and not any(request.must_be_read for request in running)
    )


def add_drafts(step: PlannedStep, drafts: Mapping[int, Draft], kv: KVManager, watermark_blocks: int) -> None:
    """Puts drafts, by row, behind the tokens of a step's running requests, which are all of its rows so far, as far as
    there is room: nobody gives way for drafts, and they leave the watermark's blocks free."""
    left = step.budget // 2  # prompts must get on, too
    keep_free = max(watermark_blocks, len(step.rows))  # what running requests may need next
    for row, draft in drafts.items():
        request, known = step.rows[row], step.starts[row] + 1
        # One token is sampled anyway: drafts that could only be accepted beyond the end are none.
        count = min(draft.length, left, request.max_total_tokens - known - 1)
        first = len(request.block_table)
        if known + count > first * kv.block_size and kv.num_free <= keep_free:
            count = first * kv.block_size - known
        if count <= 0:
            continue
        blocks = kv.grow(request, known + count)
        if blocks is None:
            continue
        if blocks:
            step.growths.append(Growth(step.req_indices[row], first, blocks))
        step.counts[row] += count
        step.num_drafts += count
        if draft.token_ids:
            step.drafts[row] = draft.token_ids[:count]
        request.num_computed_tokens += count
        request.num_in_flight += count
        left -= count
    step.sort_decode_rows()
    step.budget -= step.num_drafts
