from __future__ import annotations

import pytest

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


def _num_loaded(costs: LoadCosts, ratio: float, prompts: int) -> int:
    """How many of these prompts are loaded, where that takes so many times as long as computing them."""
    loaded = 0
    for number in range(prompts):
        blocks = 10 + 5 * (number % 7)
        if costs.loading_pays("file", blocks, 16 * blocks):
            loaded += 1
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
