"""Numbers of drafts: the best by the estimates, and no loss beyond what is allowed for finding out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from mini_infer.speculative.adapt import RESERVE, AcceptanceRate, DraftLengths, best_lengths
from mini_infer.speculative.costs import StepCosts, expected_tokens
from mini_infer.speculative.synthetic import synthetic_accepts


def costs(token: float, draft: float = 0.0, padded: bool = False) -> StepCosts:
    """A step takes a second, and `token` for each token beyond one a row; so much more with a batch's size."""
    target = {(r, w): 1 + token * r * (w - 1) for r, w in product((1, 64), (1, 9))}
    return StepCosts(target, {1: draft} if draft else None, padded)


def best(rates: list[float], limits: list[int], table: StepCosts) -> list[int]:
    return best_lengths(np.array(rates), np.array(limits), table).tolist()


class TestBestLengths:
    @pytest.mark.parametrize("rate", [0.1, 0.5585, 0.9])
    @pytest.mark.parametrize("draft", [0.02, 0.2])
    @pytest.mark.parametrize("padded", [False, True])
    def test_alone_it_is_the_optimum_of_the_formula(self, rate: float, draft: float, padded: bool) -> None:
        speed = {k: expected_tokens(rate, k) / (1 + k * (draft + 0.01)) for k in range(9)}
        assert best([rate], [8], costs(0.01, draft, padded)) == [max(speed, key=speed.__getitem__)]

    def test_nothing_where_drafts_cost_more_than_they_bring(self) -> None:
        assert best([0.5], [4], costs(0.6)) == [0]
        assert best([0.5] * 64, [4] * 64, costs(0.02)) == [0] * 64
        assert best([0.5], [4], costs(0.02)) != [0]

    def test_limits_hold(self) -> None:
        assert best([0.9] * 3, [0, 2, 5], costs(0.001)) == [0, 2, 5]

    def test_a_row_that_is_often_wrong_gets_fewer(self) -> None:
        fewer, more = best([0.2, 0.95], [8, 8], costs(0.2))
        assert fewer < more

    def test_padding_is_free_for_the_others(self) -> None:
        """A captured graph computes the longest row's tokens for all rows."""
        fewer, more = best([0.2, 0.95], [8, 8], costs(0.05, padded=True))
        assert fewer == more > 0


class TestAcceptanceRate:
    def test_what_was_never_tried_does_not_count(self) -> None:
        """Two accepted, one rejected, the fourth unknown."""
        rate = AcceptanceRate(fade=1.0)
        rate.book(drafted=4, accepted=2)
        assert (rate.trials, rate.estimate(0.5, 0)) == (3, pytest.approx(2 / 3))

    def test_is_unbiased(self) -> None:
        rate = AcceptanceRate(fade=1.0)
        for accepted in synthetic_accepts(np.arange(5_000), np.arange(5_000) % 7, np.full(5_000, 4), 0.7):
            rate.book(4, int(accepted))
        assert rate.estimate(0.0, 0) == pytest.approx(0.7, abs=0.02)

    def test_the_past_fades(self) -> None:
        rate = AcceptanceRate(fade=0.97)
        for accepted in [4] * 50 + [0] * 50:
            rate.book(4, accepted)
        assert rate.estimate(0.5, 4) < 0.3

    def test_a_new_request_is_taken_for_an_average_one(self) -> None:
        adaptive = DraftLengths(costs(0.01), most=4)
        assert adaptive.rate("new") == 0.8
        for _ in range(100):
            adaptive.book(["good", "bad"], [4, 4], [4, 0])
        assert adaptive.rate("bad") < 0.2 < adaptive.rate("new") < 0.9 < adaptive.rate("good")
        adaptive.forget("bad")
        assert adaptive.rate("bad") == adaptive.rate("new")


class Played:
    """Steps of a fixed batch, by a table of costs, with true rates of acceptance."""

    def __init__(self, table: StepCosts, rate: Callable[[int], float], rows: int = 1, steps: int = 2_000) -> None:
        adaptive = DraftLengths(table, most=4)
        self.lengths = []
        seconds, tokens = 0.0, 0
        names = list(range(rows))
        for step in range(steps):
            drafted = adaptive.choose(names, [4] * rows)
            place = np.full(rows, 8 * step)
            accepted = synthetic_accepts(np.arange(rows), place, np.array(drafted), rate(step)).tolist()
            adaptive.book(names, drafted, accepted)
            seconds += table.step_seconds(np.array(drafted))
            tokens += rows + sum(accepted)
            self.lengths.append(drafted)
        self.speed = tokens / seconds / (rows / table.verify_seconds(rows))  # over that without drafts
        self.lost_steps = seconds / table.verify_seconds(rows) - tokens / rows


class TestNeverMuchWorseThanOff:
    @pytest.mark.parametrize("rows", [1, 4, 64])
    @pytest.mark.parametrize("rate", [0.0, 0.2, 0.5585])
    @pytest.mark.parametrize("token", [0.004, 0.1, 0.8])
    def test_at_any_batch_and_acceptance(self, rows: int, rate: float, token: float) -> None:
        steps, table = 600, costs(token)
        played = Played(table, lambda _: rate, rows, steps)
        worst = table.step_seconds(np.full(rows, 4)) / table.verify_seconds(rows) - 1
        assert played.lost_steps <= RESERVE + 0.005 * steps + worst
        if worst < 1:
            assert played.speed >= 0.98

    def test_useless_drafts_cost_what_exploring_may(self) -> None:
        played = Played(costs(0.3), lambda _: 0.0)
        assert played.speed >= 0.99
        tail = played.lengths[1_000:]
        assert 0 < sum(drafts > 0 for (drafts,) in tail) < 0.05 * len(tail)

    def test_good_drafts_are_worth_almost_what_the_best_fixed_number_is(self) -> None:
        for rate in (0.5585, 0.9):
            table = costs(0.02, draft=0.05)
            fixed = max(expected_tokens(rate, k) / table.step_seconds(np.array([k])) for k in range(5))
            assert Played(table, lambda _, rate=rate: rate).speed >= 0.96 * fixed

    def test_a_large_batch_falls_back_to_none(self) -> None:
        played = Played(costs(0.05), lambda _: 0.5585, rows=64, steps=300)
        assert sum(map(sum, played.lengths)) < 0.05 * 300 * 64
        assert sum(map(sum, Played(costs(0.05), lambda _: 0.5585, steps=300).lengths)) > 300

    def test_notices_that_drafts_have_become_good(self) -> None:
        """While they were bad it has stopped, but for a probe now and then."""
        played = Played(costs(0.1), lambda step: 0.0 if step < 1_000 else 0.95, steps=4_000)
        assert sum(drafts for (drafts,) in played.lengths[500:1_000]) < 100
        assert np.mean(played.lengths[-500:]) > 3

    def test_notices_that_drafts_have_become_bad(self) -> None:
        played = Played(costs(0.3), lambda step: 0.95 if step < 1_000 else 0.0)
        assert np.mean(played.lengths[500:1_000]) > 1
        assert np.mean(played.lengths[1_100:]) < 0.1


def test_no_proposals_no_drafts() -> None:
    assert DraftLengths(costs(0.01), most=4).choose(["a", "b"], [0, 0]) == [0, 0]
    assert DraftLengths(costs(0.01), most=4).choose([], []) == []


def test_the_one_that_is_known_least_is_probed() -> None:
    adaptive = DraftLengths(costs(0.9), most=4)
    adaptive.book(["known"], [1], [0])
    while adaptive.account < RESERVE:
        adaptive.book(["known"], [0], [0])
    assert adaptive.choose(["known", "none", "new"], [4, 0, 4]) == [0, 0, 1]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="most must be at least 1"):
        DraftLengths(costs(0.1), most=0)
    with pytest.raises(ValueError, match="exploring"):
        DraftLengths(costs(0.1), most=1, exploring=1.5)
