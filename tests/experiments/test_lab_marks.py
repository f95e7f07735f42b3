"""What marks a whole run: a baseline that differs from itself, and repeats that differ severalfold."""

import math
import random
from dataclasses import replace

from made_up import METRICS, result

from experiments.lab.judge import marks
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.metrics import Better, Metric
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
    assert told.startswith("repeats differ severalfold (chunked at concurrency ")
    assert told.endswith("in one process)")
    assert marks.severalfold(run(slow=[("new", 1, 0), ("new", 1, 1)])) == []  # a process may have other prompts
