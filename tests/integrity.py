"""Whether the scheduler's queues, the blocks and the swap space agree. Each raises AssertionError unless they do."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from operator import attrgetter

from mini_infer.cache.block_pool import BlockPool
from mini_infer.cache.kv_manager import KVManager
from mini_infer.core.request import Request, RequestStatus
from mini_infer.runtime.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Queues, indices and blocks agree."""
    batch = scheduler.batch
    active = batch.requests()
    for status, queue in batch._queues.items():
        assert all(r.status is status for r in queue), f"a request that is not {status.value} is among those"
        assert queue == sorted(queue, key=attrgetter("rank")), f"those {status.value} are not in rank order"
    req_indices = [r.req_index for r in active] + batch.free_indices
    assert sorted(req_indices) == list(range(scheduler.config.max_num_seqs)), "a req_index is lost or in two places"
    counts = len(active) + len(scheduler.line)
    unfinished = len(scheduler._requests)
    assert counts == unfinished, f"{unfinished} unfinished requests, but {counts} in the queues"
    for request in scheduler._requests:
        assert request.num_tokens == len(request.token_ids)
        assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
        assert 0 <= request.num_in_flight <= sum(1 + step.num_drafts for step in scheduler.planned.values())
        if request not in active:
            assert not request.block_table, f"{request} holds blocks outside the batch"
    check_kv(scheduler.kv, active)


def check_kv(kv: KVManager, holders: Collection[Request]) -> None:
    """Blocks, tables, hashes and swap space agree; `holders` are the requests that have a block table."""
    for request in holders:
        table = request.block_table
        assert len(table) * kv.block_size >= request.num_computed_tokens, f"{request} outgrew its table"
        assert len(set(table)) == len(table), f"{request} holds a block twice"
        assert request not in kv._host_tables or kv.is_under_way(request), f"{request} is in swap space, too"
        receives = request.status is RequestStatus.receiving
        assert not receives or kv.is_under_way(request), f"nothing is on its way to {request}"
        if kv.least_blocks > 1:
            assert all(b == a + 1 for a, b in pairwise(table)), f"{request} is not contiguous"
    owners = [parked.request for parked in kv.transfers.values() if parked.request is not None]
    assert len(set(owners)) == len(owners), "a request has two transfers under way"
    check_pool(kv._pool, kv._released(holders))
    host_tables = [*kv._host_tables.values(), *(parked.host for parked in kv.transfers.values())]
    check_pool(kv._host, host_tables)


def check_pool(pool: BlockPool, tables: Iterable[list[int]]) -> None:
    """Every block is in exactly one state, and the reference counts are those of `tables`, the block tables of all
    live requests."""
    held = Counter(block for table in tables for block in table)
    blank, cached = set(pool._blank), set(pool.cached())
    assert len(blank) == len(pool._blank), "a blank block is listed twice"
    assert len(cached) == len(pool.cached()) == pool.num_cached, "a cached block is listed twice"
    assert len(held) + len(blank) + len(cached) == pool.num_blocks, "a block is lost or in two states"
    assert held.keys() | blank | cached == set(range(pool.num_blocks)), "a block is lost or in two states"
    lone = {block for run in pool.lone.values() for block in run.blocks}
    assert len(lone) == sum(len(run.blocks) for run in pool.lone.values()), "a block is in two lone runs"
    for block, count in held.items():
        known = pool._ref_counts[block]
        assert known == count, f"block {block} has {known} references, but {count} tables hold it"
    zero = {block for block, count in enumerate(pool._ref_counts) if not count}
    assert zero == cached - lone, "cached blocks are not those without references"
    assert all(pool._ref_counts[block] == 1 for block in blank | (cached & lone)), "nobody's block has references"
    hashed = {block: h for block, h in enumerate(pool._hashes) if h is not None}
    assert {h: block for block, h in hashed.items()} == pool._block_of_hash, "the hash index is not one to one"
    assert len(pool._known_firsts) <= pool.num_blocks, "beginnings of chains are kept for ever"
    assert {pool._firsts[block] for block in hashed} <= pool._known_firsts, "the beginning of a chain is not known"
    assert pool._known_firsts.isdisjoint(pool.lone), "a lone run is not alone"
    assert lone.isdisjoint(hashed), "a block of a lone run has a hash"
    assert cached <= hashed.keys() | lone, "a cached block has no hash"
    assert blank.isdisjoint(hashed), "a blank block has a hash"
    for first, run in pool.lone.items():
        assert run.blocks, "a lone run is empty"
        assert run.tokens is not None, "a lone run has no tokens"
        assert run.hashes[0] == first, "a lone run is kept under another's hash"
        assert cached.isdisjoint(run.blocks) == run.held, "a lone run is both held and cached"
