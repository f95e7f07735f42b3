"""Knees of searches whose place is known: planted passes, outside of the range as well, and what is told of them."""

import math
from dataclasses import replace

import made_up
import pytest

from experiments.lab.judge import knees, stats
from experiments.lab.judge.claims import Bound, Claim, Verdict
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.judge.stats import Kept
from experiments.lab.show import wording
from experiments.lab.show.answer import sentence
from experiments.lab.show.compare import compare
from experiments.lab.show.grids import Sheet
from experiments.lab.store import result as store
from experiments.lab.store.rows import NOT_SHOWN, Row

RATES = [10.0, 20.0, 40.0]
METRICS = {
    "slo_share": Metric("share of requests", "", Better.higher, share=True),
    "slo_rate_rps": Metric("highest rate", "requests/s", Better.higher),
}


def searched(*by_knee, variants=made_up.VARIANTS, rates=RATES, **changes):
    """A result of variants, each with one true knee a repeat, which every rate below it keeps."""
    points = {f"search at {rate:g}/s": {"workload.rate_per_s": rate} for rate in rates} | {"search": {}}
    rows = []
    for variant, own in zip(variants, by_knee, strict=True):
        for repeat, knee in enumerate(own):
            shares = {rate: 0.95 if rate <= knee else 0.5 for rate in rates}
            rows += [Row(variant, f"search at {rate:g}/s", repeat, "slo_share", s, "") for rate, s in shares.items()]
            kept = [rate for rate in rates if rate <= knee]
            reason = "" if 0 < len(kept) < len(rates) else f"{NOT_SHOWN}the knee lies outside"
            found = 0.0 if reason else kept[-1]
            rows.append(Row(variant, "search", repeat, "slo_rate_rps", found, "requests/s", not reason, reason))
    config = {"experiment": {"search": {"share": 0.9}}, "measure": {"processes": 1}}
    made = made_up.result(rows=rows, metrics=METRICS, gates=())
    settings = {"points": points, "claims": (), "plots": (), "config": config, **changes}
    return replace(made, info=replace(made.info, **settings))


def told(result, variant="base"):
    return wording.interval(result.estimate(variant, "search", "slo_rate_rps"))


@pytest.mark.parametrize(
    ("planted", "shown"),
    [
        ([25, 30, 35], "20 [20, 40]"),  # the same rates in every repeat: as wide as the step between them
        ([25, 99, 35], "20 [10, ∞]"),  # what is open ends nowhere; else the rates that were searched are all there is
        ([25, 99, 99], "> 40 [11.7, ∞]"),
        ([99, 99, 99], "> 40 [40, ∞]"),
        ([25, 5, 35], "20 [0, 40]"),
        ([5, 5, 35], "< 10 [0, 40]"),
        ([15, 25, 35], "10, 20 and 20"),
        ([15, 25], "10 and 20"),  # all told: of two or three values an interval is wide by chance
        ([15, 99], "> 25 [10, ∞]"),  # nobody knows both
        ([5, 5, 5], "< 10 [0, 10]"),
        ([99], "> 40"),
        ([25], "20"),
    ],
)
def test_repeats_outside_of_the_range_count_as_above_or_below_it(planted, shown):
    assert told(searched(planted, planted)) == shown


def test_without_them_the_median_would_be_below_what_most_repeats_reached():
    result = searched([25, 99, 99, 99, 35], [25] * 5)
    assert told(result).startswith("> 40")
    assert stats.median([row.value for row in result.rows if row.metric == "slo_rate_rps" and row.valid]) == 20


def test_a_ratio_is_as_open_as_the_rates_leave_it_and_there_is_none_to_a_knee_outside():
    def ratio(*planted):
        result = searched(*planted)
        return stats.ratio(*(result.values(v, "search", "slo_rate_rps") for v in ("new", result.info.baseline)))

    alike = ratio([25, 30, 35], [25, 30, 35])
    assert (alike.median, alike.low, alike.high, alike.told) == (1, 0.5, 2, 0)
    one_step = ratio([15, 15, 15], [25, 30, 35])
    assert (one_step.median, one_step.low, one_step.high, one_step.told) == (2, 1, 4, 0)
    assert ratio([25, 30, 35], [25, 99, 35]) is None
    assert ratio([25, 5, 35], [25, 30, 35]) is None


@pytest.mark.parametrize(
    ("planted", "bound", "value", "verdict"),
    [
        ([99, 99, 99], Bound.at_least, 30, Verdict.supported),
        ([99, 99, 99], Bound.at_most, 30, Verdict.refuted),
        ([99, 99, 99], Bound.at_least, 80, Verdict.inconclusive),  # nobody knows how far above the range
        ([25, 30, 35], Bound.at_least, 30, Verdict.inconclusive),  # which lies between two rates that were tried
        ([5, 5, 5], Bound.at_least, 20, Verdict.refuted),
    ],
)
def test_claims_are_judged_by_where_the_knee_can_be(planted, bound, value, verdict):
    claim = Claim("slo_rate_rps", "base", "search", bound, value)
    assert searched(planted, planted, claims=(claim,)).judgements[0].verdict is verdict


def test_no_interval_of_knees_leaves_the_range_that_was_searched():
    """Rates of it that no search has visited are of it, too; above its end it goes on by doublings."""
    search = {"low_per_s": 9.5, "high_per_s": 40.4, "steps": 5}  # factors of 1.049, of which 15 double a rate and more
    for more, ends in (({}, (9.5, 40.4)), ({"doublings": 1}, (9.5, 83.3)), ({"doublings": 2}, (9.5, 85.8))):
        config = {"experiment": {"search": {"share": 0.9, **search, **more}}}
        found = searched([15, 25, 35], [15, 25, 35], config=config).estimate("base", "search", "slo_rate_rps")
        assert (found.low, found.high) == pytest.approx(ends, abs=0.1), more
        assert found.uncut == pytest.approx((5.9, 85.8), abs=0.1), "by which claims are judged"


def test_a_ratio_of_knees_is_no_wider_than_the_range_and_two_are_told():
    result = searched([15, 25, 35], [35, 25, 15])
    found = result.ratio(("new", "search"), ("base", "search"), "slo_rate_rps")
    assert (found.low, found.high) == (0.25, 4), "the lowest rate over the highest, and the other way round"
    assert found.uncut[0] < 0.25
    result = searched([15, 25], [35, 15])
    assert wording.interval(result.ratio(("new", "search"), ("base", "search"), "slo_rate_rps"), "x") == "0.500x and 2x"


@pytest.mark.parametrize(("bound", "value"), [(Bound.at_least, 10), (Bound.at_most, 40)])
def test_where_the_range_ends_shows_nothing_of_a_bound_there(bound, value):
    """Three searches that ended inside of it do not show that every one would."""
    claim = Claim("slo_rate_rps", "base", "search", bound, value)
    (judged,) = searched([15, 25, 35], [15, 25, 35], claims=(claim,)).judgements
    assert (judged.estimate.low, judged.estimate.high, judged.verdict) == (10, 40, Verdict.inconclusive)
    assert judged.reason == "the interval holds the bound, as searches may scatter from 5.87 to 85.8"


@pytest.mark.parametrize(
    ("base", "new", "told"),
    [
        ([15] * 3, [99] * 3, "Best in requests/s within the SLO: new ("),
        ([5] * 3, [25] * 3, "Best in requests/s within the SLO: new ("),
        ([99] * 3, [99] * 3, "No difference is shown in requests/s within the SLO: "),
        ([25, 30, 35], [25, 99, 99], "No difference is shown in requests/s within the SLO: "),
        ([25, 30, 35], [25, 30, 35], "No difference is shown in requests/s within the SLO: "),
        ([99], [25], "No difference can be shown by one repeat in requests/s within the SLO: "),
    ],
)
def test_the_best_setting_is_the_first_word_where_it_is_shown(base, new, told):
    result = searched(base, new, metrics={name: METRICS[name] for name in ("slo_rate_rps", "slo_share")})
    assert sentence(result).replace(made_up.VARIANTS["new"], "new").startswith(told)


MANY = [10.0, 20.0, 40.0, 80.0, 160.0, 320.0]
SETTINGS = {"base": "as configured", "a": "first", "b": "second", "c": "third"}
WITHIN = "requests/s within the SLO (90 % of the requests: first token in 500 ms, then one every 50 ms on average)"


def among(*by_knee, tokens_per_s=(), in_time=1.0):
    """Searches of so many settings, which generate so many tokens a second with 8 requests in flight."""
    variants = dict(list(SETTINGS.items())[: len(by_knee)])
    found = searched(*by_knee, variants=variants, rates=MANY)
    rows = list(found.rows)
    for repeat in range(len(by_knee[0])):
        for column, (variant, rate) in enumerate(zip(variants, tokens_per_s, strict=False)):
            kept = in_time[column] if isinstance(in_time, tuple) else in_time
            own = {"output_tokens_per_s": rate * (1 + 0.001 * repeat * column), "slo_share": kept}
            rows += [Row(variant, "concurrency=8", repeat, name, value, "") for name, value in own.items()]
    metrics = {
        name: {**METRICS, **made_up.METRICS}[name] for name in ("slo_rate_rps", "output_tokens_per_s", "slo_share")
    }
    points = {"concurrency=8": {"workload.concurrency": 8}, **found.info.points}
    config = {**found.info.config, "experiment": {"search": {"share": 0.9}, "slo": {"ttft_ms": 500, "tpot_ms": 50}}}
    told = replace(found.info, variants=variants, metrics=metrics, points=points, config=config)
    return sentence(replace(found, info=told, rows=tuple(rows)))


def test_the_answer_names_the_setting_with_the_highest_rate_and_its_ratio_to_what_is_configured():
    low, middle, high = [15, 15, 15], [75, 75, 75], [300, 300, 300]
    assert among(low, high) == (
        f"Best in {WITHIN}: first, 16x [8, 32] of as configured (as configured 10 [10, 20]; first 160 [160, 320])."
    )
    three = among(low, high, middle, low)
    assert three.startswith(
        f"Best in {WITHIN}: first, 16x [8, 32] of as configured, 4x [2, 8] of second (as configured"
    )
    assert among(low, high, [150, 150, 150]).endswith(". Not told apart from it: second.")
    assert among(high, low, middle).startswith(
        f"Best in {WITHIN}: as configured, 4x [2, 8] of second (as configured 160"
    )
    open_ended = among(low, [999, 999, 999])
    assert open_ended == f"Best in {WITHIN}: first (as configured 10 [10, 20]; first > 320 [320, ∞])."


def test_the_answer_says_that_no_setting_is_told_apart_and_which_are_worse():
    middle, low = [75, 75, 75], [15, 15, 15]
    told = among(middle, [75, 75, 150], middle)
    between = "No difference is shown between as configured and any of 2 other settings in"
    assert told.startswith(f"{between} {WITHIN}: as configured 40 [40, 80]; ")
    assert "worse" not in told
    with_worse = among([150, 150, 150], [150, 150, 150], low)
    assert with_worse.startswith(f"No difference is shown between as configured and first in {WITHIN}: ")
    assert with_worse.endswith("; worse: second, 0.125x [0.0625, 0.250] of as configured.")


def test_where_rates_do_not_tell_settings_apart_a_closed_loop_that_keeps_the_slo_does():
    alike = [[75, 75, 75]] * 2
    first, second = among(*alike, tokens_per_s=(1000, 1100)).split(". ")
    assert first.startswith(f"No difference is shown in {WITHIN}: ")
    assert second.startswith("Best in tokens/s, concurrency 8, where the SLO is kept: first, 1.10x [")
    assert "Best" not in among(*alike, tokens_per_s=(1000, 1000))
    assert "concurrency 8" not in among(*alike, tokens_per_s=(1000, 1100), in_time=0.5), "nobody wants it there"
    assert "concurrency 8" not in among([15] * 3, [300] * 3, tokens_per_s=(1000, 900)), "the rates have told already"
    only = among(*alike, tokens_per_s=(1000, 1100), in_time=(0.5, 1.0))
    assert only.endswith(". The SLO is kept at concurrency 8 by first, and not by as configured.")


def test_of_settings_that_have_nothing_none_is_the_best():
    """Two intervals from 0 to 0 have an end in common, which tells knees apart, and nothing else."""
    given = searched(
        [25] * 3, [25] * 3, metrics={"slo_share": made_up.METRICS.get("slo_share") or METRICS["slo_share"]}
    )
    rows = [replace(row, value=0.0) if row.metric == "slo_share" else row for row in given.rows]
    assert sentence(replace(given, rows=tuple(rows))).startswith("No difference is shown")


def test_a_ratio_that_is_claimed_says_why_there_is_none():
    claim = Claim("slo_rate_rps", "new", "search", Bound.ratio_at_least, 1.0, "base", "search")
    (judged,) = searched([25, 25], [25, 99], claims=(claim,)).judgements
    assert judged.reason == "the knee lies outside of the searched range, which tells no ratio"


def test_the_page_tells_what_lies_outside_and_stored_rows_stay_as_they_are(tmp_path):
    result = searched([99, 99, 99], [25, 30, 35])
    sheet = Sheet(result)
    assert sheet.value("base", "search", "slo_rate_rps") == "> 40 [40, ∞]"
    assert sheet.ratio("new", "search", "slo_rate_rps") == "-"
    again = store.read(store.write(tmp_path, result))
    assert again.rows == result.rows
    assert told(again) == "> 40 [40, ∞]"


def test_two_results_are_compared_by_where_their_knees_can_be(tmp_path):
    first = store.write(tmp_path / "a", searched([15, 15, 15], [99, 99, 99]))
    text = compare(first, store.write(tmp_path / "b", searched([25, 30, 35], [25, 30, 35])))
    assert "10 [10, 20]   20 [20, 40]  2x [1, 4]  no difference shown" in text
    assert "a knee outside of the range" in text


def test_older_results_with_the_end_of_the_range_as_their_answer_are_bracketed_too():
    result = searched([99, 99, 99], [25, 30, 35])
    old = [replace(r, value=40.0, valid=True, reason="") if r.reason else r for r in result.rows]
    assert told(replace(result, rows=tuple(old))) == "> 40 [40, ∞]"


def test_a_search_that_was_not_decided_and_a_peer_that_is_not_there_have_no_knee():
    result = searched([25, 30, 35], [25, 30, 35])
    spoiled = [replace(r, valid=False, reason="the pass at 20/s does not count") if r.repeat == 1 else r
               for r in result.rows]  # fmt: skip
    found = knees.bracketed(spoiled, result.info.points, result.info.config)
    values = [r.value for r in found if r.metric == "slo_rate_rps" and r.variant == "base" and r.valid]
    assert [(value, value.missed) for value in values] == [(20, 40), (20, 40)]


def test_a_figure_of_some_points_alone_has_rows_at_others():
    result = searched([25, 30, 35], [25, 30, 35])
    some = {name: settings for name, settings in result.info.points.items() if name != "search"}
    assert replace(result, info=replace(result.info, points=some)).table.values("base", "search", "slo_rate_rps")
    alone = replace(result, info=replace(result.info, points={"search": {}}))
    assert told(alone) == "20"  # without its passes nobody knows what was missed


def test_the_knee_stands_in_the_answer_although_no_claim_names_it():
    result = searched([25, 30, 35], [25, 30, 35])
    at = next(name for name in result.info.points if name != "search")
    about = Claim("slo_share", "new", at, Bound.at_least, 0.9)
    told = sentence(replace(result, info=replace(result.info, claims=(about,))))
    assert told.endswith("; requests/s within the SLO 20 [20, 40].")
    variants = {"base": {"kind": "vllm_served"}, "new": {}}
    config = {**result.info.config, "experiment": {**result.info.config["experiment"], "variants": variants}}
    beside = replace(result, info=replace(result.info, claims=(about,), config=config))
    assert f"; requests/s within the SLO 20 [20, 40], {made_up.VARIANTS['base']} 20 [20, 40]." in sentence(beside)


def test_values_that_are_no_knees_are_estimated_as_ever():
    values = {(0, 0): 20.0, (0, 1): 40.0}
    knee = {turn: Kept(value, math.inf) for turn, value in values.items()}
    assert stats.absolute(values).beyond == ""
    assert stats.in_range(values)
    assert not stats.in_range(knee)


def test_goodput_at_a_stated_rate_is_what_is_kept_of_it():
    """A second of arrivals, and a second in which the last answers end: nobody has missed anything."""
    shares = [Row("new", "fast", repeat, "slo_share", share, "") for repeat, share in enumerate((1.0, 0.5))]
    slow = Row("new", "8 clients", 0, "goodput_rps", 7.0, "requests/s")
    rows = [Row("new", "fast", repeat, "goodput_rps", 30.0, "requests/s") for repeat in (0, 2)]
    lost = Row("old", "fast", 0, "goodput_rps", 0.0, "requests/s", valid=False, reason="a request failed")
    points = {"fast": {"workload.rate_per_s": 60.0}, "8 clients": {"workload.concurrency": 8}}
    found = knees.with_goodput([*shares, *rows, slow, lost], points, {})
    good = {(row.variant, row.point, row.repeat): row.value for row in found if row.metric == "goodput_rps"}
    fast = {("new", "fast", 0): 60.0, ("new", "fast", 2): 30.0}  # of repeat 1 it was not told
    assert good == {**fast, ("new", "8 clients", 0): 7.0, ("old", "fast", 0): 0.0}
    assert knees.with_goodput(shares, points, {}) == shares, "where nobody asks for it"


def test_goodput_is_never_said_to_be_more_than_was_offered():
    shares = [Row("new", "fast", 0, "slo_share", share, "", process=n) for n, share in enumerate((0.05, 0.12, 0.004))]
    rows = [Row("new", "fast", 0, "goodput_rps", 1.0, "requests/s", process=n) for n in range(3)]
    found = knees.with_goodput([*shares, *rows], {"fast": {"workload.rate_per_s": 100.0}}, {})
    values = {(row.process, 0): row.value for row in found if row.metric == "goodput_rps"}
    assert stats.absolute({turn: float(value) for turn, value in values.items()}).high > 100
    assert stats.absolute(values).high == 100


@pytest.mark.parametrize(("shares", "told"), [((0.5, 0.1), [30.0, 6.0]), ((1.0, 0.5), [])])
def test_passes_too_short_for_a_rate_tell_goodput_where_all_of_them_were_late(shares, told):
    """A queue has formed then; of one that was late among others that were not nobody knows."""
    why = "not shown: what counts of the requests has come within 8 s"
    rows = [Row("new", "fast", n, "slo_share", share, "") for n, share in enumerate(shares)]
    rows += [Row("new", "fast", n, "goodput_rps", 0.0, "", valid=False, reason=why) for n in range(2)]
    found = knees.with_goodput(rows, {"fast": {"workload.rate_per_s": 60.0}}, {})
    assert [row.value for row in found if row.metric == "goodput_rps" and row.valid] == told
    assert knees.offered({"mix": "long prompts", "rate_per_s": 6.0}) == 6.0
