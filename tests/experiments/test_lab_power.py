"""The power that a page states: of many runs such a share finds a slowdown as they state in the mean."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from made_up import METRICS, result

from experiments.lab.judge import stats
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.show.html import document
from experiments.lab.show.pages import screen
from experiments.lab.store.rows import Row

RUNS = 2500
BIAS = 0.04  # of the stated power in the mean, as docs/metrics.md says


def made_up_runs(shape, noise, between, runs=RUNS):
    """Times of two identical variants by (process, repeat); processes differ in their ratio by `between`."""
    rng = np.random.default_rng(1)
    turns = [(process, repeat) for process in range(shape[0]) for repeat in range(shape[1])]
    for _ in range(runs):
        machine = rng.normal(0, 0.2, len(turns))  # slows a whole repeat down
        base, new = np.exp(rng.normal(0, noise, (2, len(turns))) + machine)
        new *= np.repeat(np.exp(rng.normal(0, between, shape[0])), shape[1])
        yield dict(zip(turns, new, strict=True)), dict(zip(turns, base, strict=True))


def finding(runs, slowdown=1.1):
    return [stats.ratio({turn: slowdown * x for turn, x in new.items()}, base).told > 0 for new, base in runs]


def stating(runs):
    return [stats.power(new, base, 1.1).share for new, base in runs]


def differ(found, stated):
    """Whether the means do by more than the bias and three standard errors of this simulation."""
    gap = np.subtract(stated, found)
    return abs(gap.mean()) > BIAS + 3 * gap.std() / math.sqrt(len(gap))


NOISY, DIFFERENT = ((3, 2), 0.05, 0.0), ((3, 4), 0.03, 0.03)


@pytest.mark.parametrize("case", [NOISY, DIFFERENT, ((3, 2), 0.02, 0.04), ((3, 2), 0.1, 0.1), ((1, 6), 0.05, 0.0)])
def test_as_many_runs_find_a_slowdown_as_they_state(case):
    runs = list(made_up_runs(*case))
    found = finding(runs)
    assert 0.1 < np.mean(found) < 0.9
    assert not differ(found, stating(runs))
    assert np.mean(finding(runs, 1.0)) <= 0.05  # where there is none


@pytest.mark.parametrize(
    ("name", "fault", "case"),
    [
        ("t_quantile", lambda freedom: stats.Z, NOISY),  # as of any number of repeats
        ("processes_differ", lambda groups: False, DIFFERENT),
        ("paired", lambda values, baseline: values, NOISY),  # then what slows a whole repeat down counts
    ],
)
def test_a_power_that_is_of_another_interval_is_not_what_runs_find(monkeypatch, name, fault, case):
    runs = list(made_up_runs(*case))
    found = finding(runs)
    monkeypatch.setattr(stats, name, fault)
    assert differ(found, stating(runs))


def test_what_most_runs_would_show_is_found_by_so_many():
    """With little noise and many repeats, where a run knows its own spread."""
    runs = list(made_up_runs((1, 40), 0.05, 0.0, 400))
    often = np.median([stats.power(new, base, 1.1).often for new, base in runs])
    assert np.mean(finding(runs, often)) == pytest.approx(stats.OFTEN, abs=0.06)  # three standard errors


def by_turn(*values):
    return {(0, repeat): value for repeat, value in enumerate(values)}


def test_power_is_worked_out_by_hand():
    """Logarithms -0.1, 0, 0.1: a standard error of 0.0577, and t 4.3027 with two degrees of freedom."""
    pairs, ones = by_turn(*np.exp([-0.1, 0, 0.1])), by_turn(1, 1, 1)
    error = 0.1 / math.sqrt(3)
    slower, fewer = stats.power(pairs, ones, 1.5), stats.power(pairs, ones, 1 / 1.5)
    assert (slower.share, fewer.share) == pytest.approx((0.9967, 0.9967), abs=1e-4)  # 0.4055 / 0.0577 - 4.3027 = 2.720
    often = math.exp(error * (4.30265 + 0.84162))
    assert (slower.often, fewer.often) == pytest.approx((often, 1 / often), rel=1e-4)
    # Of values that may be 0 the noise adds up: 0, 1, 2 have a standard error of 0.577.
    added = stats.power(by_turn(0.0, 1.0, 2.0), ones, 4.0)
    assert added.share == pytest.approx(0.8142, abs=1e-3)  # 3 / 0.577 - 4.3027 = 0.893
    assert added.often == pytest.approx(1 + 10 * error * (4.30265 + 0.84162), rel=1e-4)


def test_one_pair_shows_nothing_and_pairs_that_are_alike_show_everything():
    assert stats.power(by_turn(2.0), by_turn(1.0), 1.1) == (0.0, math.inf)
    assert stats.power(by_turn(2.0), by_turn(1.0), 0.9) == (0.0, 0.0)
    assert stats.power(by_turn(2.0, 2.0), by_turn(1.0, 1.0), 1.1) == (1.0, 1.0)
    assert stats.power(by_turn(2.0), by_turn(0.0), 1.1) is None
    assert stats.power(by_turn(stats.Kept(4.0, 5.0)), by_turn(stats.Kept(4.0, 5.0)), 1.1) is None


# On the page


def power_of(given):
    """What its page says, without what every such line begins with; empty where it says nothing."""
    lines = re.findall(
        r"^- \*\*Power\*\*: a loss of 10 % would be detected in (.*)\.$", screen(given, lambda info: 0), re.M
    )
    return "".join(lines)


def a_run(new, base, metric="ttft_p50_ms", **changes):
    """A result with these values at one point, and no claims."""
    rows = [
        Row(variant, "concurrency=8", repeat, metric, value, METRICS[metric].unit, process=process)
        for variant, values in (("base", base), ("new", new))
        for (process, repeat), value in values.items()
    ]
    told = {"variants": {"base": "off", "new": "on"}, "metrics": {metric: METRICS[metric]}, "claims": (), "plots": ()}
    return result(rows=rows, gates=[], sizes=(8,), **told, **changes)


@pytest.mark.parametrize(("metric", "worse"), [("ttft_p50_ms", 1.1), ("output_tokens_per_s", 0.9)])
def test_a_page_states_the_power_that_its_runs_have(metric, worse):
    found, stated = [], []
    for new, base in made_up_runs(*NOISY, 300):
        slow = stats.ratio({turn: worse * x for turn, x in new.items()}, base)
        found.append(slow.told == math.copysign(1, worse - 1))
        told = power_of(a_run(new, base, metric)).partition(" of such runs")[0]
        stated.append(0.0 if told == "less than 1 %" else int(told.removesuffix(" %")) / 100)
        assert 0 <= stats.power(new, base, worse).share - stated[-1] < 0.01 + 1e-9
    assert not differ(found, stated)


def test_a_page_names_its_weakest_ratio_and_says_what_most_runs_would_show():
    guard = Claim("itl_p99_ms", "new", "concurrency=8", Bound.ratio_at_most, 1.05, "base", "concurrency=8")
    given = result(plots=(), noise=1e-6, claims=(*result().info.claims, guard))  # shows no difference, and would a loss
    wild = [replace(row, value=row.value * 0.5 * 1.1**row.repeat) if (row.variant, row.metric, row.point)
            == ("new", "ttft_p50_ms", "concurrency=8") else row for row in given.rows]  # fmt: skip
    where = "chunked prefill, 512 tokens a step, time to first token, concurrency 8"
    # Standard error: log(1.1) sqrt(2.5 / 5) = 0.0674: 0.0953 / 0.0674 - 2.776 = -1.362, 0.0674 (2.776 + 0.842) = 0.244
    shown = f"8 % of such runs of one process, one of 28 % in 80 % ({where}); of the other 3 ratios in 100 %"
    assert power_of(replace(given, rows=tuple(wild))) == shown


def test_a_page_says_no_more_of_power_than_its_pairs_do():
    several, one = {(0, 0): 1.0, (0, 1): 1.1, (1, 0): 1.2, (1, 1): 1.0}, {(0, 0): 1.0}
    ones = dict.fromkeys(several, 1.0)
    assert "of one process" not in power_of(a_run(several, ones))
    assert (
        power_of(a_run(one, ones))
        == "less than 1 % of such runs of one process (demo, time to first token, concurrency 8)"
    )
    assert power_of(a_run(ones, ones)).startswith("100 % of such runs (")
    alike = {(0, 0): 1.0, (0, 1): 1.0}
    assert power_of(a_run(alike, alike)) == "", "one process says nothing of another one"
    assert power_of(a_run(one, one, hardware="simulated-h200")) == ""
    assert power_of(a_run(several, ones, baseline=None)) == ""
    growth = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 4, "new", "concurrency=1")
    assert "the other" not in power_of(
        result(claims=(growth,), plots=(), metrics={"ttft_p50_ms": METRICS["ttft_p50_ms"]})
    )


def test_the_html_page_states_it_too():
    given = result(plots=())
    html = document({"demo": screen(given, lambda info: 0)}, {})
    assert f"<strong>Power</strong>: a loss of 10 % would be detected in {power_of(given)}." in html
