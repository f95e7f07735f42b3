"""What steps really take, over what the table says."""

from __future__ import annotations

import pytest

from mini_infer.speculative import step_times
from mini_infer.speculative.step_times import StepTimes


def test_the_table_holds_until_two_of_three_say_otherwise() -> None:
    times = StepTimes()
    assert times.plain(4) == 1
    times.learn_plain(4, 2.0)
    assert times.plain(4) == 1, "one may be an accident"
    times.learn_plain(5, 2.2)
    assert times.plain(7) == 2.0
    times.learn_plain(6, 9.0)
    assert times.plain(4) == 2.2
    for _ in range(9):
        times.learn_plain(4, 2.1)
    assert times.plain(4) == 2.1, "the median of more"
    assert times.plain(8) == times.plain(3) == 1, "other numbers of rows"


def test_what_is_unknown_is_as_for_fewer_drafts() -> None:
    times = StepTimes()
    for _ in range(3):
        times.learn_relative(1, 2, 1.5)
    assert times.relative(1, 4) == [1, 1, 1.5, 1.5, 1.5]
    for _ in range(3):
        times.learn_relative(1, 4, 0.5)
    assert times.relative(1, 4) == [1, 1, 1.5, 1.5, 0.5]


def test_what_is_unknown_of_rows_is_as_it_was_last_with_others() -> None:
    times = StepTimes()
    for rows, ratio in ((1, 1.5), (9, 1.2)):
        for _ in range(3):
            times.learn_relative(rows, 2, ratio)
    assert times.relative(70, 3) == [1, 1, 1.2, 1.2]
    assert times.relative(1, 3) == [1, 1, 1.5, 1.5]


def test_a_number_of_drafts_that_was_too_dear_gets_another_try() -> None:
    times = StepTimes()
    for _ in range(3):
        times.learn_relative(1, 2, 4.0)
    for _ in range(step_times._FORGET):
        times.next_step()
    assert times.relative(1, 2) == [1, 1, 1]
    times.learn_relative(1, 2, 1.0)
    times.learn_relative(1, 2, 1.0)
    assert times.relative(1, 2) == [1, 1, 1]


def wanted(times: StepTimes, steps: int, plain: bool = False) -> list[bool]:
    asked = []
    for _ in range(steps):
        asked.append(times.wants_plain(1))
        times.next_step()
        if plain or asked[-1]:
            times.learn_plain(1, 1.0)
        else:
            times.learn_relative(1, 2, 1.0)
    return asked


def test_steps_without_drafts_are_measured_from_time_to_time() -> None:
    asked = wanted(StepTimes(), 1 + 4 * (step_times._REMEASURE + step_times._PLAIN_STEPS))
    assert asked[1 : 1 + step_times._PLAIN_STEPS] == [True] * step_times._PLAIN_STEPS, "first of all"
    assert sum(asked) == 4 * step_times._PLAIN_STEPS


def test_not_where_they_come_anyway() -> None:
    assert not any(wanted(StepTimes(), 1_000, plain=True)[step_times._PLAIN_STEPS + 1 :])


@pytest.mark.parametrize("steps", [10, 500])
def test_not_where_nobody_measures(steps: int) -> None:
    times = StepTimes()
    for _ in range(steps):
        times.next_step()
        assert not times.wants_plain(1)
