"""Steps that are all alike: how many lie ahead, and their doing at once.

While requests decode, and nobody comes or ends, a step differs from the one before it in nothing but counters. What
comes out of taking many at once is what would have come out; only StepRecords are not made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_infer.core.request import Request
from mini_infer.runtime.scheduler.scheduler import Scheduler


def steps_alike(scheduler: Scheduler) -> tuple[Sequence[Request], int]:
    """So many of the next steps would have a token of each of these requests, and nothing else would happen in them if
    nobody came: no end, no admission, no want of blocks. None and 0 where steps in flight are others."""
    running, kv = scheduler.batch.running, scheduler.kv
    others = [step for step in scheduler.planned.values() if step.rows != running]
    if not running or others or scheduler.speculator.most or len(running) < len(scheduler.batch):
        return (), 0
    if kv.transfers or kv.tiers.saves:  # what steps fill is copied, and copies end meanwhile
        return (), 0
    admission = scheduler.admission
    if scheduler.line.head() is not None and (admission.by_priority or admission.newcomer() is not None):
        return (), 0
    if [request for request in running if request.must_be_read or request.stop_ids]:
        return (), 0
    most = min([r.max_total_tokens - r.num_tokens - max(r.num_in_flight, 1) for r in running])
    return running.copy(), min(most, kv.num_free // len(running) * kv.block_size)


def take_steps(scheduler: Scheduler, running: Sequence[Request], times: Sequence[float], token: int) -> None:
    """Does what steps at these `times` would have done, of those that `steps_alike` has told of: each request gets
    `token` in each."""
    kv, count = scheduler.kv, len(times)
    tokens = [token] * count
    for request in running:
        blocks = kv.grow(request, request.num_tokens + request.num_in_flight + count - 1)
        assert blocks is not None
        request.token_ids += tokens
        request.token_times += times
        request.num_tokens += count
        request.num_computed_tokens += count
        kv.commit(request, request.num_tokens - 1)
        request.look_ahead(kv.block_size)
