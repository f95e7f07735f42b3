"""Figures of how load is borne: goodput, throughput against latency, and how long requests and tokens waited."""

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from made_up import METRICS, engine_steps, requests, result
from test_lab_figures import names, rows

from experiments.lab.config import schema
from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.traces import GapRow, RequestTrace, Served, gap_rows
from experiments.lab.show import wording
from experiments.lab.show.figures import frame, gallery, load
from experiments.lab.store.rows import Row, to_csv

pytestmark = pytest.mark.slow  # some seconds together


def served(rates=(10, 20, 40, 80), reached=(10, 18.1, 30, 32)):
    metrics = {"goodput_rps": Metric("requests per second that met every SLO", "requests/s", Better.higher)}
    points = {f"{rate}/s": {"workload.rate_per_s": rate} for rate in rates}
    found = [row for rate, good in zip(rates, reached, strict=True)
             for row in rows({"base": good, "new": good / 2}, "goodput_rps", f"{rate}/s")]  # fmt: skip
    return result(metrics=metrics, points=points, rows=found, claims=(), gates=[], plots=())


def test_goodput_past_the_knee_stands_beside_what_was_offered():
    (ax,) = load.goodput(*load.goodput_of(served())).axes
    offered, own, *_ = (line for line in ax.lines if len(line.get_xdata()) > 1)
    assert list(offered.get_ydata()) == [0, 80]
    assert list(own.get_xdata()) == [10, 20, 40, 80]
    assert ax.get_title() == (
        "90% in time up to: whole prompts: 20 requests/s; chunked prefill, 512 tokens a step: no rate that was tried"
    )
    assert "goodput" in names(served())
    result = served()
    alone = replace(result, info=replace(result.info, variants={**result.info.variants, "other": "engine alone"}))
    assert load.goodput_of(alone)[1] == ax.get_title(), "nothing is said of what met no rate"
    long = replace(result, info=replace(result.info, variants={"base": "a" * 60, "new": "b" * 60}))
    assert load.goodput_of(long)[1].count(";\n") == 1
    assert load.goodput_of(served(rates=(1, 2), reached=(1, 2))) is None


@pytest.mark.parametrize("scale", ["tiny", "7b"])
def test_rates_with_numbers_of_requests_of_their_own_are_one_curve(compose_config, scale):
    """On a CPU one rate has its own, on a GPU all that the search tries."""
    config = compose_config("experiment=serving", f"scale={scale}")
    points = {point.name: dict(point.values) for point in schema.experiment_class(config).from_config(config).points}
    offered = {name: s["workload.rate_per_s"] for name, s in points.items() if "workload.rate_per_s" in s}
    knee = sorted(offered.values())[len(offered) // 2]
    found = rows({"new": 28}, "slo_rate_rps", "search")
    for n, (name, rate) in enumerate(offered.items()):  # the search of each variant goes its own way
        both = ("base", "new") if n % 2 else ("base",)
        found += rows({v: min(rate, knee) for v in both}, "goodput_rps", name)
    found += rows({"new": 28}, "slo_rate_rps", "search")
    given = result(metrics=served().info.metrics, points=points, rows=found, claims=(), gates=[], plots=())
    (ax,) = load.goodput(*load.goodput_of(given)).axes
    _, own, *_ = (line for line in ax.lines if len(line.get_xdata()) > 1)
    assert list(own.get_xdata()) == sorted(offered.values())
    told = ax.get_title().split(";")
    assert told[0].endswith(f": {wording.number(knee)} requests/s")
    assert "28.0 [28.0, 28.1] requests/s" in told[1], "what the search itself has found"


def test_throughput_against_latency_is_a_curve_of_those_in_flight():
    metrics = {**METRICS, "itl_p50_ms": Metric("inter-token latency, median gap", "ms", Better.lower)}
    given = result(sizes=(1, 8, 64))
    more = [replace(row, metric="itl_p50_ms") for row in given.rows if row.metric == "itl_p99_ms"]
    given = replace(given, rows=(*given.rows, *more), info=replace(given.info, metrics=metrics))
    assert "pareto" in names(given)
    (ax,) = load.pareto(*load.pareto_of(given)).axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "inter-token latency, median gap (ms)",
        "output tokens per second (tokens/s)",
    )
    assert load.pareto_of(result(sizes=(1, 8))) is None  # two points are no curve
    talks = {p: s | {"workload.conversations": 2 * n} for n, (p, s) in enumerate(given.info.points.items())}
    assert load.pareto_of(replace(given, info=replace(given.info, points=talks))) is not None
    apart = {name: {**s, "workload.seed": n} for n, (name, s) in enumerate(given.info.points.items())}
    assert load.pareto_of(replace(given, info=replace(given.info, points=apart))) is None


def curves(*variants):
    """A curve a variant through the same three settings: (milliseconds, tokens per second) of each."""
    metrics = {"itl_p50_ms": Metric("inter-token latency", "ms", Better.lower), **METRICS}
    names = {"itl_p50_ms": 0, "output_tokens_per_s": 1}
    points = {f"count={count}": {"workload.count": count} for count in (1, 64, 256)}
    found = [
        Row(f"v{index}", name, repeat, metric, at[place], "")
        for index, own in enumerate(variants)
        for name, at in zip(points, own, strict=True)
        for metric, place in names.items()
        for repeat in range(2)
    ]
    labels = {f"v{index}": f"variant {index}" for index in range(len(variants))}
    return result(metrics=metrics, points=points, rows=found, variants=labels, baseline="v0", claims=(), gates=[])


def placed(given):
    """Texts of points with their boxes, and where the curves' points are: in pixels of the figure as it is written."""
    (picture,) = (each for each in gallery.of(given).others if each.name == "pareto")
    figure = picture.draw()
    frame.png(figure, "demo")
    (ax,) = figure.axes
    marks = [ax.transData.transform(each.lines[0].get_xydata()) for each in ax.containers]
    return ax, [(text.get_text(), text.get_window_extent()) for text in ax.texts], np.concatenate(marks)


@pytest.mark.parametrize("many", [2, 6])
def test_every_point_of_a_curve_has_a_label_that_covers_nothing(many):
    ax, labels, marks = placed(curves(*([(2 + n / 3, 90), (3 + n / 2, 1000), (7 + n, 2000)] for n in range(many))))
    assert sorted(text for text, _ in labels) == sorted(["1", "64", "256"] * many)
    boxes = [box for _, box in labels]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.contains(*mark) for box in boxes for mark in marks)
    assert all(ax.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))


def test_points_that_cover_each_other_have_one_label():
    both = [(2, 90), (3, 1000), (7, 2000)]
    assert [text for text, _ in placed(curves(both, both))[1]] == ["1", "64", "256"]


def test_requests_and_tokens_of_one_point_have_their_distributions():
    given = result(steps=engine_steps(), requests=[*requests(), *requests(point="concurrency=1")])
    (picture,) = (picture for picture in chain(*gallery.of(given)) if picture.name == "waits")
    ttft, itl = picture.draw().axes
    assert len(ttft.lines[0].get_xdata()) == 21  # of the point whose steps are stored alone
    assert itl.get_xlabel() == "inter-token latency of a token, first pass (ms)"


def test_first_tokens_are_of_the_group_that_claims_are_about():
    """Gaps between tokens are stored of all requests together, which their axis says."""
    own = [replace(r, first_token_s=r.arrival_s + 9 + n / 9) if r.name == "stream" else r
           for n, r in enumerate(requests(point="concurrency=1"))]  # fmt: skip
    metrics = {"ttft_ms@stream": METRICS["ttft_p50_ms"], "ttft_ms@prompt": METRICS["ttft_p50_ms"],
               "itl_p99_ms@stream": METRICS["itl_p99_ms"], **METRICS}  # fmt: skip
    claim = Claim("ttft_ms@prompt", "base", "concurrency=1", Bound.at_most, 900.0)
    steps = engine_steps(point="concurrency=1")
    given = result(requests=own, steps=steps, metrics=metrics, rows=result().rows, claims=(claim,))
    firsts, itl = load.waits_of(given)
    assert max(firsts.values["base"][0]) < 1000
    assert len(firsts.values["base"][0]) == 10
    ttft, _ = load.waits([firsts, itl], given).axes
    assert (ttft.get_xlabel(), ttft.get_ylabel()) == (
        "time to first token of a prompt request (ms)",
        "share of prompt requests above (%)",
    )
    assert itl.label == "inter-token latency of a token of any request, first pass (ms)"


def test_only_passes_that_count_are_drawn():
    """All of them, by what their requests say, else by their rows; and of several attempts at a pass one."""
    waiting = requests(point="concurrency=1")
    late = [replace(r, first_token_s=r.first_token_s + 9, valid=False) for r in waiting]
    tries = [*late, *(replace(r, attempt=1, valid=True) for r in waiting), *(replace(r, repeat=1) for r in waiting)]
    for passes, own in ((2, tries), (1, [*late, *(replace(r, repeat=1, valid=True) for r in waiting)])):
        (found,) = load.waits_of(result(requests=own))
        assert len(found.values["base"][0]) == passes * len(waiting)
        assert max(found.values["base"][0]) < 1000
    given = result(requests=waiting, steps=engine_steps(point="concurrency=1"))
    assert len(load.waits_of(given)) == 2
    bad = [replace(r, valid=False, reason="short") if (r.point, r.repeat) == ("concurrency=1", 0) else r
           for r in given.rows]  # fmt: skip
    given = replace(given, rows=tuple(bad))
    assert load.waits_of(given) == []
    plot = PlotSpec("plot", "A title", (PanelSpec("ttft_p50_ms", PanelKind.gantt),))
    assert "plot" not in names(replace(given, info=replace(given.info, plots=(plot,))))


def test_gaps_between_tokens_are_drawn_of_whoever_tells_them():
    times = tuple(sorted([*(0.005 * n for n in range(100)), 0.7, 0.9]))
    trace = RequestTrace(10, 102, 0.0, times, ())
    (row,) = gap_rows("new", "concurrency=1", 0, Served((trace,), 0.0, 1.0))
    assert row.gaps == ("4.934x99", "198.5x1", "204.5x1")
    again = replace(row, repeat=1, gaps=("4.934x99", "300x2"))
    given = replace(result(requests=requests(point="concurrency=1")), gaps=(row, again))
    _, itl = load.waits(load.waits_of(given), given).axes
    assert itl.get_legend_handles_labels()[1] == [given.info.variants["new"]]
    assert itl.get_xlabel() == "inter-token latency of a token (ms)"
    assert [round(share, 1) for share in itl.lines[0].get_ydata()] == [100, 51.0, 2.0, 1.5, 1.0, 0], "of both passes"
    assert len(to_csv(GapRow, [row])) < 100
    assert gap_rows("new", "", 0, Served((replace(trace, token_times=(1.0,)),), 0.0, 1.0)) == []


def test_a_distribution_of_few_or_a_picture_of_many_is_not_drawn():
    few = requests(point="concurrency=1")[:9]
    assert "waits" not in names(result(requests=few))
    variants = {f"v{n}": f"variant {n}" for n in range(8)}
    each = [replace(request, variant=v) for v in variants for request in requests(point="concurrency=1")]
    given = result(variants=variants, baseline="v0", requests=each)
    (picture,) = (picture for picture in chain(*gallery.of(given)) if picture.name == "waits")
    assert picture.title == "How long requests waited, concurrency 1 (6 of 8 variants)"
    labels = picture.draw().axes[0].get_legend_handles_labels()[1]
    assert labels == [f"variant {n}" for n in (0, 1, 2, 3, 4, 7)], "those that claims name go first"


def test_a_picture_of_waiting_says_who_waited_and_where():
    waiting = requests(point="concurrency=1")
    title = {}
    for name, own in {"all": waiting, "alike": [replace(r, first_token_s=r.arrival_s + 0.1) for r in waiting]}.items():
        found = [p.title for p in chain(*gallery.of(result(requests=own))) if p.name == "waits"]
        title[name] = found
    assert title == {"all": ["How long requests waited, concurrency 1"], "alike": []}


def test_the_baselines_second_arm_is_in_no_picture():
    given = served()
    again = [replace(row, variant="base again") for row in given.rows if row.variant == "base"]
    variants = {**given.info.variants, "base again": "whole prompts again"}
    info = replace(given.info, variants=variants, aa="base again")
    pictures = chain(*gallery.of(replace(given, rows=(*given.rows, *again), info=info)))
    (goodput,) = (picture for picture in pictures if picture.name == "goodput")
    labels = goodput.draw().axes[0].get_legend_handles_labels()[1]
    assert labels == ["all that is offered", *given.info.variants.values()]
