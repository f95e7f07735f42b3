"""Statistics against known values."""

import numpy as np
import pytest

from experiments.lab import stats


def test_abba_alternates_the_direction():
    orders = [stats.abba(["a", "b", "c"], repeat) for repeat in range(4)]
    assert orders == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"], ["c", "b", "a"]]


def test_one_value_has_no_interval():
    assert stats.estimate([3.0]) == stats.Estimate(3.0, None, None, 1)


def test_equal_values_have_an_interval_without_width():
    assert stats.estimate([2.0] * 5) == stats.Estimate(2.0, 2.0, 2.0, 5)


def test_an_interval_is_the_same_every_time_and_stays_within_the_values():
    values = [1.0, 5.0, 2.0, 4.0, 3.0]
    found = stats.estimate(values)
    assert found == stats.estimate(values)
    assert found.median == 3.0
    assert (found.low, found.high) == (1.0, 5.0)  # five values: the whole range, as the docstring says


def test_bootstrap_intervals_hold_the_true_median_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        found = stats.estimate(rng.lognormal(sigma=0.3, size=15).tolist())
        inside += found.low <= 1.0 <= found.high
    assert 0.90 <= inside / 200 <= 1.0


def test_a_paired_ratio_cancels_what_slows_a_whole_repeat_down():
    weather = [1.0, 1.5, 0.7, 2.0, 1.1]
    baseline = [10 * w for w in weather]
    found = stats.paired_ratio([20 * w for w in weather], baseline)
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_ratio_needs_pairs_and_positive_baselines():
    with pytest.raises(ValueError, match="as many values"):
        stats.paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="above 0"):
        stats.paired_ratio([1.0], [0.0])


@pytest.mark.parametrize(("n", "q", "shown"), [(999, 99, False), (1000, 99, True), (99, 90, False), (100, 90, True)])
def test_percentiles_need_ten_samples_beyond_them(n, q, shown):
    assert (stats.percentile(list(range(n)), q) is not None) == shown


def test_a_straight_line_is_found():
    line = stats.fit_line([1, 2, 3, 4], [5, 7, 9, 11])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2, 3, 1))
    assert stats.fit_line([1, 2, 3, 4], [1, -1, 1, -1]).r_squared < 0.5
