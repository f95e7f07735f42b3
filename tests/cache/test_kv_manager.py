"""Prefix matching, admission, growth, swap, and the contiguous baseline, as the scheduler sees them."""

from __future__ import annotations

import random

import pytest
from file_names import FileNames
from integrity import check_kv

from mini_infer.cache.kv_manager import NO_MATCH, KVManager, PrefixMatch
from mini_infer.core.config import Layout
from mini_infer.core.plan import Transfer
from mini_infer.core.request import Request, SamplingParams


def request(tokens: list[int], name: str = "r", salt: str = "", fork_of: Request | None = None) -> Request:
    return Request(name, tokens, SamplingParams(), max_total_tokens=1000, cache_salt=salt, fork_of=fork_of)


def admitted(kv: KVManager, r: Request, keep_free: int = 0) -> bool:
    match = kv.room_for(r, keep_free)
    if match is not None:
        kv.admit(r, match)
    return match is not None


def computed(kv: KVManager, tokens: list[int], name: str = "r", salt: str = "") -> Request:
    """A request whose prompt is in the cache."""
    r = request(tokens, name, salt)
    assert admitted(kv, r)
    r.num_computed_tokens = r.num_tokens
    kv.commit(r, r.num_computed_tokens)
    return r


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # all of it is cached, but one token must be computed
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 9, 9], 4),  # only whole blocks are shared
        ([2, 2, 3, 4, 5, 6, 7, 8, 9], 0),  # another first token: the equal second block is another block
        ([1, 2, 3], 0),
    ],
)
def test_match_is_the_longest_run_of_whole_blocks(prompt: list[int], hit: int) -> None:
    kv = KVManager(16, 4, 64)
    first = computed(kv, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    match = kv.match_prefix(request(prompt))
    assert match.num_tokens == hit
    assert match.blocks == first.block_table[: hit // 4]


def test_prefixes_are_shared_only_under_the_same_salt() -> None:
    kv = KVManager(16, 4, 64)
    computed(kv, list(range(9)), salt="alice")
    assert kv.match_prefix(request(list(range(9)), salt="alice")).num_tokens == 8
    assert kv.match_prefix(request(list(range(9)), salt="bob")).num_tokens == 0
    assert kv.match_prefix(request(list(range(9)))).num_tokens == 0


def test_nothing_is_found_before_it_is_computed() -> None:
    kv = KVManager(16, 4, 64)
    r = request(list(range(12)))
    assert admitted(kv, r)
    kv.commit(r, 7)  # the second block is not full yet
    assert kv.match_prefix(request(list(range(12)))).num_tokens == 4


def test_prefix_survives_its_request_until_the_blocks_are_needed() -> None:
    kv = KVManager(4, 4, 16)
    kv.free(computed(kv, list(range(12))))
    assert kv.match_prefix(request(list(range(12)))).num_tokens == 8
    assert kv.usage([]).cached_blocks == 3
    other = computed(kv, [100 + i for i in range(12)], "other")
    assert kv.num_evictions == 2
    assert kv.match_prefix(request(list(range(12)))).num_tokens == 4
    check_kv(kv, [other])


def test_prefix_cache_off_matches_nothing() -> None:
    kv = KVManager(16, 4, 64, prefix_caching=False)
    computed(kv, list(range(9)))
    assert kv.match_prefix(request(list(range(9)))).num_tokens == 0


def test_admission_counts_matched_blocks_that_are_free() -> None:
    """A cached block that is matched is no longer there to be allocated."""
    kv = KVManager(4, 4, 16)
    kv.free(computed(kv, list(range(16))))
    r = request([*range(8), *range(50, 58)])
    match = kv.match_prefix(r)
    assert match.num_tokens == 8
    assert not admitted(kv, r, keep_free=1)
    assert admitted(kv, r)
    check_kv(kv, [r])


def test_room_that_others_would_leave_counts_what_they_share_once_and_what_is_matched_not_at_all() -> None:
    kv = KVManager(5, 4, 20)
    leader = computed(kv, list(range(9)))
    sibling = request(list(range(9)), "s", fork_of=leader)
    assert admitted(kv, sibling)  # two blocks are shared, each has one of its own, and one is free
    other = request([100 + i for i in range(13)], "o")
    assert kv.room_for(other, without=[sibling]) is None, "its own block comes free, and the shared ones do not"
    assert kv.num_free_without([sibling]) == 2
    assert kv.num_free_without([sibling, leader]) == 5
    assert kv.room_for(other, keep_free=1, without=[sibling, leader]) == NO_MATCH
    assert kv.room_for(other, keep_free=2, without=[sibling, leader]) is None
    same = request([*range(8), *range(50, 62)], "same")  # five blocks, of which two are there
    assert kv.room_for(same, without=[sibling, leader]) == PrefixMatch(leader.block_table[:2], 8)
    assert kv.room_for(same, keep_free=1, without=[sibling, leader]) is None


def test_grow_takes_a_block_when_the_table_is_full() -> None:
    kv = KVManager(2, 4, 8)
    r = computed(kv, [1, 2, 3])
    assert kv.grow(r, 4) == []
    (new,) = kv.grow(r, 5) or []
    assert r.block_table[1] == new
    assert kv.grow(r, 9) is None
    assert len(r.block_table) == 2


def test_swap_moves_computed_blocks_and_brings_them_back() -> None:
    kv = KVManager(4, 4, 16, num_host_blocks=2)
    r = computed(kv, list(range(7)))
    device = list(r.block_table)
    out = kv.swap_out(r)
    assert out is not None
    assert [d for d, _ in out.pairs] == device
    assert kv.usage([]).used_blocks == 2, "until it has ended"
    assert kv.usage([]).used_slots == 7
    assert kv.is_under_way(r)
    check_kv(kv, [])
    assert kv.end_transfer(out.transfer_id) is r
    assert kv.usage([]).used_blocks == 0
    assert kv.usage([]).host_blocks_used == 2
    back = kv.swap_in(r)
    assert [h for h, _ in back.pairs] == [h for _, h in out.pairs]
    assert [d for _, d in back.pairs] == r.block_table
    check_kv(kv, [r])
    assert kv.usage([r]).host_blocks_used == 2
    assert kv.end_transfer(back.transfer_id) is r
    assert kv.end_transfer(back.transfer_id) is None
    assert kv.usage([r]).host_blocks_used == 0
    check_kv(kv, [r])


@pytest.mark.parametrize("undo", [False, True])
def test_blocks_of_one_that_goes_are_free_when_its_transfer_has_ended(undo: bool) -> None:
    kv = KVManager(4, 4, 16, num_host_blocks=2)
    r = computed(kv, list(range(7)))
    out = kv.swap_out(r)
    assert out is not None
    kv.end_transfer(out.transfer_id)
    back = kv.swap_in(r)
    if undo:
        kv.undo_swap_in(r)
        assert r.block_table == []
        assert kv.num_free_without([]) == 4
    kv.free(r)
    check_kv(kv, [])
    assert (kv.usage([]).used_blocks, kv.usage([]).host_blocks_used) == (2, 2)
    assert kv.room_for(request(list(range(16)))) is None
    assert kv.room_for(request(list(range(16))), without=()) is not None
    assert kv.end_transfer(back.transfer_id) is None
    assert (kv.usage([]).used_blocks, kv.usage([]).host_blocks_used) == (0, 0)
    check_kv(kv, [])


def test_swap_without_room_changes_nothing() -> None:
    kv = KVManager(4, 4, 16, num_host_blocks=1)
    r = computed(kv, list(range(7)))
    assert kv.swap_out(r) is None
    assert len(r.block_table) == 2
    check_kv(kv, [r])


class TestHostPrefixes:
    def saving(self, num_blocks: int = 4, num_host_blocks: int = 8) -> KVManager:
        return KVManager(num_blocks, 4, 16, num_host_blocks=num_host_blocks, host_prefixes=True)

    def saved(self, kv: KVManager, tokens: list[int]) -> None:
        """A request with these tokens has come and gone, and been copied."""
        kv.free(computed(kv, tokens))
        transfer = kv.tiers.save()
        assert transfer is not None
        kv.end_transfer(transfer.transfer_id)

    def test_what_was_evicted_comes_back_behind_what_is_there(self) -> None:
        kv = self.saving()
        self.saved(kv, list(range(13)))  # three full blocks
        assert kv.usage([]).host_cached_blocks == 3
        self.saved(kv, [100 + i for i in range(8)])  # one blank block, and the end of the first chain
        again = request(list(range(13)))
        assert admitted(kv, again)
        assert again.num_committed_blocks == 2
        found = kv.tiers.find(again)
        back = kv.tiers.load(again, found)
        assert (back.to_host, back.of_prefixes) == (False, True)
        assert back is not None
        assert back.pairs == [(found[0].block, again.block_table[2])]
        assert kv.is_under_way(again)
        check_kv(kv, [again])
        assert kv.usage([again]).host_blocks_used == 1
        assert kv.end_transfer(back.transfer_id) is again
        assert again.num_committed_blocks == 3
        assert kv.usage([again]).host_blocks_used == 0
        assert kv.match_prefix(request(list(range(13)))).blocks == again.block_table[:3], "others can share it"
        check_kv(kv, [again])

    def test_blocks_being_saved_stay_as_they_are(self) -> None:
        kv = self.saving()
        kv.free(computed(kv, list(range(12))))
        transfer = kv.tiers.save()
        assert transfer is not None
        assert kv.usage([]).used_blocks == kv.usage([]).host_blocks_used == 3
        assert kv.usage([]).used_slots == 12
        other = request([100 + i for i in range(8)])
        assert kv.room_for(other) is None
        assert kv.room_for(other, without=()) is not None, "once the copies have ended"
        check_kv(kv, [])

    def test_few_blocks_of_one_that_goes_on_are_not_worth_a_copy(self) -> None:
        kv = self.saving()
        r = computed(kv, list(range(9)))
        assert kv.tiers.save() is None
        kv.free(r)
        assert kv.tiers.save() is not None
        assert kv.tiers.save() is None

    def test_nothing_is_saved_twice_or_after_its_eviction(self) -> None:
        kv = self.saving()
        self.saved(kv, list(range(12)))
        kv.free(computed(kv, [*range(8), *range(50, 56)]))  # one block is new
        again = kv.tiers.save()
        assert again is not None
        assert len(again.pairs) == 1
        kv.end_transfer(again.transfer_id)
        kv.free(computed(kv, [200 + i for i in range(8)]))
        kv.free(computed(kv, [300 + i for i in range(16)]))
        late = kv.tiers.save()
        assert late is not None
        assert len(late.pairs) == 4, "the two of 200 are gone"

    def test_the_end_of_a_chain_goes_first(self) -> None:
        kv = self.saving(num_host_blocks=4)
        self.saved(kv, list(range(12)))
        self.saved(kv, [100 + i for i in range(8)])
        for tokens in (list(range(13)), [100 + i for i in range(9)]):
            r = request(tokens)
            kv.match_prefix(r)
            assert len(kv._host.find(r.block_hashes)) == 2

    def test_swapped_requests_take_the_place_of_prefixes(self) -> None:
        kv = self.saving(num_host_blocks=3)
        self.saved(kv, list(range(12)))
        r = computed(kv, [100 + i for i in range(9)])
        out = kv.swap_out(r)
        assert out is not None
        assert kv.usage([]).host_cached_blocks == 0
        check_kv(kv, [])

    def test_what_a_failed_step_was_to_copy_is_not_found(self) -> None:
        kv = self.saving()
        kv.free(computed(kv, list(range(12))))
        transfer = kv.tiers.save()
        assert transfer is not None
        assert kv.distrust([transfer]) == []
        kv.end_transfer(transfer.transfer_id)
        assert kv.usage([]).host_cached_blocks == 0
        check_kv(kv, [])

    def test_one_that_ends_while_it_is_loading_leaves_nothing_behind(self) -> None:
        kv = self.saving()
        self.saved(kv, list(range(12)))
        self.saved(kv, [100 + i for i in range(16)])
        again = request(list(range(13)))
        assert admitted(kv, again)
        back = kv.tiers.load(again, kv.tiers.find(again))
        assert back is not None
        kv.free(again)
        check_kv(kv, [])
        assert kv.usage([]).host_blocks_used == 3
        assert kv.end_transfer(back.transfer_id) is None
        assert (kv.usage([]).used_blocks, kv.usage([]).host_blocks_used) == (0, 0)
        check_kv(kv, [])


class TestFiles:
    def pools(self, num_host_blocks: int = 8) -> tuple[KVManager, FileNames]:
        files = FileNames()
        kv = KVManager(4, 4, 16, num_host_blocks=num_host_blocks, host_prefixes=True, files=files)
        return kv, files

    def written(self, kv: KVManager, files: set[bytes], tokens: list[int]) -> None:
        kv.free(computed(kv, tokens))
        transfer = kv.tiers.save()
        while transfer is not None:
            files.update(block_hash for _, block_hash in transfer.files)
            kv.end_transfer(transfer.transfer_id)
            transfer = kv.tiers.write()
        check_kv(kv, [])

    def loading(self, kv: KVManager, tokens: list[int]) -> tuple[Request, Transfer]:
        again = request(tokens)
        assert admitted(kv, again)
        transfer = kv.tiers.load(again, kv.tiers.find(again))
        assert transfer is not None
        check_kv(kv, [again])
        return again, transfer

    def test_what_host_memory_has_given_up_comes_from_files_through_it(self) -> None:
        kv, files = self.pools(num_host_blocks=4)
        self.written(kv, files, list(range(12)))
        self.written(kv, files, [100 + i for i in range(16)])
        assert len(files) == 7
        again, transfer = self.loading(kv, list(range(13)))
        assert len(transfer.pairs) == len(transfer.files) == 3
        kv.end_transfer(transfer.transfer_id)
        assert again.num_committed_blocks == 3
        assert kv.usage([again]).host_cached_blocks == 4
        assert [one.block is None for one in kv.tiers.find(request([*range(13)]))] == []
        check_kv(kv, [again])

    def test_what_is_used_from_memory_touches_its_files(self) -> None:
        kv, files = self.pools()
        self.written(kv, files, list(range(12)))
        files.touched.clear()
        again = request(list(range(13)))
        assert admitted(kv, again)
        assert again.num_committed_blocks == 3, "on the device"
        kv.free(again)
        assert files.touched == again.block_hashes[:3]

    def test_nothing_behind_a_file_that_gave_nothing_has_arrived(self) -> None:
        kv, files = self.pools(num_host_blocks=4)
        self.written(kv, files, list(range(12)))
        self.written(kv, files, [100 + i for i in range(16)])
        again, transfer = self.loading(kv, list(range(13)))
        second, third = transfer.files[1], transfer.files[2]
        kv.end_transfer(transfer.transfer_id, failed=[second[0]])
        assert again.num_committed_blocks == 1
        assert kv._host.block_of(second[1]) is None
        assert kv._host.block_of(third[1]) is not None, "it is as good as any"
        check_kv(kv, [again])

    def test_one_transfer_to_files_at_a_time(self) -> None:
        kv, _ = self.pools(num_host_blocks=3)
        kv.free(computed(kv, list(range(12))))
        saved = kv.tiers.save()
        assert saved is not None
        assert kv.tiers.write() is None, "it is on its way to the host"
        kv.end_transfer(saved.transfer_id)
        first = kv.tiers.write()
        assert first is not None
        assert len(first.files) == 1, "half of host memory"
        assert kv.usage([]).host_blocks_used == 1
        assert kv.tiers.write() is None
        kv.end_transfer(first.transfer_id)
        second = kv.tiers.write()
        assert second is not None
        assert kv.distrust([second]) == []
        assert kv.tiers.write() is not None, "one that was given up holds up nobody"
        kv.end_transfer(second.transfer_id)
        kv.end_transfer(second.transfer_id + 1)
        assert kv.usage([]).host_blocks_used == 0
        check_kv(kv, [])

    def test_a_write_is_planned_without_a_look_at_files(self) -> None:
        class Unseen(FileNames):
            def __contains__(self, block_hash: object) -> bool:
                raise AssertionError("a step is planned, for which every decode waits")

        kv = KVManager(4, 4, 16, num_host_blocks=8, host_prefixes=True, files=Unseen())
        kv.free(computed(kv, list(range(12))))
        saved = kv.tiers.save()
        assert saved is not None
        kv.end_transfer(saved.transfer_id)
        write = kv.tiers.write()
        assert write is not None
        assert len(write.files) == kv.usage([]).host_blocks_used == 3
        kv.end_transfer(write.transfer_id)
        assert kv.usage([]).host_blocks_used == 0
        assert kv.tiers.write() is None, "nothing is left"
        check_kv(kv, [])

    def test_what_is_being_written_stays_in_host_memory_until_then(self) -> None:
        kv, _ = self.pools(num_host_blocks=8)
        writes = []
        for first in (0, 100, 200):
            kv.free(computed(kv, [first + i for i in range(16)]))
            saved = kv.tiers.save()
            assert saved is not None
            assert len(saved.pairs) == 4
            kv.end_transfer(saved.transfer_id)
            writes.append(kv.tiers.write())
        assert writes[0] is not None
        assert writes[1:] == [None, None], "one at a time"
        assert len(writes[0].files) == 4, "all that there was"
        assert all(kv._host.block_of(block_hash) == block for block, block_hash in writes[0].files)
        kv.end_transfer(writes[0].transfer_id)
        last = kv.tiers.write()
        assert last is not None
        assert len(last.files) == 4, "the second four have given way to the third"
        check_kv(kv, [])

    def test_where_host_memory_is_taken_what_needs_none_is_loaded(self) -> None:
        kv, files = self.pools(num_host_blocks=4)
        self.written(kv, files, list(range(12)))
        self.written(kv, files, [100 + i for i in range(16)])
        kv.free(computed(kv, list(range(5))))  # the first block is there again
        saved = kv.tiers.save()
        assert saved is not None
        kv.end_transfer(saved.transfer_id)
        other = computed(kv, [200 + i for i in range(12)])
        assert kv.swap_out(other) is not None
        kv.end_transfer(kv.transfers.local[0])
        kv.free(computed(kv, [300 + i for i in range(16)]))  # nothing is left on the device
        again, transfer = self.loading(kv, list(range(13)))
        assert (len(transfer.pairs), len(transfer.files)) == (1, 0)
        kv.end_transfer(transfer.transfer_id)
        check_kv(kv, [again])


def test_sibling_shares_the_leaders_full_prompt_blocks_without_a_prefix_cache() -> None:
    kv = KVManager(8, 4, 32, prefix_caching=False)
    leader = computed(kv, list(range(10)))
    sibling = request(list(range(10)), "s", fork_of=leader)
    match = kv.match_prefix(sibling)
    assert match.blocks == leader.block_table[:2]
    assert admitted(kv, sibling)
    sibling.num_computed_tokens = match.num_tokens
    check_kv(kv, [leader, sibling])
    usage = kv.usage([leader, sibling])
    assert usage.used_blocks == 4  # two shared, and one of each their own
    assert usage.used_slots == 8 + 2 + 0
    kv.free(leader)
    check_kv(kv, [sibling])


def test_contiguous_layout_reserves_the_longest_request() -> None:
    kv = KVManager(9, 4, 16, layout=Layout.contiguous, prefix_caching=False)
    assert kv.num_free == 8  # two regions of 16 tokens; the ninth block is too little for a third
    a, b, c = request([1, 2]), request([3]), request([4])
    assert admitted(kv, a)
    assert admitted(kv, b)
    assert not admitted(kv, c)
    assert a.block_table == [0, 1, 2, 3]
    a.num_computed_tokens = 2
    usage = kv.usage([a, b])
    assert (usage.reserved_slots, usage.used_slots) == (32, 2)
    assert kv.grow(a, 16) == []
    check_kv(kv, [a, b])
    kv.free(a)
    assert admitted(kv, c)
    check_kv(kv, [b, c])


def test_integrity_check_finds_a_lost_host_block() -> None:
    kv = KVManager(4, 4, 16, num_host_blocks=2)
    kv._host.allocate(1)
    with pytest.raises(AssertionError, match="lost or in two states"):
        check_kv(kv, [])


def test_hashes_that_are_made_late_change_nothing() -> None:
    """Against a manager that makes all at once, because host memory might hold prefixes, which it does not: the same
    tables, matches and evictions, block by block."""
    for seed in range(300):
        rng = random.Random(seed)
        size, num_blocks = rng.randint(1, 3), rng.randint(4, 20)
        late, early = (
            KVManager(num_blocks, size, 64, num_host_blocks=4, host_prefixes=saves) for saves in (False, True)
        )
        early.tiers.save = lambda: None  # type: ignore[method-assign]
        holders: list[list[tuple[KVManager, Request]]] = []  # both managers' copies of a request
        for number in range(60):
            if not holders or rng.random() < 0.3:
                prompt, leaders = (
                    [0] * rng.randint(0, 9) + [rng.randrange(2) for _ in range(rng.randint(1, 5))],
                    (None,) * 2,
                )
                if holders and rng.random() < 0.2:
                    leaders = tuple(r for _, r in rng.choice(holders))
                    prompt = leaders[0].token_ids
                salt = rng.choice(["", "", "s"])
                pair = [
                    (kv, request(prompt, str(number), salt, leader))
                    for kv, leader in zip((late, early), leaders, strict=True)
                ]
                found, other = [kv.room_for(r) for kv, r in pair]
                assert found == other
                if found is not None:
                    for kv, r in pair:
                        kv.admit(r, found)
                    holders.append(pair)
            elif (what := rng.choice(["commit", "commit", "grow", "cut", "free", "swap"])) == "grow":
                pair, tokens = rng.choice(holders), [rng.randrange(2) for _ in range(rng.randint(1, 5))]
                taken = [kv.grow(r, r.num_tokens + len(tokens)) for kv, r in pair]
                assert taken[0] == taken[1]
                for _, r in pair if taken[0] is not None else ():
                    r.token_ids += tokens
                    r.num_tokens += len(tokens)
            elif what == "commit":
                pair, share = rng.choice(holders), rng.random()
                for kv, r in pair:
                    r.num_computed_tokens = max(r.num_computed_tokens, int(share * (r.num_tokens + 1)))
                    kv.commit(r, r.num_computed_tokens)
            else:
                pair = holders.pop(rng.randrange(len(holders)))
                for kv, r in pair:
                    if what == "cut":  # behind a stop string
                        r.token_ids = r.token_ids[:1]
                    if what == "swap" and (transfer := kv.swap_out(r)) is not None:
                        kv.end_transfer(transfer.transfer_id)
                    kv.free(r)
            assert late._pool.cached() == early._pool.cached()
            assert late.num_evictions == early.num_evictions
            for kv, tables in zip((late, early), zip(*holders, strict=True), strict=False):
                check_kv(kv, [r for _, r in tables])
            for (_, one), (_, same) in holders:
                assert one.block_table == same.block_table
