"""Statistics against known values."""

import math

import numpy as np
import pytest

from experiments.lab.judge import stats


def test_abba_alternates_the_direction():
    orders = [stats.abba(["a", "b", "c"], repeat) for repeat in range(4)]
    assert orders == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"], ["c", "b", "a"]]


def test_one_value_has_no_interval():
    assert stats.estimate([3.0]) == stats.Estimate(3.0, None, None, 1)


def test_equal_values_have_an_interval_without_width():
    assert stats.estimate([2.0] * 5) == stats.Estimate(2.0, 2.0, 2.0, 5)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (19, 2.09302), (99, 1.98422)],
)
def test_t_quantiles_are_those_of_the_tables(freedom, quantile):
    assert stats.t_quantile(freedom) == pytest.approx(quantile, rel=2e-3)


def test_an_interval_is_students_of_the_logarithms():
    """Worked out by hand: logs 0, 1, 2 have mean 1 and deviation 1."""
    found = stats.estimate([1.0, np.e, np.e**2])
    half = 4.30265 / np.sqrt(3)
    assert (found.median, found.n) == (pytest.approx(np.e), 3)
    assert (found.low, found.high) == pytest.approx((np.exp(1 - half), np.exp(1 + half)), rel=1e-4)


def test_values_that_may_be_zero_are_taken_as_they_are():
    found = stats.estimate([0.0, 1.0, 2.0])
    half = 4.30265 / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((1 - half, 1 + half), rel=1e-4)


def test_an_interval_holds_the_median_that_stands_before_it():
    found = stats.estimate([1.0] * 30 + [1e9] * 29)
    assert found.low <= found.median == 1.0


def noise(kind, n, rng):
    """Two identical variants in n repeats, [2, n]; they share what the machine does to a whole repeat."""
    values = np.exp(rng.normal(0, 0.02, (2, n)))
    if kind == "drifting":
        weather = np.exp(np.cumsum(rng.normal(0, 0.05, n)))
        place = np.array([[repeat % 2, 1 - repeat % 2] for repeat in range(n)]).T  # in ABBA order
        return values * weather * np.exp(rng.normal(0, 0.02) * place)
    if kind == "outliers":
        return values * np.where(rng.random((2, n)) < 0.1, rng.uniform(1.1, 1.6, (2, n)), 1)
    if kind == "skewed":
        return 1 + rng.exponential(0.05, (2, n))
    return values


def by_turn(*processes):
    """Values by (process, repeat)."""
    return {(process, repeat): v for process, values in enumerate(processes) for repeat, v in enumerate(values)}


def share_excluding_one(kind, processes, repeats, seed, runs=1500, effect=0.0):
    """Of made-up comparisons of identical variants: intervals of their ratio without 1, and those above it."""
    rng = np.random.default_rng(seed)
    wrong = slower = 0
    for _ in range(runs):
        pairs = [noise(kind, repeats, rng) for _ in range(processes)]
        found = stats.ratio(
            by_turn(*(a * np.exp(rng.normal(0, effect)) for a, _ in pairs)), by_turn(*(b for _, b in pairs))
        )
        wrong += not found.low <= 1 <= found.high
        slower += found.low > 1
    return wrong / runs, slower / runs


@pytest.mark.parametrize("kind", ["normal", "drifting", "outliers", "skewed"])
@pytest.mark.parametrize(("processes", "repeats"), [(1, 4), (1, 10), (3, 2), (3, 4)])
def test_identical_variants_give_no_more_false_alarms_than_stated(kind, processes, repeats):
    wrong, slower = share_excluding_one(kind, processes, repeats, [processes, repeats, len(kind)])
    # 5 % are stated; a rate of 5 % would show more than 6.7 % in 1,500 runs once in a thousand tests
    assert wrong <= 0.067
    assert slower <= 0.038


@pytest.mark.parametrize(("effect", "most"), [(0.02, 0.10), (0.1, 0.07), (0.5, 0.067)])
def test_ratios_that_differ_between_processes_are_judged_by_that(effect, most):
    """Pooled, repeats of one process would count as many: 0.1 beside a noise of 0.028 would then alarm in 40 %."""
    wrong, _ = share_excluding_one("normal", 3, 4, 7, effect=effect)
    assert wrong <= most


@pytest.mark.parametrize("between", [0.0, 0.01, 0.1])
def test_the_interval_of_an_absolute_value_holds_what_varies_between_processes(between):
    rng, missed = np.random.default_rng(3), 0
    for _ in range(1500):
        found = stats.absolute(
            by_turn(*(100 * np.exp(rng.normal(0, between) + rng.normal(0, 0.02, 4)) for _ in range(3)))
        )
        missed += not found.low <= 100 <= found.high
    assert 0.033 <= missed / 1500 <= 0.067


def test_an_absolute_value_is_the_median_of_its_processes():
    found = stats.absolute(by_turn([1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]))
    assert (found.median, found.n, found.processes) == (2.0, 9, 3)
    assert found.low < 1 < 4 < found.high
    assert stats.absolute(by_turn([1.0, 2.0, 3.0])) == stats.estimate([1.0, 2.0, 3.0])  # one process: its repeats


def test_the_interval_of_a_share_is_made_of_shares():
    near_all = by_turn([0.97, 0.99], [0.999, 1.0], [0.93, 0.95])
    assert stats.absolute(near_all).high > 1
    assert stats.absolute(near_all, share=True).high == 1
    assert stats.absolute(by_turn([0.0], [0.001], [0.0]), share=True).low == 0


def test_what_is_never_below_0_has_no_interval_below_it():
    counts = by_turn([0.0, 0.0, 3.0], [0.0, 1.0, 0.0], [5.0, 2.0, 4.0])
    found = stats.absolute(counts)
    assert (found.low, found.median) == (0, 0)
    assert found.high == stats.estimate([0.0, 0.0, 4.0]).high
    assert stats.absolute({**counts, (0, 0): -1e-9, (0, 1): -1e-9}).low < 0


def test_an_interval_that_ends_at_0_misses_the_truth_as_seldom():
    """Of counts that are often 0: what lies below 0 cannot be the truth."""
    rng, missed, clipped = np.random.default_rng(5), 0, 0
    for _ in range(1500):
        counts = by_turn(*rng.poisson(1.5, (5, 1)).astype(float))
        found, whole = stats.absolute(counts), stats.estimate(list(counts.values()))
        missed += not found.low <= 1.5 <= found.high
        clipped += whole.low < found.low
        assert (found.low <= 1.5 <= found.high) == (whole.low <= 1.5 <= whole.high)
    assert clipped > 300
    assert missed / 1500 <= 0.1


@pytest.mark.parametrize("kind", ["normal", "drifting"])
def test_a_slowdown_of_ten_percent_is_found_in_three_processes_of_two_repeats(kind):
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        pairs = [noise(kind, 2, rng) for _ in range(3)]
        found += stats.ratio(by_turn(*(1.1 * a for a, _ in pairs)), by_turn(*(b for _, b in pairs))).low > 1
    assert found / 200 > 0.85


def test_a_paired_ratio_cancels_what_slows_a_whole_repeat_down():
    weather = [1.0, 1.5, 0.7, 2.0, 1.1]
    found = stats.ratio(by_turn([20 * w for w in weather]), by_turn([10 * w for w in weather]))
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_ratio_is_taken_as_the_values_beside_it_are():
    """The median of the processes' medians, 3; that of all six would be 2.5, which is the quotient of nothing shown."""
    new, base = by_turn([1.0, 9.0], [2.0, 2.0], [3.0, 3.0]), by_turn(*[[1.0, 1.0]] * 3)
    assert stats.ratio(new, base).median == stats.absolute(new).median / stats.absolute(base).median == 3.0


def test_few_values_are_known_where_an_interval_rests_on_them():
    ones = by_turn([1.0, 1.0])
    assert stats.ratio(by_turn([9.0, 2.0]), ones).few == (2.0, 9.0)
    means = stats.ratio(by_turn([2.0, 2.0], [9.0, 9.0]), by_turn([1.0, 1.0], [1.0, 1.0])).few  # they differ
    assert means == pytest.approx((2.0, 9.0))
    assert stats.absolute(by_turn([2.0, 3.0], [9.0, 9.0])).few == (2.5, 9.0)
    assert stats.ratio(by_turn([9.0, 2.0, 3.0]), by_turn([1.0] * 3)).few == (2.0, 3.0, 9.0)
    assert stats.ratio(by_turn([9.0, 2.0, 3.0, 4.0]), by_turn([1.0] * 4)).few == (), "of more the interval tells enough"
    knees, alike = by_turn([stats.Kept(2.0, 4.0), stats.Kept(40.0, 80.0)]), by_turn([stats.Kept(2.0, 4.0)] * 2)
    assert stats.absolute(knees).few == (2.0, 40.0), "of knees the rates that were kept"
    assert stats.ratio(knees, alike).few == (1.0, 20.0)
    outside = by_turn([stats.Kept(2.0, 4.0), stats.Kept(40.0, math.inf)])
    assert stats.absolute(outside).few == (), "of which one is not known"


def test_a_ratio_takes_the_pairs_that_there_are():
    assert stats.ratio({(0, 0): 2.0, (0, 1): 3.0}, {(0, 1): 1.0, (1, 0): 1.0}) == stats.Estimate(3.0, None, None, 1)
    assert stats.ratio({(0, 0): 2.0}, {(0, 0): 0.0}) is None
    assert stats.ratio({(0, 0): 2.0}, {(0, 1): 1.0}) is None


def test_there_is_no_ratio_where_a_median_is_0():
    """What is left out where the baseline is 0 would choose the pairs that count."""
    goodput, other = by_turn([0.0, 0.0, 1.3, 0.0, 2.6]), by_turn([1.0, 2.0, 1.0, 1.0, 1.0])
    assert stats.ratio(goodput, other) is None
    assert stats.ratio(other, goodput) is None
    assert stats.ratio(by_turn([0.0, 1.0, 2.0]), by_turn([1.0, 1.0, 1.0])).median == 1


@pytest.mark.parametrize(
    ("n", "q", "shown"),
    [
        (999, 99, False),
        (1000, 99, True),
        (199, 95, False),
        (200, 95, True),
        (99, 90, False),
        (100, 90, True),
        (9, 50, False),
        (10, 50, True),
    ],
)
def test_percentiles_need_ten_samples_beyond_them(n, q, shown):
    assert (stats.percentile(list(range(n)), q) is not None) == shown
