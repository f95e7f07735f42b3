"""What a draft model has computed, through prompts, hits, rejections, growth and swaps."""

from __future__ import annotations

import numpy as np

from mini_infer import SamplingParams
from mini_infer.core.plan import Admission, Growth, StepPlan, Transfer
from mini_infer.speculative.draft_model import DraftKV

BLOCK = 4


def make_kv() -> DraftKV:
    return DraftKV(num_requests=3, longest=40, block_size=BLOCK, num_blocks=20, num_host_blocks=10)


def plan(
    req_index: int, start: int, count: int, table: list[int] | None = None, growths: list[Growth] | None = None
) -> StepPlan:
    tokens = [0] * (start + count)
    admissions = [] if table is None else [Admission(req_index, "", tokens, 1, table, SamplingParams(), 0, frozenset())]
    return StepPlan(0, [req_index], [start], [count], [True], 0, admissions=admissions, growths=growths or [])


def computed(kv: DraftKV, req_index: int) -> int:
    return int(kv.computed(np.array([req_index]))[0])


def advance(kv: DraftKV, req_index: int, end: int) -> None:
    kv.advance(np.array([req_index]), np.array([end]))


def test_a_prefix_is_there_where_the_draft_computed_it() -> None:
    kv = make_kv()
    kv.follow(plan(0, 0, 10, [5, 6, 7]))
    assert computed(kv, 0) == 0
    advance(kv, 0, 10)
    kv.follow(plan(1, 8, 4, [5, 6, 9]))
    assert computed(kv, 1) == 8, "both full blocks are shared"
    kv.follow(plan(2, 8, 4, [5, 11, 12]))
    assert computed(kv, 2) == 4, "block 11 was filled by the target alone"


def test_a_block_that_is_given_away_is_blank() -> None:
    kv = make_kv()
    kv.follow(plan(0, 0, 8, [1, 2]))
    advance(kv, 0, 8)
    kv.follow(plan(1, 0, 4, [2]))
    kv.follow(plan(2, 4, 2, [2, 3]))
    assert computed(kv, 2) == 0
    kv.follow(plan(1, 4, 1, growths=[Growth(1, 1, [1])]))
    kv.follow(plan(0, 4, 2, [1, 4]))
    assert computed(kv, 0) == 0


def test_rejected_drafts_do_not_count() -> None:
    kv = make_kv()
    kv.follow(plan(0, 0, 6, [1, 2, 3]))
    advance(kv, 0, 7)
    kv.advance_drafts(np.array([0]), np.array([10]))  # drafts at 7, 8 and 9
    assert computed(kv, 0) == 10
    kv.follow(plan(0, 8, 1))  # one of them stands
    assert computed(kv, 0) == 8
    kv.follow(plan(0, 12, 1))
    assert computed(kv, 0) == 8, "what the target did alone is missing"
    kv.follow(plan(1, 12, 2, [1, 2, 3, 4]))
    assert computed(kv, 1) == 8


def test_swapped_blocks_keep_what_they_have() -> None:
    kv = make_kv()
    kv.follow(plan(0, 0, 12, [1, 2, 3]))
    advance(kv, 0, 8)
    kv.follow(StepPlan(0, [], [], [], [], 0, transfers=[Transfer(1, True, [(1, 7), (2, 8), (3, 9)])]))
    kv.follow(plan(1, 0, 12, [1, 2, 3]))
    kv.follow(StepPlan(0, [], [], [], [], 0, transfers=[Transfer(2, False, [(7, 11), (8, 12), (9, 13)])]))
    kv.follow(plan(2, 12, 1, [11, 12, 13, 14]))
    assert computed(kv, 2) == 8
