"""The search for the highest rate that keeps the SLO: where it ends, what it stores, and what it refuses."""

from dataclasses import replace

import pytest
from small_runs import measured, probe

from experiments.lab.config.spec import PREDICTED
from experiments.lab.judge import formulas, validity
from experiments.lab.measure.clocks import Drift, Watch
from experiments.lab.measure.kinds import Kind
from experiments.lab.measure.rate_search import RateSearch
from experiments.lab.measure.session import Session
from experiments.lab.measure.traces import HostUse, RequestTrace, Served
from experiments.lab.workloads.random import Fixed, MultiTurn
from experiments.lab.workloads.text import Text
from experiments.lab.workloads.trace import Trace
from mini_infer.core.errors import ConfigError

SEARCH = {"low_per_s": 100, "high_per_s": 1600, "steps": 2, "at": {"workload.arrivals": "poisson"}}
OUTSIDE = "not shown: there is no knee from 100 to 1600 requests/s"
LOAD = ["workload=fixed", "workload.count=4", "workload.prompt_tokens=40", "workload.output_tokens=3"]


@pytest.fixture
def build(compose_config):
    values = {
        "variants": {"engine": {}},
        "baseline": "engine",
        "metrics": ["slo_share", "slo_rate_rps"],
        "slo": {"ttft_ms": 60_000},
        "search": SEARCH,
    }
    settings = ("model=dry", "measure.repeats=2", "engine.cache.num_blocks=128", *LOAD)
    return lambda **experiment: probe(compose_config, *settings, **{**values, **experiment})


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The machine that runs the tests is busy: neither a client that falls behind nor what a pass does beside its
    requests is what they are about."""
    for allowed in ("LAG_S", "OUTSIDE_S", "EDGE_S", "LITTLE_S"):
        monkeypatch.setattr(validity, allowed, 10.0)


def found(findings):
    return [(row.value, row.reason) for row in findings.rows if row.metric == "slo_rate_rps"]


def test_rates_rise_by_one_factor():
    assert RateSearch(2, 32, steps=2).rates == [2, 8, 32]
    assert RateSearch(1, 64, steps=3).rates == [1, 2, 4, 8, 16, 32, 64]
    assert RateSearch(1, 4, steps=2, doublings=2).rates == [1, 2, 4, 8, 16]
    assert RateSearch(1, 64, steps=4, doublings=1).rates[14:] == [64, 86.14, 115.9, 156.0]  # 3 steps to a doubling
    assert RateSearch().rates == RateSearch().points(Fixed()) == []


def test_requests_are_more_where_a_rate_takes_more_for_its_seconds():
    search = RateSearch(1, 4, steps=2, seconds=10)
    assert counts(search, Fixed()) == [16, 20, 40]
    assert counts(replace(search, at={"workload.count": 30}), Fixed()) == [30, 30, 40]
    assert counts(replace(search, seconds=100), Text()) == [100, Text.most, Text.most]
    assert counts(search, MultiTurn(), "conversations") == [10, 20, 40]
    assert counts(search, Trace()) == [None] * 3  # which has no more than its file


def counts(search, load, name="count"):
    return [point.values.get(f"workload.{name}") for point in search.points(load)]


def test_where_all_is_kept_the_knee_is_not_shown(build):
    experiment = build()
    findings = measured(experiment)
    assert found(findings) == [(0.0, OUTSIDE)] * 2
    assert not any(row.is_fault for row in findings.rows)
    assert "engine, search 1: 100 % of the requests kept the SLO at 1600/s, the end of the range." in findings.notes
    assert [point.name for point in findings.points] == ["", "search at 400/s", "search at 1600/s", "search"]
    assert {row.point for row in findings.rows if row.metric == "slo_share"} == {
        "", "search at 400/s", "search at 1600/s"
    }  # fmt: skip


def test_where_nothing_is_kept_there_is_no_rate(build):
    findings = measured(build(slo={"ttft_ms": 1e-6}))
    assert found(findings) == [(0.0, OUTSIDE)] * 2
    assert "engine, search 2: 0 % of the requests kept the SLO at 100/s, the end of the range." in findings.notes


@pytest.fixture
def planted(monkeypatch):
    """`change(row, rate)` is what becomes of the fields of each row of a pass; the rates of the passes, in order."""
    real, passes = Session.alone, []

    def plant(change):
        def alone(self, cell, inputs, repeat, planned=True):
            passes.append(cell.workload.rate_per_s)
            rows = real(self, cell, inputs, repeat, planned)
            return [replace(row, **change(passes[-1])) for row in rows]

        monkeypatch.setattr(Session, "alone", alone)
        return passes

    return plant


def test_two_rates_enclose_the_answer(build, planted):
    planted(lambda rate: {"value": 0.95 if rate < 1000 else 0.5})
    findings = measured(build())
    assert found(findings) == [(400.0, "")] * 2
    told = (
        "engine, search 2: 95 % of the requests kept the SLO at 400/s and 50 % of the requests kept the SLO at 1600/s."
    )
    assert told in findings.notes


def test_some_variants_alone_are_searched_and_less_often_than_passes_are_repeated(build, planted):
    made = planted(lambda rate: {"value": 1.0 if rate < 1000 else 0.0})
    variants = {name: {} for name in ("engine", "other", "third")}
    findings = measured(build(variants=variants, search={**SEARCH, "variants": ["third", "other"], "repeats": 1}))
    rows = [row for row in findings.rows if row.metric == "slo_rate_rps"]
    assert [(row.variant, row.repeat, row.value) for row in rows] == [("other", 0, 400.0), ("third", 0, 400.0)]
    assert made == [400, 1600] * 2
    assert {row.variant for row in findings.rows if row.metric == "slo_share"} == set(variants)


@pytest.mark.parametrize(
    ("search", "claim", "why"),
    [
        ({"variants": ["thrid"]}, {}, "there is no variant 'thrid'; did you mean 'third'"),
        ({"repeats": 3}, {}, "search.repeats=3 must be 1, or measure.repeats=2"),
        ({"variants": ["third"]}, {"variant": "engine", "at_least": 9}, "about engine, which .* leaves out"),
        ({"variants": ["third"]}, {"variant": "third", "ratio_at_least": 1}, "about engine, which .* leaves out"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(build, search, claim, why):
    claims = [{"metric": "slo_rate_rps", "at": {"search": "result"}, **claim}] if claim else []
    with pytest.raises(ConfigError, match=why):
        build(variants={"engine": {}, "third": {}}, search={**SEARCH, **search}, claims=claims)


def test_a_search_of_variants_that_are_not_measured_is_one_of_those_that_are(build):
    search = {**SEARCH, "variants": ["other"]}
    spec = build(variants={"engine": {}, "other": {}}, search=search).spec
    assert spec.search.among(["engine", "other", f"other{PREDICTED}"]) == ["other", f"other{PREDICTED}"]
    assert spec.without(["other"]).search.among(["engine"]) == [], "who was not to be searched is not"
    assert spec.served_by(Kind.served).search.among(["served"]) == ["served"]


@pytest.mark.parametrize(
    ("knee", "passes", "answer"),
    [
        (300, [200, 400], (200.0, "")),
        (700, [200, 400, 800], (400.0, "")),
        (1000, [200, 400, 800, 1600], (800.0, "")),
        (9999, [200, 400, 800, 1600], (0.0, OUTSIDE)),
    ],
)
def test_where_all_is_kept_the_range_is_doubled_until_there_is_a_knee(build, planted, knee, passes, answer):
    made = planted(lambda rate: {"value": 1.0 if rate < knee else 0.0})
    search = {**SEARCH, "high_per_s": 400, "doublings": 2}
    findings = measured(build(search=search))
    assert found(findings) == [answer] * 2
    assert made == passes * 2
    end = "engine, search 1: 100 % of the requests kept the SLO at 1600/s, the end of the range, 2 doublings above it."
    assert (end in findings.notes) == (knee > 1600)


def test_a_pass_that_does_not_count_ends_the_search_and_is_not_made_again(build, planted):
    made = planted(lambda rate: {"valid": False, "reason": "planted"})
    assert found(measured(build())) == [(0.0, "the pass at 400/s does not count: planted")] * 2
    assert made == [400, 400]  # one a repeat


def test_that_a_burst_was_in_time_shows_no_knee(build, monkeypatch):
    """Nobody had to wait, since hardly anybody had come."""
    monkeypatch.setattr(Served, "is_burst", property(lambda served: served.arriving_s is not None))
    metrics = ["slo_share", "slo_rate_rps", "goodput_rps"]
    why = "not shown: the requests at 400/s had all come before a queue could form; raise workload.count or "
    assert found(measured(build(metrics=metrics))) == [(0.0, f"{why}experiment.search.seconds")] * 2
    late = measured(build(metrics=metrics, slo={"ttft_ms": 1e-6}))
    assert found(late) == [(0.0, OUTSIDE)] * 2, "where they had to wait, a queue has formed"


def test_a_pass_is_made_again_where_the_machine_changed_its_speed(build, monkeypatch):
    drifts = iter([Drift()] * 2 + [Drift(host=0.2)] * 2 + [Drift()] * 99)  # the first ones of what is not searched
    monkeypatch.setattr(Watch, "after", lambda *_: next(drifts))
    findings = measured(build(slo={"ttft_ms": 1e-6}))
    tried = [row.valid for row in findings.rows if (row.point, row.repeat) == ("search at 400/s", 0)]
    assert tried == [False, False, True]
    assert {r.attempt for r in findings.requests if (r.point, r.repeat) == ("search at 400/s", 0)} == {0, 1, 2}
    assert found(findings) == [(0.0, OUTSIDE)] * 2


def test_drafts_on_made_up_prompts_are_left_out_before_anything_runs(build):
    claims = [{"metric": "slo_share", "variant": v, "at_least": 0.1} for v in ("engine", "ngram")]
    two = {"engine": {}, "ngram": {"label": "n-grams", "speculation": {"method": "ngram"}}}
    experiment = build(variants=two, search={}, metrics=["slo_share"], claims=claims)
    assert (list(experiment.variants), [claim.variant for claim in experiment.claims]) == (["engine"], ["engine"])
    (note,) = (note for note in measured(experiment).notes if note.startswith("Left out: n-grams. Of these drafts"))
    assert "workload=text" in note
    asked = measured(build(variants={"engine": {"speculation": {"method": "ngram"}}}, search={}, metrics=["slo_share"]))
    assert {row.reason.partition(",")[0] for row in asked.rows} == {"drafts would be verified on random tokens"}


def test_it_can_be_claimed(build):
    claim = {"metric": "slo_rate_rps", "variant": "engine", "at": {"search": "result"}, "at_least": 10}
    (resolved,) = build(claims=[claim]).claims
    assert resolved.point == "search"


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ({"search": {**SEARCH, "high_per_s": 50}}, "low_per_s=100 must be below high_per_s=50"),
        ({"search": {"low_per_s": 5}}, "needs both low_per_s and high_per_s"),
        ({"search": {**SEARCH, "steps": 1}}, "steps must be from 2 to 8, got 1"),
        ({"search": {**SEARCH, "share": 0}}, "share must be above 0, got 0"),
        ({"search": {**SEARCH, "at": {"workload.rate_per_s": 3}}}, "must not give workload.rate_per_s"),
        ({"metrics": ["slo_share"]}, "experiment.search needs the metric slo_rate_rps"),
        ({"search": {}}, "slo_rate_rps is what a search finds"),
        ({"slo": {}}, "the metric slo_share needs experiment.slo"),
    ],
)
def test_what_cannot_be_searched_is_refused(build, experiment, message):
    with pytest.raises(ConfigError, match=message):
        build(**experiment)


def test_a_server_elsewhere_needs_its_url(build):
    with pytest.raises(ConfigError, match=r"via=url needs the server's address: peers\.http\.url"):
        build(variants={"engine": {"kind": Kind.http.value}})


def test_what_the_host_spends_a_token_worked_out_by_hand():
    request = RequestTrace(4, 4, 0.0, (1.0, 2.0, 2.0, 3.0), (1, 2, 3, 4), cached_tokens=2)
    host = HostUse(client_s=4e-5, client_busy=0.25, tells_cached=True, api_s=8e-5)
    names = ["client_cpu_us", "api_cpu_us", "engine_cpu_us", "client_busy", "tokens_per_read", "prefix_hit_rate"]
    values = formulas.measure(Served((request,), 0.0, 4.0, host=host, window=(0.0, 2.5)), names)
    assert values["client_cpu_us"] == pytest.approx(10)
    assert values["api_cpu_us"] == pytest.approx(20)
    assert not values["engine_cpu_us"].applies  # of a server that is not ours
    assert (values["client_busy"], values["tokens_per_read"], values["prefix_hit_rate"]) == (0.25, 4 / 3, 0.5)
    assert not any(value.applies for value in formulas.measure(Served((request,), 0.0, 4.0), names).values())
