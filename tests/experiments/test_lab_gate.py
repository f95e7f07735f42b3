"""The gate finds a planted wrong token, and claims are judged by intervals."""

import math
from dataclasses import replace

import pytest

from experiments.lab.config.points import Point
from experiments.lab.config.spec import ClaimSpec
from experiments.lab.judge.claims import Bound, Claim, Verdict, judge, resolve_all
from experiments.lab.judge.gate import Difference, compare
from experiments.lab.store.rows import Row, Table
from mini_infer.core.errors import ConfigError


def test_equal_outputs_pass():
    outputs = [[1, 2, 3], [4, 5]]
    once = compare("v", "p", outputs, outputs)
    result = once.joined(once)
    assert result.passed
    assert (result.equal_tokens, result.total_tokens, result.share) == (10, 10, 1.0)


@pytest.mark.parametrize(
    ("got", "difference", "equal"),
    [
        ([[1, 2, 3], [4, 9]], Difference(1, 1, 5, 9), 4),
        ([[7, 2, 3], [4, 5]], Difference(0, 0, 1, 7), 2),  # what follows a difference does not count as equal
        ([[1, 2], [4, 5]], Difference(0, 2, 3, None), 4),
        ([[1, 2, 3, 8], [4, 5]], Difference(0, 3, None, 8), 5),
    ],
)
def test_a_planted_wrong_token_fails_the_gate(got, difference, equal):
    expected = [[1, 2, 3], [4, 5]]
    result = compare("v", "p", expected, expected).joined(compare("v", "p", expected, got))
    assert not result.passed
    assert result.first_difference == difference
    assert result.equal_tokens == 5 + equal


def rows(variant, values):
    return [Row(variant, "p", repeat, "speed", value, "tokens/s") for repeat, value in enumerate(values)]


def claim(bound, value):
    reference = ("base", "p") if bound.is_ratio else (None, None)
    return Claim("speed", "new", "p", bound, value, *reference)


@pytest.mark.parametrize(
    ("bound", "value", "verdict"),
    [
        (Bound.ratio_at_least, 1.0, Verdict.supported),
        (Bound.ratio_at_least, 2.0, Verdict.refuted),
        (Bound.ratio_at_least, 1.5, Verdict.inconclusive),
        (Bound.ratio_at_most, 2.0, Verdict.supported),
        (Bound.ratio_at_most, 1.0, Verdict.refuted),
        (Bound.at_least, 10.0, Verdict.supported),
        (Bound.at_most, 10.0, Verdict.refuted),
    ],
)
def test_verdicts_follow_the_interval(bound, value, verdict):
    measured = rows("base", [10.0] * 5) + rows("new", [14.0, 14.5, 15.0, 15.5, 16.0])
    assert judge(claim(bound, value), Table(measured), []).verdict is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (13.0, 17.0, Verdict.supported),
        (15.0, 17.0, Verdict.inconclusive),
        (13.0, 15.0, Verdict.inconclusive),
        (16.5, 18.0, Verdict.refuted),
        (10.0, 13.5, Verdict.refuted),
    ],
)
def test_a_claim_of_two_sides_needs_the_whole_interval_between_them(low, high, verdict):
    claimed = Claim("speed", "new", "p", Bound.within, low, upper=high)
    assert judge(claimed, Table(rows("new", [14.0, 14.5, 15.0, 15.5, 16.0])), []).verdict is verdict
    assert claimed.limits == (low, high)


def test_a_claim_is_judged_by_its_target_and_carries_its_aim():
    measured = rows("base", [10.0] * 5) + rows("new", [14.0, 14.5, 15.0, 15.5, 16.0])
    (claimed,) = resolved(at={"size": 1}, at_least=13.0, aim=20.0)
    assert judge(replace(claimed, point="p"), Table(measured), []).verdict is Verdict.supported
    assert (claimed.limits, claimed.aim) == ((13.0, math.inf), 20.0)


def resolved(*more, **changes):
    specs = [ClaimSpec(**{"metric": "speed", "variant": "new", **each}) for each in (changes, *more)]
    every = [Point.of({"size": size}) for size in (1, 8)]
    return resolve_all(specs, variants=["base", "new"], baseline="base", metrics=["speed"], points=every)


def test_a_claim_may_have_two_sides_and_be_made_everywhere():
    claims = resolved(everywhere=True, at_least=0.95, at_most=1.05)
    assert [(c.point, c.bound, c.value, c.upper) for c in claims] == [
        ("size=1", Bound.within, 0.95, 1.05),
        ("size=8", Bound.within, 0.95, 1.05),
    ]
    ratios = resolved(everywhere=True, ratio_at_least=0.98)
    assert [(c.point, c.reference_point) for c in ratios] == [("size=1", "size=1"), ("size=8", "size=8")]
    assert {c.reference_variant for c in ratios} == {"base"}


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([9.9, 10.0, 10.1, 10.0, 9.95], Verdict.supported),
        ([12.0, 12.1, 12.2, 11.9, 12.0], Verdict.refuted),
        ([8.0, 8.1, 8.2, 7.9, 8.0], Verdict.refuted),
        ([10.6, 11.0, 11.4, 10.8, 11.2], Verdict.inconclusive),
    ],
)
def test_a_ratio_may_have_two_sides(values, verdict):
    (found,) = resolved(at={"size": 1}, ratio_at_least=0.9, ratio_at_most=1.1)
    assert (found.bound, found.limits, found.reference_variant) == (Bound.ratio_within, (0.9, 1.1), "base")
    measured = Table(rows("base", [10.0] * 5) + rows("new", values))
    assert judge(replace(found, point="p", reference_point="p"), measured, []).verdict is verdict


def test_a_ratio_may_be_to_another_variant():
    (found,) = resolved(variant="base", to="new", at={"size": 1}, ratio_at_most=1.0)
    assert (found.reference_variant, found.reference_point) == ("new", "size=1")


def test_a_quantity_beside_one_reference_has_one_claim():
    at = {"at": {"size": 1}}
    assert len(resolved({**at, "ratio_at_least": 2}, {**at, "ratio_at_most": 3}, **at, at_least=5)) == 3
    with pytest.raises(ConfigError, match=r"claims\[1\] says again what a claim before it says of speed of new"):
        resolved({**at, "at_least": 6}, **at, at_least=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"everywhere": True, "at": {"size": 1}, "at_most": 1}, "leave out `at` and `against`"),
        ({"at": {"size": 1}, "to": "newer", "ratio_at_most": 1}, "another variant in `to`"),
        ({"at": {"size": 1}, "at_least": 2, "at_most": 1}, "nothing is at least 2.0 and at most 1.0"),
        ({"at": {"size": 1}, "at_least": 1, "ratio_at_most": 1}, "or at_least and at_most together; it has 2"),
        ({"at": {"size": 1}, "at_least": 2, "aim": 2}, "the aim, 2, must be stricter than at_least, 2.0"),
        ({"at": {"size": 1}, "ratio_at_most": 2, "aim": 3}, "must be stricter than ratio_at_most, 2.0"),
        ({"at": {"size": 1}, "at_least": 1, "at_most": 2, "aim": 1.5}, "an aim goes with one bound"),
    ],
)
def test_a_claim_that_says_nothing_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**changes)


def test_one_repeat_proves_nothing():
    measured = rows("base", [10.0]) + rows("new", [99.0])
    judged = judge(claim(Bound.ratio_at_least, 1.0), Table(measured), [])
    assert (judged.verdict, judged.reason) == (Verdict.inconclusive, "one repeat has no interval")


def test_the_speed_of_wrong_tokens_does_not_count():
    measured = rows("base", [10.0] * 5) + rows("new", [99.0] * 5)
    failed = compare("new", "p", [[1]], [[2]])
    judged = judge(claim(Bound.ratio_at_least, 1.0), Table(measured), [failed])
    assert judged.verdict is Verdict.inconclusive
    assert "tokens differ" in judged.reason


def test_invalid_rows_are_not_counted():
    measured = rows("base", [10.0] * 5) + rows("new", [20.0] * 5)
    spoiled = Row("new", "p", 5, "speed", 0.001, "tokens/s", valid=False, reason="a request failed")
    judged = judge(claim(Bound.at_least, 20.0), Table([*measured, spoiled]), [])
    assert judged.verdict is Verdict.supported
    assert judged.estimate.n == 5
