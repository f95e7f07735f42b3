"""Leviathan's formula, and the cost of steps between those that were measured."""

from __future__ import annotations

import numpy as np
import pytest

from mini_infer.speculative.costs import StepCosts, expected_tokens, leviathan_speedup
from mini_infer.speculative.synthetic import synthetic_accepts


def lengths(*numbers: int) -> np.ndarray:
    return np.array(numbers)


class TestFormula:
    @pytest.mark.parametrize("k", [0, 1, 5])
    @pytest.mark.parametrize("rate", [0.0, 0.5585, 0.9])
    def test_is_the_capped_geometric(self, rate: float, k: int) -> None:
        assert expected_tokens(rate, k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))

    def test_a_draft_that_is_always_right(self) -> None:
        assert expected_tokens(1, 4) == 5

    def test_is_what_trials_bring(self) -> None:
        n = 20_000
        accepted = synthetic_accepts(np.arange(n), np.full(n, 9), np.full(n, 4), rate=0.7)
        assert 1 + accepted.mean() == pytest.approx(expected_tokens(0.7, 4), abs=0.04)

    def test_a_figure_of_the_paper(self) -> None:
        """Table 1 of Leviathan et al.: acceptance 0.8 with 5 drafts of negligible cost is 3.69 times as fast."""
        assert leviathan_speedup(0.8, 5, draft_cost=0) == pytest.approx(3.69, abs=0.005)

    def test_costs_count(self) -> None:
        assert leviathan_speedup(0.8, 5, draft_cost=0.1, verify_cost=1.5) == pytest.approx(3.68928 / 2)
        assert leviathan_speedup(0.3, 0, draft_cost=0.1) == 1


TARGET = {(1, 1): 1.0, (1, 5): 2.0, (9, 1): 2.0, (9, 5): 6.0}


class TestStepCosts:
    def test_measured_points_and_between(self) -> None:
        costs = StepCosts(TARGET)
        assert [costs.verify_seconds(*point) for point in TARGET] == list(TARGET.values())
        assert costs.verify_seconds(5, 1) == 1.5
        assert costs.verify_seconds(1, 2) == 1.25
        assert costs.verify_seconds(5, 3) == pytest.approx(2.75)

    def test_beyond(self) -> None:
        costs = StepCosts(TARGET)
        assert costs.verify_seconds(17, 1) == 3
        assert costs.verify_seconds(1, 9) == 3

    def test_below_what_was_measured(self) -> None:
        assert StepCosts({(8, 1): 1.0, (8, 2): 1.5}).verify_seconds(1, 2) == 1.5

    def test_a_step_pays_for_its_tokens_or_for_its_longest_row(self) -> None:
        assert StepCosts(TARGET).step_seconds(lengths(4, 0)) == StepCosts(TARGET).verify_seconds(2, 3)
        padded = StepCosts(TARGET, padded=True)
        assert padded.step_seconds(lengths(4, 0)) == padded.verify_seconds(2, 5)

    def test_proposing_costs_the_rows_that_still_need_drafts(self) -> None:
        costs = StepCosts(TARGET, draft={1: 0.1, 3: 0.3})
        without = StepCosts(TARGET)
        proposing = costs.step_seconds(lengths(1, 2, 4)) - without.step_seconds(lengths(1, 2, 4))
        assert proposing == pytest.approx(0.3 + 0.2 + 0.1 + 0.1)

    def test_noise_is_levelled(self) -> None:
        costs = StepCosts({(1, 1): 1.0, (1, 5): 0.9, (8, 1): 0.8, (8, 5): 2.0}, draft={1: 0.2, 8: 0.1})
        assert costs.verify_seconds(8, 1) == costs.verify_seconds(1, 5) == 1
        assert costs.draft_seconds(8) == 0.2

    @pytest.mark.parametrize(
        "target", [{}, {(1, 1): 1.0}, {(1, 2): 1.0, (1, 3): 1.0}, {(1, 1): 1.0, (1, 2): 1.0, (8, 1): 1.0}]
    )
    def test_a_table_with_holes_is_refused(self, target: dict[tuple[int, int], float]) -> None:
        with pytest.raises(ValueError, match="must be measured"):
            StepCosts(target)

    def test_other_impossible_costs_are_refused(self) -> None:
        with pytest.raises(ValueError, match="above 0"):
            StepCosts({(1, 1): 0.0, (1, 2): 1.0})
        with pytest.raises(ValueError, match="draft's costs"):
            StepCosts(TARGET, draft={})
