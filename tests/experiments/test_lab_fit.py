"""A fit recovers costs that were planted, whatever the noise; and what it is fitted to."""

from __future__ import annotations

import dataclasses
import random
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from experiments.lab.measure.fit import MeasuredStep, device_seconds, fit, nonnegative, residuals
from experiments.lab.measure.traces import StepRow
from mini_infer.core.plan import StepPlan
from mini_infer.simulation.costs import Curve, FittedCosts, Work

PLANTED = FittedCosts(
    decode=Curve((1, 2, 4, 8, 16, 32, 64), (3e-3, 3.1e-3, 3.2e-3, 3.4e-3, 3.6e-3, 4.2e-3, 5.5e-3)),
    prompts=Curve((8, 64, 512, 2048), (4e-3, 5e-3, 12e-3, 44e-3)),
    slot_s=1.5e-8,
    reach_s=3e-7,
    pair_s=2e-10,
    plan_s=1e-4,
    row_s=2e-6,
    expand_s=1e-7,
)


def steps(noise: float, seed: int = 0) -> list[MeasuredStep]:
    rng, found = random.Random(seed), []
    for _ in range(800):
        rows = rng.choice(PLANTED.decode.tokens)
        found.append((Work.decode(rows, rows * rng.randrange(10, 8000)), rows))
        beside, prompt = rng.choice([0, 4, 16]), rng.choice([8, 64, 512, 2048])
        start, elsewhere = rng.randrange(4000), rng.randrange(20_000)  # of this prompt, and of others, in the cache
        pairs = prompt * start + prompt * (prompt + 1) // 2
        context = start + prompt + elsewhere
        found.append((Work(beside, prompt, beside * 1000, start + prompt, context, pairs), beside + 1))
    seconds = [PLANTED.device_s(work) * (1 + rng.gauss(0, noise)) for work, _ in found]
    return [
        MeasuredStep(work, rows, device_s, PLANTED.host_s(rows), end_s)
        for (work, rows), device_s, end_s in zip(found, seconds, accumulate(seconds), strict=True)
    ]


@pytest.mark.parametrize(("noise", "near"), [(0.0, 1e-6), (0.03, 0.02)])
def test_a_fit_recovers_what_was_planted(noise: float, near: float) -> None:
    found = fit(steps(noise)).costs
    for work in [
        Work.decode(4, 4000),
        Work.decode(64, 64000),
        Work(0, 2032, 0, 2032, 2032, 2_000_000),
        Work(16, 496, 16000, 600, 9000, 130_000),
    ]:
        assert found.device_s(work) == pytest.approx(PLANTED.device_s(work), rel=near)
    assert found.expand_s == pytest.approx(PLANTED.expand_s, rel=2 * near)
    assert (found.plan_s, found.row_s) == pytest.approx((PLANTED.plan_s, PLANTED.row_s))
    assert residuals(found, steps(0.0, seed=1))["decode"].median <= near


def test_hiccups_hardly_count() -> None:
    hit = [step._replace(device_s=step.device_s * 4) if i % 50 == 0 else step for i, step in enumerate(steps(0.01))]
    found = fit(hit)
    assert found.far_off == pytest.approx(32, abs=3)
    work = Work.decode(16, 16000)
    assert found.costs.device_s(work) == pytest.approx(PLANTED.device_s(work), rel=0.01)


def test_steps_that_were_told_too_short_do_not_count_for_more_than_others() -> None:
    """An end that is read late makes one step long and the next short: by 60 ms of 70 that is an error of 600 % there,
    and of 86 % here."""
    ends_late = [
        step._replace(device_s=step.device_s * (1.6 if i % 8 == 0 else 0.05 if i % 8 == 1 else 1))
        for i, step in enumerate(steps(0.01))
    ]
    found, work = fit(ends_late), Work(0, 2032, 0, 2032, 2032, 2_000_000)
    assert found.costs.device_s(work) == pytest.approx(PLANTED.device_s(work), rel=0.01)


@pytest.mark.parametrize("settles_s", [0.05, 0.2, 0.8])
def test_a_device_that_goes_on_computing_prompts_slows_down_as_planted(settles_s: float) -> None:
    """Now and then there is a pause that lets it cool down."""
    hot = dataclasses.replace(PLANTED, throttled_s=2e-6, recovering_s=4e-4, settles_s=settles_s)
    rng, device, now, found = random.Random(1), hot.heat(1), 0.0, list[MeasuredStep]()
    for step in steps(0.0):
        pause = rng.choice([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
        begin, work = now + pause, step.work
        seconds = hot.device_s(work._replace(heat=device.at(begin)))
        if work.prompt_tokens:
            device.add(begin, seconds)
        now = begin + seconds
        found.append(MeasuredStep(step.work, step.rows, seconds, step.host_s, now))
    costs = fit(found).costs
    assert (costs.throttled_s, costs.settles_s) == (pytest.approx(2e-6, rel=0.02), settles_s)
    assert costs.recovering_s == pytest.approx(4e-4, rel=0.02)
    assert max(error.p90 for error in residuals(costs, found).values()) <= 0.002
    cold = [step._replace(device_s=PLANTED.device_s(step.work)) for step in found]
    assert fit(cold).costs.throttled_s == pytest.approx(0.0, abs=2e-8)


def test_launches_are_those_that_the_fewest_rows_let_see() -> None:
    """Of up to 1,000 tokens in pieces 4 ms, of more kernel by kernel 15; 16 rows take 6 ms and hide the first."""
    found = [
        step._replace(
            launch_s=max(0.006 * (step.work.decode_tokens == 16), 0.004 if step.work.tokens <= 1000 else 0.015)
        )
        if step.work.prompt_tokens and step.work.decode_tokens
        else step
        for step in steps(0.0)
    ]
    costs = fit(found, captured_tokens=1000).costs
    assert (costs.pieces_s, costs.eager_s, costs.captured_tokens) == (0.004, 0.015, 1000)
    launches = [costs.launch_s(Work(1, tokens, 0, 0, 0, 0)) for tokens in (0, 999, 1000)]
    assert launches == [0.0, 0.004, 0.015]
    assert fit(found).costs.pieces_s == 0.0  # where steps do not overlap
    assert fit(steps(0.0), captured_tokens=1000).costs.pieces_s == 0.0  # of nobody was it told


def test_too_few_steps_of_a_kind_are_refused() -> None:
    alone = [step for step in steps(0.0) if not step.work.prompt_tokens]
    with pytest.raises(ValueError, match="0 steps of the kind 'prompts' are too few"):
        fit(alone)


def test_costs_go_on_behind_what_was_measured_and_never_fall() -> None:
    curve = fit(steps(0.03)).costs.decode
    heights = [curve(tokens) for tokens in range(1, 200)]
    assert all(before <= after for before, after in pairwise(heights))
    assert heights[-1] > curve(64)


def test_the_knots_of_prompts_are_those_that_came_alone() -> None:
    """And the most tokens of all, behind which nothing was measured. Where none came alone it is all of them."""
    found = fit(steps(0.0)).costs.prompts.tokens
    assert found == (8, 64, 512, 2048, 2064)
    beside = [step for step in steps(0.0) if step.work.decode_tokens or not step.work.prompt_tokens]
    assert fit(beside).costs.prompts.tokens == (12, 24, 68, 80, 516, 528, 2052, 2064)


def test_no_solution_is_below_zero() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.random((50, 4))
    x = nonnegative(matrix, matrix @ np.array([1.0, 0.0, 2.0, 0.0]) - 0.1)
    assert (x >= 0).all()
    better = [np.linalg.norm(matrix @ (x + d) - (matrix @ np.array([1.0, 0, 2, 0]) - 0.1)) for d in 1e-3 * np.eye(4)]
    assert min(better) >= np.linalg.norm(matrix @ x - (matrix @ np.array([1.0, 0, 2, 0]) - 0.1)) - 1e-9


def test_the_device_works_from_end_to_end_where_steps_overlap() -> None:
    """Two steps of a busy engine, a pause, and one more: the host's 1 ms counts only where the device waits for it."""

    def step(start: float, end: float, left: int) -> StepRow:
        nothing: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StepRow)}
        return StepRow(**{**nothing, "start_s": start, "duration_s": end - start, "host_s": 0.001, "num_running": left})

    spans = [step(0.0, 0.010, left=1), step(0.0102, 0.020, left=0), step(1.0, 1.008, left=0)]
    assert device_seconds(spans, overlap=True) == pytest.approx([0.009, 0.010, 0.007])
    assert device_seconds(spans, overlap=False) == pytest.approx([0.009, 0.009, 0.007])


def test_the_work_of_a_plan() -> None:
    """Rows at 10 and 20, the second with two drafts; a prompt's tokens 4 to 8 see 5, 6, 7 and 8, another's one 6."""
    plan = StepPlan(1, [0, 1, 2, 3], [10, 20, 4, 5], [1, 3, 4, 1], [True, True, False, True], num_decode_rows=2)
    assert Work.of(plan) == Work(
        decode_tokens=4,
        prompt_tokens=5,
        decode_context=11 + 23,
        prompt_reach=8,
        prompt_context=8 + 6,
        prompt_pairs=26 + 6,
    )


def test_copies_take_time_by_blocks() -> None:
    assert dataclasses.replace(PLANTED, block_s=1e-5).copy_s(30) == pytest.approx(3e-4)
