from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from mini_infer.core.trials import Trials
from mini_infer.runtime.scheduler.prefix_loads import LoadCosts


def test_a_load_is_tried_until_both_ways_are_known() -> None:
    costs = LoadCosts()
    assert costs.loading_pays("host", 4, 64)
    costs.loaded("host", 4, 1.0)
    assert costs.loading_pays("host", 4, 64), "nobody knows what a token takes"
    costs.computed(100, 0.1)
    assert not costs.loading_pays("host", 4, 64)
    assert costs.loading_pays("file", 4, 64), "each source for itself"


def test_what_a_load_takes_beside_its_blocks_counts_against_short_ones() -> None:
    costs = LoadCosts()
    costs.computed(1000, 0.3)
    for _ in range(20):
        costs.loaded("host", 512, 0.02)
        costs.loaded("host", 1, 0.02)
    assert costs.loading_pays("host", 512, 8192)
    assert not costs.loading_pays("host", 1, 16)


def test_a_source_that_was_slow_once_is_tried_again() -> None:
    costs = LoadCosts()
    costs.computed(1000, 1.0)
    costs.loaded("file", 10, 100.0)
    tries = next(number for number in range(1000) if costs.loading_pays("file", 10, 160))
    assert 100 < tries < 500


def _num_loaded(costs: LoadCosts, ratio: float, prompts: int, cut: int = 0) -> int:
    """How many of these prompts are loaded, where that takes so many times as long as computing them; but for `cut` of
    their blocks, for which there is no room."""
    loaded = 0
    for number in range(prompts):
        blocks = 10 + 5 * (number % 7)
        if costs.loading_pays("file", blocks, 16 * blocks):
            loaded += 1
            if (blocks := blocks - cut) > 0:
                costs.loaded("file", blocks, ratio * 16 * blocks * 1e-3)
        costs.computed(1000, 1.0)
    return loaded


@pytest.mark.parametrize("ratio", [1.05, 1.2, 1.5, 2, 3, 10, 100])
def test_few_prompts_are_loaded_where_that_always_takes_longer(ratio: float) -> None:
    costs = LoadCosts()
    costs.computed(1000, 1.0)
    assert _num_loaded(costs, ratio, 2000) <= 0.05 * 2000
    assert _num_loaded(costs, 0.5, 200 if ratio <= 10 else 2000) > 100, "the disk is busy no more"
    assert _num_loaded(costs, 0.5, 100) == 100
    assert _num_loaded(costs, ratio, 2000) <= 0.05 * 2000, "and is busy again"


@pytest.mark.parametrize("cut", [1, 5, 9, 10, 40])
@pytest.mark.parametrize("ratio", [1.05, 1.5, 3])
def test_few_prompts_are_loaded_where_host_memory_has_no_room_for_all_of_it(ratio: float, cut: int) -> None:
    """With 10 blocks less, nothing comes of some loads, and with 40 of none."""
    costs = LoadCosts()
    costs.computed(1000, 1.0)
    costs.loaded("file", 10, ratio * 160 * 1e-3)
    assert _num_loaded(costs, ratio, 2000, cut) <= 0.05 * 2000
    assert _num_loaded(costs, ratio, 2000, cut) <= 0.035 * 2000, "in the long run one in 33"
    if cut < 10:
        assert _num_loaded(costs, 0.5, 200, cut) > 100
        assert _num_loaded(costs, 0.5, 100, cut) == 100


def test_trials_that_nobody_hears_of_become_rare_and_one_that_is_heard_of_is_followed_by_more() -> None:
    trials = Trials()
    tried = [number for number in range(1000) if trials.pays(5 + number % 3, 2.0, 1.0)]
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert (tried[0], gaps[:3], {*gaps[3:]}) == (6, [7, 13, 25], {33})


def test_what_is_larger_than_the_trial_is_not_taken_for_it() -> None:
    trials = Trials()
    assert [trials.pays(4, 2.0, 1.0) for _ in range(7)] == [False] * 6 + [True]
    trials.took(100, 1.0)  # a prompt that was thought to gain by it, and did
    trials.took(4, 2.0)
    assert [trials.pays(4, 2.0, 1.0) for _ in range(13)] == [False] * 12 + [True]


@pytest.mark.parametrize("beside", [2, 5])
def test_trials_beside_each_other_find_out_that_the_way_has_become_cheap(beside: int) -> None:
    """Each is heard of when as many more have begun."""
    trials, begun, tried = Trials(), deque[int](), 0
    for number in range(400):
        if trials.pays(10, 2.0, 1.0):  # an estimate that does not follow
            tried += number >= 200
            begun.append(number)
        if len(begun) > beside or (begun and number - begun[0] > beside):
            begun.popleft()
            trials.took(10, 0.5)
    assert tried > 100, "of the last 200"
