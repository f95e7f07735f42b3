"""What steps really take, over what the table says."""

from __future__ import annotations

import pytest

from mini_infer.speculative.policy import estimates
from mini_infer.speculative.policy.estimates import StepTimes


def test_the_table_holds_until_two_of_three_say_otherwise() -> None:
    times = StepTimes()
    assert times.plain(4) == 1
    times.learn(0, 4, 2.0)
    assert times.plain(4) == 1, "one may be an accident"
    times.learn(0, 5, 2.2)
    assert times.plain(7) == 2.0
    times.learn(0, 6, 9.0)
    assert times.plain(4) == 2.2
    for _ in range(9):
        times.learn(0, 4, 2.1)
    assert times.plain(4) == 2.1, "the median of more"
    assert times.plain(8) == times.plain(3) == 2.1, "as it was last with other rows"
    for _ in range(3):
        times.learn(0, 1, 3.0)
    assert (times.plain(1), times.plain(4)) == (3.0, 2.1)


def test_what_is_unknown_is_as_for_fewer_drafts() -> None:
    times = StepTimes()
    for _ in range(3):
        times.learn(2, 1, 1.5)
    assert times.relative(1, 4) == [1, 1, 1.5, 1.5, 1.5]
    for _ in range(3):
        times.learn(4, 1, 0.5)
    assert times.relative(1, 4) == [1, 1, 1.5, 1.5, 0.5]


def test_what_is_unknown_of_rows_is_as_it_was_last_with_others() -> None:
    times = StepTimes()
    for rows, ratio in ((1, 1.5), (9, 1.2)):
        for _ in range(3):
            times.learn(2, rows, ratio)
    assert times.relative(70, 3) == [1, 1, 1.2, 1.2]
    assert times.relative(1, 3) == [1, 1, 1.5, 1.5]


def test_a_number_of_drafts_that_was_too_dear_gets_another_try() -> None:
    times = StepTimes()
    for _ in range(3):
        times.learn(2, 1, 4.0)
    for _ in range(estimates._FORGET):
        times.next_step(timed=True)
    assert times.relative(1, 2) == [1, 1, 1]
    times.learn(2, 1, 1.0)
    times.learn(2, 1, 1.0)
    assert times.relative(1, 2) == [1, 1, 1]


def test_steps_without_drafts_are_measured_first_of_all_and_from_time_to_time() -> None:
    times, asked = StepTimes(), []
    for _ in range(1 + 4 * estimates._PERIOD):
        asked.append(times.wants_plain())
        times.next_step(timed=True)
    assert asked[: 1 + estimates._PLAIN_STEPS] == [False] + [True] * estimates._PLAIN_STEPS
    assert sum(asked) == 4 * estimates._PLAIN_STEPS


@pytest.mark.parametrize("steps", [10, 500])
def test_not_where_nobody_measures(steps: int) -> None:
    times = StepTimes()
    for _ in range(steps):
        times.next_step(timed=False)
        assert not times.wants_plain()
