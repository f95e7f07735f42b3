"""Steps that are all alike: how many lie ahead, and their doing at once.

While requests decode, and nobody comes or ends, a step differs from the one before it in nothing but counters. What
comes out of taking many at once is what would have come out; only StepRecords are not made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.request import Request
from mini_infer.runtime.scheduler.scheduler import Scheduler


def steps_alike(scheduler: Scheduler, in_flight: int) -> tuple[Sequence[Request], int]:
    """So many of the next steps would have a token of each of these requests, and nothing else would happen in them if
    nobody came: no end, no admission, no want of blocks. None and 0 where steps in flight are others, or not as many as
    there will be."""
    running, kv, planned = scheduler.batch.running, scheduler.kv, scheduler.planned
    others = len(planned) != in_flight or [step for step in planned.values() if step.rows != running]
    if not running or others or scheduler.speculator.most or len(running) < len(scheduler.batch):
        return (), 0
    if kv.transfers or kv.tiers.saves:  # what steps fill is copied, and copies end meanwhile
        return (), 0
    head, admission = scheduler.line.head(), scheduler.admission
    if head is not None:
        if admission.by_priority or admission.newcomer() is not None:
            return (), 0
        if kv.prefix_caching and [step for step in planned.values() if step.num_decode_rows < len(step.rows)]:
            return (), 0  # there may be room for it once it finds what that prompt leaves
    if [request for request in running if request.must_be_read or request.stop_ids]:
        return (), 0
    most = min([r.max_total_tokens - r.num_tokens - (r.num_in_flight or 1) for r in running])
    return running.copy(), min(most, kv.num_free // len(running) * kv.block_size)


def take_steps(scheduler: Scheduler, running: Sequence[Request], times: Sequence[float], token: int) -> None:
    """Does what steps at these `times` would have done, of those that `steps_alike` has told of: each request gets
    `token` in each."""
    kv, count = scheduler.kv, len(times)
    tokens = [token] * count
    for request in running:
        request.token_ids += tokens
        request.token_times += times
        request.num_computed_tokens += count
        request.num_tokens += count
    if kv.fills_alike(running):
        _fill_in_order(kv, running, count)
    for request in running:
        target = request.num_tokens + request.num_in_flight - 1
        grows, fills = target > request.grow_after, request.num_tokens >= request.quiet_until
        if grows:
            blocks = kv.grow(request, target)
            assert blocks is not None
        if fills:
            kv.commit(request, request.num_tokens - 1)
        if grows or fills:
            request.look_ahead(kv.block_size)


def _fill_in_order(kv: KVManager, running: Sequence[Request], count: int) -> None:
    """Takes and fills blocks one by one, as so many steps would have. Of blocks that are alike the first one that is
    full is found by others, and what is taken may be a block that is like one that somebody has just filled."""
    size = kv.block_size
    events: list[tuple[int, bool, int]] = []  # (step, whether a block is full or has to be taken, row)
    for row, request in enumerate(running):
        before = request.num_tokens - count
        first = len(request.block_table) * size - before - request.num_in_flight + 1
        events += [(step, False, row) for step in range(first, count, size)]
        first = max(0, (request.num_committed_blocks + 1) * size - before)  # 0: a prompt is booked, perhaps
        events += [(step, True, row) for step in (first, *range(size - before % size, count, size)) if step < count]
    for step, fills, row in sorted(events):
        request = running[row]
        before = request.num_tokens - count
        if fills:
            kv.commit(request, before + step)
        else:
            kv.grow(request, before + request.num_in_flight + step)
