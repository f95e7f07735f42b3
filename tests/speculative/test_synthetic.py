"""Acceptance at a stated rate."""

from __future__ import annotations

import numpy as np
import pytest

from mini_infer.speculative.synthetic import synthetic_accepts, synthetic_drafts


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5585, 1.0])
def test_each_draft_has_the_rate_if_those_before_it_stand(rate: float) -> None:
    n = 20_000
    accepted = synthetic_accepts(np.arange(n) % 100, np.arange(n) // 100 * 5, np.full(n, 4), rate)
    for place in range(4):
        reached = accepted >= place
        if reached.sum() > 500:
            error = (rate * (1 - rate) / reached.sum()) ** 0.5
            assert abs((accepted[reached] > place).mean() - rate) <= 4 * error


def test_a_position_has_one_fate() -> None:
    """However a request's drafts are cut into steps, whatever the batch."""
    far = synthetic_accepts(np.array([3]), np.array([100]), np.array([50]), 0.9)[0]
    assert 2 < far < 50
    for start in range(far + 1):
        rest = synthetic_accepts(np.array([1, 3, 2]), np.array([5, 100 + start, 6]), np.array([3, 50, 0]), 0.9)
        assert rest[1] == far - start
        assert rest[2] == 0


def test_no_more_than_were_drafted() -> None:
    assert synthetic_accepts(np.arange(4), np.arange(4), np.arange(4), 1.0).tolist() == [0, 1, 2, 3]
    assert synthetic_accepts(np.arange(0), np.arange(0), np.arange(0), 1.0).shape == (0,)


def test_drafts_are_a_function_of_seed_and_place() -> None:
    drafts = synthetic_drafts(3, 10, 6, 1_000)
    assert len(drafts) == 6
    assert all(0 <= token < 1_000 for token in drafts)
    assert synthetic_drafts(3, 12, 4, 1_000) == drafts[2:]
    assert synthetic_drafts(4, 10, 6, 1_000) != drafts
    assert synthetic_drafts(3, 10, 0, 1_000) == []
