"""The block pool's three states, its LRU order, and an integrity check that really finds damage."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from integrity import check_pool

from mini_infer.cache.block_pool import BlockPool, Run


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(1) == [3]


def test_released_blocks_are_found_again_until_they_are_evicted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.register([blocks[0]], [b"a"])
    pool.register([blocks[1]], [b"b"])
    pool.release(blocks)
    assert pool.num_cached == pool.num_free == 2
    assert pool.find([b"a", b"b", b"c"]) == blocks
    assert pool.allocate(1) == [blocks[1]], "the end of a chain goes first"
    assert pool.num_evictions == 1
    assert pool.find([b"a", b"b"]) == blocks[:1]
    assert pool.find([b"b", b"a"]) == [], "a hit is a leading run"


def test_eviction_takes_the_least_recently_used() -> None:
    pool = BlockPool(3)
    for name in (b"a", b"b", b"c"):
        (block,) = pool.allocate(1) or []
        pool.register([block], [name])
    for block in (0, 1, 2):
        pool.release([block])
    pool.share(pool.find([b"a"]))
    pool.release([0])  # used again: now the youngest
    pool.allocate(1)
    assert [bool(pool.find([name])) for name in (b"a", b"b", b"c")] == [True, False, True]


def test_memory_is_bounded_where_the_same_blocks_are_taken_back_again_and_again() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    pool.register(blocks, [b"a", b"b", b"c"])
    pool.release(blocks)
    for name in (b"a", b"c", b"b") * 40:
        pool.share(pool.find([name]))
        pool.release(pool.find([name]))
        check_pool(pool, [])
        assert len(pool._lru) <= 3 + 4
    assert pool.cached() == [blocks[0], blocks[2], blocks[1]]
    assert pool.allocate(4) == [3, blocks[0], blocks[2], blocks[1]]
    check_pool(pool, [[0, 1, 2, 3]])


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2) or []
    pool.register([blocks[0]], [b"a"])
    pool.release(blocks)
    pool.allocate(2)
    assert pool.num_evictions == 0
    assert pool.find([b"a"]) == [blocks[0]]


def test_shared_block_stays_until_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.register([block], [b"a"])
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    check_pool(pool, [[block]])
    pool.release([block])
    assert pool.num_free == 2


def test_first_block_of_equal_content_is_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register([first], [b"a"])
    pool.register([second], [b"a"])
    assert pool.find([b"a"]) == [first]
    pool.release([first, second])
    assert pool.num_cached == 1
    check_pool(pool, [])


def test_a_lone_run_is_cached_and_evicted_as_if_its_blocks_had_hashes() -> None:
    pool = BlockPool(6)
    table, hashes = pool.allocate(4) or [], [b"a", b"b", b"c"]
    pool.begin(table[:2], hashes, [])
    run = pool.lone[b"a"]
    run.blocks.append(table[2])
    check_pool(pool, [table])
    assert not pool.holds_alike(b"a"), "nobody can share it"
    pool.retire(run, table)
    assert (pool.num_free, pool.num_cached) == (6, 3)
    check_pool(pool, [])
    taken = pool.allocate(4)
    assert taken == [table[3], 4, 5, table[2]], "the last of its table goes first, once no blank one is left"
    pool.end_lone(run)
    assert pool.holds_alike(b"a")
    assert pool.find(hashes) == table[:2]
    check_pool(pool, [taken])
    pool.share(table[:1])
    assert pool.allocate(1) == table[1:2]


def test_a_lone_run_that_is_evicted_is_forgotten() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2) or []
    pool.begin(list(table), [b"a"], [])
    pool.retire(pool.lone[b"a"], table)
    assert pool.allocate(2) == table[::-1]
    assert not pool.lone
    check_pool(pool, [table])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._blank.append(0), "lost or in two states"),
        (lambda pool: pool._blank.pop(), "lost or in two states"),
        (lambda pool: pool._ref_counts.__setitem__(0, 2), "tables hold it"),
        (lambda pool: pool._block_of_hash.pop(b"a"), "hash index"),
        (lambda pool: pool._hashes.__setitem__(0, b"z"), "hash index"),
        (lambda pool: pool._known_firsts.clear(), "is not known"),
        (lambda pool: pool._lru.append(Run([3])), "listed twice"),
    ],
)
def test_integrity_check_finds_planted_damage(damage, message: str) -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1) or []
    pool.register([block], [b"a"])
    check_pool(pool, [[block]])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, [[block]])


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, share, register and release; the pool must always agree with the tables it handed out."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.live: list[list[int]] = []
        self.num_hashes = 0

    @rule(target=tables, count=st.integers(1, 5))
    def allocate(self, count: int) -> list[int]:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is None:
            return []
        self.live.append(blocks)
        return blocks

    @rule(target=tables, table=tables)
    @precondition(lambda self: self.live)
    def share(self, table: list[int]) -> list[int]:
        if not any(table is other for other in self.live):
            return []
        self.pool.share(table)
        copy = list(table)
        self.live.append(copy)
        return copy

    @rule(table=tables, index=st.integers(0, 4))
    def register(self, table: list[int], index: int) -> None:
        if any(table is other for other in self.live) and index < len(table):
            self.num_hashes += 1
            self.pool.register([table[index]], [str(self.num_hashes % 11).encode()])

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        before = len(self.live)
        self.live = [other for other in self.live if other is not table]
        if len(self.live) < before:
            self.pool.release(table)

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool, self.live)


TestPoolMachine = PoolMachine.TestCase
