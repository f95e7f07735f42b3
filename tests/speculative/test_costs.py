"""The cost of steps between those that were measured."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mini_infer.speculative.policy.costs import StepCosts


def lengths(*numbers: int) -> np.ndarray:
    return np.array(numbers)


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

    @pytest.mark.parametrize(("padded", "rounds_of"), [(False, 2), (True, 3)])
    def test_proposing_costs_a_round_for_each_place(self, padded: bool, rounds_of: int) -> None:
        costs = StepCosts(TARGET, draft={1: 0.1, 3: 0.3}, padded=padded)
        without = StepCosts(TARGET, padded=padded)
        proposing = costs.step_seconds(lengths(0, 2, 4)) - without.step_seconds(lengths(0, 2, 4))
        assert proposing == pytest.approx(4 * rounds_of * 0.1)
        assert proposing == pytest.approx(costs.proposing_seconds(lengths(0, 2, 4)))
        assert costs.proposing_seconds(lengths(0, 0)) == 0

    def test_a_step_costs_what_the_graph_costs_that_it_runs_in(self) -> None:
        grid = {(r, w): 10 + r * w for r, w in product((1, 64, 128), (1, 2, 3, 5))}
        drafts = {1: 1.0, 64: 2.0, 128: 3.0}
        graphs = [*product((1, 64, 128), (2, 3)), (1, 5), (64, 5)]
        costs = StepCosts(grid, drafts, graphs)
        assert costs.verify_seconds(65, 2) == 10 + 128 * 2
        assert costs.verify_seconds(1, 4) == 10 + 1 * 5
        assert costs.verify_seconds(33, 1) == pytest.approx(10 + 33), "those without drafts have sizes of their own"
        assert costs.step_seconds(lengths(*[3] * 33)) == 10 + 64 * 5 + 4 * 2
        assert costs.step_seconds(lengths(*[1] * 65)) == 10 + 128 * 2 + 3
        assert costs.shape(65, 5) is None
        assert costs.step_seconds(lengths(*[4] * 65)) == pytest.approx(10 + 65 * 5 + 4 * 3)
        assert StepCosts(grid, drafts, graphs, padded=True).shape(65, 5) == (65, 5)
        assert costs.shape(1, 2) == (1, 2)
        assert costs.draft_seconds(65) == 3

    def test_a_line(self) -> None:
        costs = StepCosts(TARGET, {1: 0.1}, [(1, 5)], waiting=0.25)
        assert costs.target_s[costs.tokens_per_row.index(5)][costs.rows.index(9)] == 6.0
        assert (costs.draft_s, costs.captured, costs.waiting) == ([0.1], [(1, 5)], 0.25)
        assert "9: 2000.00/6000.00" in str(costs)
        assert "\n" not in str(costs)

    def test_noise_is_levelled(self) -> None:
        costs = StepCosts({(1, 1): 1.0, (1, 5): 0.9, (8, 1): 0.8, (8, 5): 2.0}, draft={1: 0.2, 8: 0.1})
        assert costs.verify_seconds(8, 1) == costs.verify_seconds(1, 5) == 1
        assert costs.draft_seconds(8) == 0.2
