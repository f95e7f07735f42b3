"""What marks a whole run: what is lacking, a baseline that differs from itself, repeats that differ severalfold."""

import math
import random
from dataclasses import replace

import pytest
from made_up import METRICS, equal, result

from experiments.lab.config import schema
from experiments.lab.judge import marks
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.traces import RequestRow
from experiments.lab.show.answer import badges, sentence
from experiments.lab.store.provenance import ProcessInfo
from experiments.lab.store.rows import Row

VARIANTS = {"base": "whole prompts", "new": "chunked", "base again": "whole prompts again"}


def run(seed=0, bias=1.0, aa="base again", processes=3, repeats=2, slow=()):
    """Three arms at two points; the second arm of the baseline takes `bias` times its time."""
    rng = random.Random(seed)
    rows = []
    for process in range(processes):
        mood = math.exp(rng.gauss(0, 0.05))  # of all arms of the process
        for repeat in range(repeats):
            for point in ("concurrency=1", "concurrency=8"):
                for variant in VARIANTS:
                    value = 100 * mood * math.exp(rng.gauss(0, 0.02)) * (bias if variant == aa else 1)
                    value *= 19 if (variant, process, repeat) in slow else 1
                    for name, metric in METRICS.items():
                        rows.append(Row(variant, point, repeat, name, value, metric.unit, process=process))
    return result(variants=VARIANTS, rows=rows, gates=[], aa=aa)


def test_sound_runs_alarm_in_one_of_twenty():
    alarms = sum(marks.again(run(seed)).told != 0 for seed in range(300))
    assert 0.03 <= alarms / 300 <= 0.07


def test_a_second_arm_that_is_slower_is_found_and_said():
    found = sum(marks.again(run(seed, bias=1.1)).told != 0 for seed in range(100))
    assert found >= 90
    (told,) = marks.of(run(bias=1.1))
    assert told.startswith("the baseline differs from itself: A/A ratio 1.1")


def test_a_small_difference_is_not_rounded_to_none():
    baseline = [Row("base", "concurrency=8", turn, "ttft_p50_ms", 100.0, "ms") for turn in range(4)]
    slower = [replace(row, variant="again", value=100.3 + 0.1 * row.repeat) for row in baseline]
    (told,) = marks.of(result(variants={"base": "off", "again": "off again"}, rows=baseline + slower, aa="again"))
    assert told.startswith("the baseline differs from itself: A/A ratio 1.0045 [1.00")
    assert "[1.00," not in told


def test_what_no_time_goes_into_says_nothing_of_a_second_arm():
    """A ratio of requests in a batch is 1 whatever the machine does."""
    slower = run(bias=1.1)
    counted = METRICS | {"batch_size": Metric("requests that decode together", "requests", Better.higher)}
    claim = Claim("batch_size", "new", "concurrency=8", Bound.ratio_at_least, 1.2, "base", "concurrency=8")
    timed = [row for row in slower.rows if row.metric == "ttft_p50_ms"]
    rows = [replace(row, metric="batch_size", value=8.0, unit="requests") for row in timed]
    given = replace(slower, rows=[*slower.rows, *rows], info=replace(slower.info, metrics=counted, claims=(claim,)))
    assert marks.again(given) == marks.again(slower)


def test_a_run_without_a_second_arm_has_no_verdict():
    assert marks.again(replace(run(), info=replace(run().info, aa=None))) is None
    assert marks.of(run()) == []


def test_repeats_that_differ_severalfold_mark_the_run():
    (told,) = marks.of(run(slow=[("new", 1, 1)]))
    assert told.startswith("repeats of chunked differ severalfold (chunked at concurrency ")
    assert told.endswith("in one process)")
    both = run(slow=[("new", 1, 1), ("base", 0, 0)])
    assert badges(both) == ["**repeats of 2 variants differ severalfold**"]
    assert marks.severalfold(run(slow=[("new", 1, 0), ("new", 1, 1)])) == {}  # a process may have other prompts


NUMBERS = ErrorGate("new", "concurrency=8", 0.01, 0.02, "sdpa in fp32")


def on_gpu(count=3, arrivals="closed", requests=(), repeats=2, **changes):
    """A run of a GPU that has all, but for what is changed."""
    info = run().info
    config = {"measure": {"processes": count, "repeats": repeats}, "workload": {"arrivals": arrivals}}
    device = replace(info.provenance, device={**info.provenance.device, "gpu": "NVIDIA H200"})
    ran = tuple(ProcessInfo(n, n, "2026-01-01T00:00:00+00:00", 60.0) for n in range(count))
    gates = (equal("new", "concurrency=8"),)
    told = {"hardware": "h200", "gates": gates, "config": config, "provenance": device, "processes": ran, **changes}
    return replace(run(), info=replace(info, **told), requests=tuple(requests))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"count": 1, "changed": {"measure.processes": "1"}}, ["**1 process**"]),
        ({"count": 1}, []),  # the experiment itself asks for one
        ({"processes": ()}, ["**1 process**"]),  # of an old result
        ({"processes": (), "status": "incomplete: cut off"}, ["**INCOMPLETE**", "**1 process**"]),
        ({"processes": (), "status": "incomplete: cut off; 0 of 3 processes are complete"}, ["**INCOMPLETE**"]),
        ({"processes": (), "hardware": "simulated-h200"}, []),
        ({"aa": None}, ["**no A/A arm**"]),
        ({"aa": None, "hardware": "simulated-h200"}, []),
        ({"aa": None, "baseline": None}, []),  # as ceilings
        ({"aa": None, "provenance": run().info.provenance}, []),  # of a CPU
        ({"gates": ()}, ["**no gates**"]),
        ({"gates": (), "error_gates": (NUMBERS,), "scale": "7b"}, ["**no gates**"]),  # of tokens
        ({"gates": (), "error_gates": (NUMBERS,), "scale": "none"}, []),  # kernels generate none
        ({"gates": (), "aa": None, "baseline": None}, []),
        ({"gates": (), "variants": {"base": "off", "base again": "off again"}}, []),  # nothing is compared
        ({"gates": (), "provenance": run().info.provenance}, []),
        ({"repeats": 1}, []),  # the experiment itself asks for one
        ({"repeats": 1, "changed": {"measure.repeats": "1"}}, ["**1 repeat**"]),
    ],
)
def test_a_run_says_what_a_result_is_made_of_and_it_lacks(changes, says):
    assert badges(on_gpu(**changes)) == says


@pytest.mark.parametrize(
    ("processes", "changes", "told"),
    [
        (3, {}, "supported"),
        (1, {}, "inconclusive"),
        (1, {"status": "incomplete: interrupted; 1 of 3 processes are complete"}, "inconclusive"),
        (2, {"status": "incomplete: interrupted; 2 of 3 processes are complete"}, "supported"),
        (1, {"config": {"measure": {"processes": 1}}}, "supported"),  # the experiment itself asks for one
        (1, {"config": {"measure": {"processes": 1}}, "changed": {"measure.processes": "1"}}, "inconclusive"),
        (1, {"hardware": "simulated-h200"}, "supported"),
    ],
)
def test_one_process_judges_ratios_and_no_value_by_itself(processes, changes, told):
    """What varies between processes shows in none of them alone; in a ratio within one much of it cancels out."""
    given = run(processes=processes)
    at = ("ttft_p50_ms", "new", "concurrency=8")
    claims = (Claim(*at, Bound.at_most, 900.0), Claim(*at, Bound.ratio_at_most, 2.0, "base", "concurrency=8"))
    info = replace(given.info, **{"config": {}, "claims": claims, **changes})
    value, ratio = replace(given, info=info).judgements
    assert (value.verdict.value, ratio.verdict.value) == (told, "supported")
    why = "one process does not tell what varies between processes"
    assert value.reason == (why if told == "inconclusive" else "")
    said = sentence(replace(given, info=replace(info, claims=claims[:1])))
    assert ("at most 900 ms: not shown by one process" in said) == (told == "inconclusive")


@pytest.mark.parametrize(
    ("arrivals", "spans", "count", "says"),
    [
        ("poisson", (12.3, 38), 60, ["open-loop passes of 12.3 to 38 s (60 are asked for on a GPU)"]),
        ("trace", (12.3, 70), 60, ["open-loop passes of 12.3 s (60 are asked for on a GPU)"]),
        ("gamma", (61, 70), 60, []),
        ("closed", (12.3, 38), 60, []),
    ],
)
def test_open_loops_that_are_too_short_mark_the_run(arrivals, spans, count, says):
    def row(variant, arrival):
        return RequestRow(variant, "concurrency=8", "r", "", arrival, 0.0, 0.0, 0.0, 8, 8, 0, 0)

    passes = dict(zip(("base", "new"), spans, strict=True))
    asked = [row(variant, span * n / (count - 1)) for variant, span in passes.items() for n in range(count)]
    assert marks.of(on_gpu(arrivals=arrivals, requests=asked)) == says
    few = marks.short_passes(on_gpu(arrivals=arrivals, requests=[r for r in asked if r.arrival_s in (0, *spans)]))
    assert few == "".join(says).replace("GPU)", "GPU; of fewer than 50 requests no ramps are left out)")


@pytest.mark.parametrize(
    ("last", "short"), [(59.2, ""), (58.7, "open-loop passes of 58.7 s (60 are asked for on a GPU)")]
)
def test_a_drawn_minute_may_end_a_little_before(last, short):
    times = [last * n / 599 for n in range(600)]
    asked = [RequestRow("base", "concurrency=8", "r", "", t, 0.0, 0.0, 0.0, 8, 8, 0, 0) for t in times]
    assert marks.short_passes(on_gpu(arrivals="poisson", requests=asked)) == short


def test_streams_that_follow_each_other_do_not_make_prompts_last_longer():
    """In `mixed` streams are a closed loop, in which one begins as another ends."""
    asked = [RequestRow("base", "concurrency=8", "r", "stream", t, 0.0, 0.0, 0.0, 8, 8, 0, 0) for t in range(0, 70, 5)]
    given = replace(run(), requests=asked)
    timed = replace(given, info=replace(on_gpu().info, config={"workload": {}}, workload={"last_arrival_s": 6.0}))
    assert marks.short_passes(timed) == "open-loop passes of 6 s (60 are asked for on a GPU)"


@pytest.mark.parametrize("via", ["in_process", "http"])
def test_long_prompts_arrive_among_streams_of_a_gpu_for_a_minute(compose_config, via):
    config = compose_config("experiment=chunked_prefill", "scale=7b", f"via={via}", "hardware=h200")
    load = schema.workload(config)
    assert load.prompts * load.prompt_every_s > marks.STEADY_S
    assert load.stream_prompt_tokens + load.stream_output_tokens < 2048, "and streams are no longer for it"


def test_an_old_result_says_how_long_its_open_loops_were_by_its_workload():
    old = on_gpu(arrivals="poisson", workload={"last_arrival_s": [None, 3.38]})
    assert marks.short_passes(old) == "open-loop passes of 3.38 s (60 are asked for on a GPU)"


def test_requests_at_times_of_their_own_are_an_open_loop_too():
    """Of the workload `mixed`, whose arrivals are no setting."""
    timed = replace(run(), info=replace(on_gpu().info, config={"workload": {}}, workload={"last_arrival_s": 6.0}))
    assert marks.short_passes(timed) == "open-loop passes of 6 s (60 are asked for on a GPU)"
    assert marks.short_passes(replace(timed, info=replace(timed.info, workload={}))) == ""
