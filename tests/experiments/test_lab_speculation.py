"""Metrics and figures of speculation, on steps worked out by hand, and what is said of pairs of mechanisms."""

import numpy as np
import pytest
from made_up import result
from matplotlib.figure import Figure
from test_lab_metrics import record, trace, value

from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge import pairs
from experiments.lab.judge.draft_formulas import (
    NO_COSTS,
    NO_DRAFT_MODEL,
    NO_DRAFTS,
    READ_LATE,
)
from experiments.lab.judge.formulas import SERVING, Missing
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.traces import Served
from experiments.lab.show.answer import sentence
from experiments.lab.show.figures import gallery, lines
from experiments.lab.show.grids import Sheet
from experiments.lab.store.rows import Row
from mini_infer.core.errors import ConfigError
from mini_infer.core.uniforms import SYNTHETIC, hash_seeds, uniforms
from mini_infer.speculative.policy.costs import StepCosts


def test_synthetic_drafts_are_accepted_as_often_as_the_formula_says() -> None:
    """1 + a + ... + a^k tokens a step: Leviathan et al. 2023, equation 1."""
    n = 20_000
    stands = uniforms(hash_seeds(np.arange(n, dtype=np.uint64))[:, None], 9 + np.arange(4) + SYNTHETIC) < 0.7
    accepted = np.logical_and.accumulate(stands, axis=1).sum(axis=1)
    assert 1 + accepted.mean() == pytest.approx(sum(0.7**i for i in range(5)), abs=0.04)


# A step of 1, 2 or 3 tokens a row takes 1, 1.1 or 1.2 s, whatever the rows, and a draft token 0.1 s.
COSTS = StepCosts(
    {(rows, width): 0.9 + 0.1 * width for rows in (1, 2) for width in (1, 2, 3)}, {1: 0.1, 2: 0.1}, padded=True
)


def served(*steps, costs=COSTS):
    return Served((trace(0.0, [1.0, 2.0]),), 0.0, steps[-1].end_time, steps, step_costs=costs)


def two_drafts(step, start, end, accepted, **changes):
    """Two rows with two drafts each."""
    tokens = 2 + sum(accepted)
    return record(
        step, start, end, decode_tokens=2, sampled_tokens=tokens, drafted=(2, 2), accepted=accepted, **changes
    )


def test_what_became_of_drafts():
    given = served(
        record(0, 0.0, 1.0, prefill_tokens=100, sampled_tokens=2),
        two_drafts(1, 1.0, 2.0, (2, 1), draft_s=0.25),
        record(2, 2.0, 4.0, decode_tokens=2, sampled_tokens=3, drafted=(2, 1), accepted=(1, 0), draft_s=0.5),
    )
    found = {name: value(name, given) for name in SERVING if "acc" in name or "draft" in name}
    assert found["acceptance"] == pytest.approx(4 / 7), "four tried in the first place, and three behind one that stood"
    assert found["accepted_of_drafted"] == pytest.approx(4 / 7), "here all drafts were tried"
    assert found["acceptance_1"] == pytest.approx(3 / 4)
    assert found["acceptance_2"] == pytest.approx(1 / 3)
    assert isinstance(found["acceptance_3"], Missing)
    assert found["accepted_length"] == pytest.approx(2.0)
    assert value("tokens_per_decode", given) == pytest.approx(2.0)
    assert found["drafts_per_decode"] == pytest.approx(7 / 4)
    assert found["draft_time_share"] == pytest.approx(0.25)
    assert value("wasted_tokens", given) == 3


def test_a_draft_behind_a_rejected_one_was_not_tried():
    given = served(two_drafts(0, 0.0, 1.0, (1, 0)))
    assert value("acceptance", given) == pytest.approx(1 / 3)
    assert value("accepted_of_drafted", given) == pytest.approx(1 / 4)


def test_the_formula_takes_costs_from_outside_the_pass():
    """Steps with prompts are left out; the others took twice as long as the table says."""
    given = served(
        record(0, 0.0, 9.0, prefill_tokens=100, decode_tokens=2, sampled_tokens=2),
        two_drafts(1, 9.0, 11.8, (1, 1)),
        two_drafts(2, 11.8, 14.6, (1, 0)),
    )
    a = 3 / 6
    tokens, seconds = 2 * (1 + a + a**2), 1.2 + 2 * 0.1
    assert value("decode_tokens_per_s", given) == pytest.approx(7 / 5.6)
    assert value("formula_tokens_per_s", given) == pytest.approx(tokens / seconds)
    assert value("formula_share", given) == pytest.approx(7 / 5.6 / (tokens / seconds))
    assert value("draft_cost", given) == pytest.approx(0.1)
    assert value("verify_cost", given) == pytest.approx(1.2)
    assert value("formula_speedup", given) == pytest.approx((1 + a + a**2) / (2 * 0.1 + 1.2))


def test_rows_with_unequal_drafts_are_predicted_row_by_row():
    step = record(0, 0.0, 1.3, decode_tokens=2, sampled_tokens=4, drafted=(2, 1), accepted=(2, 0))
    a = 2 / 3
    expected = (1 + a) + (1 + a + a**2)
    seconds = COSTS.step_seconds(np.array([1, 2]))
    assert value("formula_tokens_per_s", served(step)) == pytest.approx(expected / seconds)


def test_rows_of_requests_that_had_ended_take_time_and_bring_nothing():
    """One row of two whose request is still there, and a step for nobody."""
    given = served(
        two_drafts(0, 0.0, 1.4, (1, 1)),
        record(1, 1.4, 2.8, decode_tokens=1, sampled_tokens=1, dropped_rows=1, drafted=(2, 2), accepted=(0, 0)),
        record(2, 2.8, 4.2, dropped_rows=2, drafted=(2, 2), accepted=(0, 0)),
    )
    a, seconds = 2 / 7, 3 * (1.2 + 2 * 0.1)  # six tried in the first place, and one behind one that stood
    tokens = (2 + 1) * (1 + a + a**2)
    assert value("decode_tokens_per_s", given) == pytest.approx(5 / 4.2)
    assert value("formula_tokens_per_s", given) == pytest.approx(tokens / seconds)
    assert value("formula_share", given) == pytest.approx(5 / tokens)
    assert value("drafts_per_decode", given) == pytest.approx(2.0), "of the rows that were computed"


def test_steps_without_drafts_are_predicted_where_there_might_have_been_some():
    given = served(record(0, 0.0, 1.25, decode_tokens=2, sampled_tokens=2))
    assert value("formula_share", given) == pytest.approx(1 / 1.25)
    assert value("formula_speedup", given) == pytest.approx(1.0)
    assert value("draft_cost", given) is NO_DRAFTS


@pytest.mark.parametrize("name", ["formula_tokens_per_s", "formula_share", "formula_speedup", "draft_cost"])
def test_without_speculation_there_is_nothing_to_predict(name):
    assert value(name, served(record(0, 0.0, 1.0, decode_tokens=2, sampled_tokens=2), costs=None)) is NO_DRAFTS
    assert value(name, served(two_drafts(0, 0.0, 1.0, (1, 0)), costs=None)) is NO_COSTS


def test_drafts_without_a_model_take_none_of_its_time():
    lookup = StepCosts({(rows, width): 1.0 for rows in (1, 2) for width in (1, 3)})
    assert value("draft_cost", served(two_drafts(0, 0.0, 1.0, (1, 0)), costs=lookup)) is NO_DRAFT_MODEL
    assert value("draft_time_share", served(two_drafts(0, 0.0, 1.0, (1, 0)))) is NO_DRAFT_MODEL
    assert value("draft_time_share", served(record(0, 0.0, 1.0, decode_tokens=1))) is NO_DRAFTS


def test_drafting_takes_no_more_than_all_of_its_steps():
    assert value("draft_time_share", served(two_drafts(0, 0.0, 1.0, (1, 0), draft_s=1.0))) == 1.0
    assert value("draft_time_share", served(two_drafts(0, 0.0, 1.0, (1, 0), draft_s=1.1))) is READ_LATE


# Tables and figures


def speculated(**changes):
    """Made-up results of two and four drafts, at two batches. Four bring 1.5x at a batch of 1."""
    speeds = {("base", 1): 100, ("base", 8): 400, ("k2", 1): 140, ("k2", 8): 480, ("k4", 1): 150, ("k4", 8): 440}
    rows = []
    for (variant, batch), speed in speeds.items():
        found = {"decode_tokens_per_s": speed}
        if variant != "base":
            acceptance = {"k2": 0.5, "k4": 0.7}[variant]
            found["formula_tokens_per_s"] = 1.45 * speeds["base", batch]
            found |= {"acceptance": acceptance, "acceptance_1": acceptance, "acceptance_2": acceptance / 2}
        rows += [
            Row(variant, f"concurrency={batch}", repeat, name, number * (1 + 0.001 * repeat), "")
            for name, number in found.items()
            for repeat in range(3)
        ]
    metrics = {name: SERVING[name].metric for name in dict.fromkeys(row.metric for row in rows)}
    variants = {"base": "without", "k2": "2 drafts", "k4": "4 drafts"}
    return result(variants=variants, metrics=metrics, rows=rows, claims=(), plots=(), **changes)


def drawn(panel):
    ax = Figure().subplots()
    assert lines.formula(ax, panel, speculated())
    return ax, dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))


def test_the_formula_is_drawn_through_the_speedup_over_a_setting():
    panel = PanelSpec("decode_tokens_per_s", PanelKind.formula, x="workload.concurrency", log_x=True)
    ax, named = drawn(panel)
    assert list(named) == ["by the formula", "2 drafts", "4 drafts"]
    points = named["4 drafts"].lines[0].get_xydata()
    assert points.tolist() == [[1, pytest.approx(1.5)], [8, pytest.approx(1.1)]]
    lines = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert any(list(y) == [pytest.approx(1.45, rel=0.01)] * 2 for y in lines)
    assert ax.get_ylabel() == "speed-up over without"


def test_over_acceptance_the_formula_is_held_against_what_it_is_over_a_setting():
    """A pass that has lost its tail of requests would lie below the formula of a full batch, and keep its own."""
    panel = PanelSpec("decode_tokens_per_s", PanelKind.formula, x="acceptance", mark=0.5585, mark_label="the original")
    ax, named = drawn(panel)
    assert set(named) == {"concurrency 1", "concurrency 8", "by the formula", "the original"}
    assert [float(x) for x in named["the original"].get_xdata()] == [0.5585, 0.5585]
    points = named["concurrency 8"].lines[0].get_xydata().tolist()
    assert points == [[pytest.approx(0.5, abs=0.01), 1.2], [pytest.approx(0.7, abs=0.01), pytest.approx(1.1)]]
    told = [line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 2]
    lines = [line.get_xydata().tolist() for line in told if line.get_linewidth() == 1.1]
    assert lines == 2 * [[[x, pytest.approx(1.45, rel=0.01)] for x, _ in points]]


def test_a_formula_needs_its_axis_and_only_it_has_a_mark():
    with pytest.raises(ConfigError, match="formula: name the point's key or the metric"):
        PanelSpec("decode_tokens_per_s", PanelKind.formula)
    with pytest.raises(ConfigError, match="`mark` goes with kind: formula"):
        PanelSpec("ttft_ms", mark=1.0)


def test_acceptance_by_place_is_one_table():
    given = speculated()
    grids = Sheet(given).grids(list(given.info.metrics))
    (by_place,) = [grid for grid in grids if "by place" in grid.title]
    assert by_place.header == ("point", "variant", "1", "2")
    assert by_place.rows[0] == ("concurrency=1", "2 drafts", "0.500", "0.250")
    assert not any("in place" in grid.title for grid in grids)


# Pairs


def composed(both):
    """Two mechanisms, worth 1.5x and 1.2x, and what they are worth together, repeat by repeat."""
    speeds = {"none": [100] * 3, "a": [149, 150, 151], "b": [120] * 3, "a+b": both}
    rows = [
        Row(variant, "concurrency=1", repeat, "output_tokens_per_s", speed, "tokens/s")
        for variant, measured in speeds.items()
        for repeat, speed in enumerate(measured)
    ]
    metrics = {"output_tokens_per_s": Metric("output tokens per second", "tokens/s", Better.higher)}
    plots = (PlotSpec("pairs", "Pairs", (PanelSpec("output_tokens_per_s", PanelKind.matrix),)),)
    variants = {name: name for name in speeds}
    return result(sizes=(1,), variants=variants, baseline="none", metrics=metrics, rows=rows, plots=plots, claims=())


CHANCE = "; of pairs whose gains multiply 1 in 20 would differ by chance."


@pytest.mark.parametrize(
    ("both", "says"),
    [
        (
            [200, 202, 204],
            "1 brings more than the product (a+b 1.12x)" + CHANCE,
        ),
        (
            [150, 152, 154],
            "1 brings less than the product (a+b 0.844x)" + CHANCE,
        ),
        ([170, 180, 190], "1 shows no difference from it."),
        ([170], "1 has one valid repeat."),
    ],
)
def test_the_answer_says_which_gains_multiply(both, says):
    given = composed(both)
    assert [picture.name for shown in gallery.of(given) for picture in shown] == ["pairs"], (
        "what each brings alone is no answer"
    )
    assert f"Of 1 pairs, beside the product of their gains in output tokens per second: {says}" in sentence(given)
    (grid,) = pairs.grids(given)
    assert grid.rows[0][:3] == ("a+b", "1.50x, 1.20x", "1.80x")


def test_a_pair_that_was_not_measured_is_no_pair():
    given = composed([])
    assert pairs.sentence(given) == ""
    assert pairs.grids(given) == []
