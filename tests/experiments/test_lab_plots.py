"""Figures: every kind of panel draws what was measured, or says why it cannot; the same result gives the same bytes."""

import io
import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from made_up import VARIANTS, engine_steps, requests, result
from PIL import Image

from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.traces import BlockRow
from experiments.lab.show.figures import blocks, frame, gallery, load, stacks, timeline
from experiments.lab.show.figures.frame import BOUND
from experiments.lab.show.figures.gallery import panels as draw_panels
from experiments.lab.store.rows import Row
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.slow  # together they take half a minute

LINES = PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency", log_x=True, log_y=True)


def axes_of(panels, given):
    """The axes of a figure, which must be one that can be written."""
    figure = draw_panels(PlotSpec("plot", "A title", tuple(panels)), given)
    frame.png(figure, "demo")
    return figure.axes


def size_of(png):
    return Image.open(io.BytesIO(png)).size


def texts(ax):
    return [text.get_text() for text in ax.texts]


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels() if label.get_text()]


def test_every_kind_of_panel_is_drawn_with_its_unit():
    given = result(steps=engine_steps(), requests=requests())
    panels = [
        PanelSpec("output_tokens_per_s", x_label="requests in flight"),
        LINES,
        PanelSpec("ttft_p50_ms", PanelKind.curve, x="output_tokens_per_s"),
    ]
    axes = axes_of(panels, given)
    labels = [tuple(label.replace("\n", " ") for label in (ax.get_xlabel(), ax.get_ylabel())) for ax in axes]
    assert labels == [
        ("output tokens per second (tokens/s)", "requests in flight"),
        ("concurrency", "time to first token, median request (ms)"),
        ("output tokens per second (tokens/s)", "time to first token, median request (ms)"),
    ]
    assert size_of(frame.png(axes[0].figure, "demo"))[0] == int(frame.WIDTH * frame.DPI)
    assert all(not texts(ax) or "not" not in texts(ax)[0] for ax in axes)


def test_bars_show_median_interval_and_every_repeat():
    (ax,) = axes_of([PanelSpec("output_tokens_per_s")], result())
    assert len(ax.patches) == 4
    assert [patch.get_hatch() for patch in ax.patches] == ["", "", "///", "///"]  # told apart in grey, too
    assert sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() == ".") == 4 * 5
    assert ax.get_xlim()[0] == 0
    assert ticks(ax.yaxis) == ["1", "8"]
    assert ax.get_ylabel() == "concurrency"
    assert any("," in tick for tick in ticks(ax.xaxis))


def test_at_one_point_long_names_stand_beside_horizontal_bars():
    variants = {f"v{i}": f"a very long name of a variant that nobody can shorten, number {i}" for i in range(7)}
    given = result(variants=variants, baseline="v0", sizes=(8,))
    panels = [PanelSpec("output_tokens_per_s"), PanelSpec("ttft_p50_ms")]
    axes = axes_of(panels, given)
    figure = axes[0].figure
    boxes = [label.get_window_extent() for label in axes[0].get_yticklabels()]
    assert len(boxes) == 7
    assert all(not a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])
    assert min(box.x0 for box in boxes) >= 0
    assert ticks(axes[1].yaxis) == []  # named once a row
    assert not figure.legends
    assert size_of(frame.png(axes[0].figure, "demo"))[1] > 500


def test_a_legend_of_long_names_stays_inside_the_figure():
    variants = {f"v{i}": f"a long name of a variant that nobody can shorten, number {i}" for i in range(6)}
    axes = axes_of([LINES, LINES], result(variants=variants, baseline="v0"))
    (legend,) = axes[0].figure.legends
    box, (width, _) = legend.get_window_extent(), axes[0].figure.canvas.get_width_height()
    assert box.x0 >= 0
    assert box.x1 <= width
    assert len(legend.get_texts()) == 6 + 1  # and the bound of a claim


def test_a_curve_leaves_out_what_a_search_tried_and_its_points_are_told_by_what_they_differ_in():
    given = result()
    loop = {name: {"workload.arrivals": "closed", **at} for name, at in given.info.points.items()}
    tried = {"search at 9/s": {"workload.arrivals": "poisson", "workload.rate_per_s": 9}, "search": {}}
    rows = [replace(row, point="search at 9/s") for row in given.rows if row.point == "concurrency=8"]
    given = replace(given, info=replace(given.info, points={**loop, **tried}), rows=(*given.rows, *rows))
    (ax,) = axes_of([PanelSpec("ttft_p50_ms", PanelKind.curve, x="output_tokens_per_s")], given)
    curves = [container.lines[0].get_xdata() for container in ax.containers]
    assert [len(x) for x in curves] == [2, 2]
    assert texts(ax) == ["1", "8"] * 2


def test_what_is_invalid_or_missing_is_said():
    given = result()
    bad = [row for row in given.rows if (row.variant, row.point) != ("new", "concurrency=8")]
    lost = [type(row)(**{**vars(row), "valid": False, "reason": "short"}) for row in given.rows if row not in bad]
    (ax,) = axes_of([PanelSpec("output_tokens_per_s")], result(rows=[*bad, *lost]))
    assert "INVALID" in texts(ax)
    none = [type(row)(**{**vars(row), "valid": False, "reason": "short"}) for row in given.rows]
    for panel, says in [
        (PanelSpec("output_tokens_per_s"), "no valid value"),
        (LINES, "no valid value"),
        (PanelSpec("ttft_p50_ms", PanelKind.curve, x="itl_p99_ms"), "no valid value"),
        (PanelSpec("steps"), "steps: not measured in this run"),
        (PanelSpec("ttft_p50_ms", PanelKind.curve, x="steps"), "steps: not measured in this run"),
    ]:
        (ax,) = axes_of([panel], result(rows=none))
        assert texts(ax) == [says]


def test_pairs_are_shown_beside_what_they_are_alone():
    variants = {"none": "none", "a": "first", "b": "second", "a+b": "both", "c": "third"}
    rows = [
        Row(variant, "concurrency=1", repeat, "output_tokens_per_s", value, "tokens/s")
        for variant, value in {"none": 100, "a": 150, "b": 120, "a+b": 162, "c": 100}.items()
        for repeat in range(3)
    ]
    given = result(sizes=(1,), variants=variants, baseline="none", rows=rows)
    (ax,) = axes_of([PanelSpec("output_tokens_per_s", PanelKind.matrix)], given)
    assert texts(ax) == ["1.50x", "1.20x", "1.00x", "1.62x", "0.90"]
    assert ticks(ax.yaxis) == ["first", "second", "third"]


def test_log_axes_have_plain_numbers():
    given = result(sizes=(1, 32, 1024, 100_000))
    (ax,) = axes_of([LINES], given)
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert set(ticks(ax.xaxis)) == {"1", "32", "1,024", "100,000"}
    shown = ticks(ax.yaxis)
    assert "1,000" in shown
    assert all(character in "0123456789.," for tick in shown for character in tick)


def test_zeros_keep_a_linear_axis():
    rows = [type(row)(**{**vars(row), "value": 0.0}) if row.repeat == 0 else row for row in result().rows]
    (ax,) = axes_of([LINES], result(rows=rows))
    assert ax.get_yscale() == "linear"


def test_points_that_differ_in_more_than_x_are_lines_of_their_own():
    given = result(sizes=(1, 2, 4, 8))
    points = {
        name: {"workload.concurrency": n, "model": m}
        for name, n, m in zip(given.info.points, (1, 8, 1, 8), "aabb", strict=True)
    }
    (ax,) = axes_of([LINES], result(sizes=(1, 2, 4, 8), points=points, claims=()))
    _, labels = ax.get_legend_handles_labels()
    assert labels == [f"{name}, model {m}" for name in given.info.variants.values() for m in "ab"]


def test_settings_that_are_no_numbers_are_named():
    points = {"concurrency=1": {"mode": "eager"}, "concurrency=8": {"mode": "graph"}}
    panel = PanelSpec("ttft_p50_ms", PanelKind.lines, x="mode")
    (ax,) = axes_of([panel], result(points=points))
    assert ticks(ax.xaxis) == ["eager", "graph"]


def test_a_bound_of_a_claim_is_drawn_unless_far_away():
    claims = [Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, bound) for bound in (350.0, 50_000.0)]
    (ax,) = axes_of([LINES], result(claims=tuple(claims)))
    (mark,) = [line for line in ax.lines if line.get_marker() == "_" and line.get_color() == BOUND]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([8], [350]), "and not at a size that it is not about"
    (ax,) = axes_of([LINES], result(sizes=(8,), claims=tuple(claims)))
    labels = ax.get_legend_handles_labels()[1]
    assert [text for text in labels if text.startswith("claim")] == ["claim: at most 350 at concurrency 8"]
    given = result()
    info = replace(given.info, points={**given.info.points, "prompt": {}}, claims=(replace(claims[0], point="prompt"),))
    (ax,) = axes_of([LINES], replace(given, info=info))
    assert ax.get_legend_handles_labels()[1] == list(VARIANTS.values()), "of a point that has no place on the axis"


def test_ratios_to_the_tail_are_shares():
    x, share = load.above([3.0, 1.0, 2.0], [1.0, 2.0, 1.0])
    assert x == [1.0, 1.0, 2.0, 3.0]
    assert share == [100.0, 50.0, 25.0, 0.0]


def test_gaps_between_tokens_come_from_the_steps():
    steps = engine_steps(count=50)
    (gaps,) = (found for found in load.waits_of(result(steps=steps)) if found.what == "decoded tokens")
    times, weights = gaps.values["base"]
    assert sum(weights) == sum(step.decode_tokens for step in steps[1:])
    last = steps[-1].start_s + steps[-1].duration_s - steps[-2].start_s - steps[-2].duration_s
    assert times[-1] == pytest.approx(1e3 * last)


@pytest.mark.parametrize(
    ("panel", "message"),
    [
        ({"metric": "ttft_ms", "kind": PanelKind.lines}, "point's key"),
        ({"metric": "ttft_ms", "kind": PanelKind.curve}, "metric along its x axis"),
        ({"metric": "ttft_ms", "log_y": True}, "bars start at 0"),
    ],
)
def test_a_panel_that_cannot_be_drawn_is_refused_before_anything_runs(panel, message):
    with pytest.raises(ConfigError, match=message):
        PanelSpec(**panel)


# The step timeline


def area(shape, values):
    return float(np.sum(np.diff(shape.edges) * values))


@pytest.mark.parametrize("lasts", [False, True])
def test_putting_steps_together_in_bins_keeps_their_area_and_their_peaks(lasts):
    steps = engine_steps(count=2000)
    end = steps[-1].start_s + steps[-1].duration_s
    one, binned = (
        timeline.shape(steps, lambda s: s.prefill_tokens, end, lasts=lasts, binned=binned) for binned in (False, True)
    )
    assert len(binned.mean) == timeline.BINS
    assert area(binned, binned.mean) == pytest.approx(area(one, one.mean))
    assert binned.largest.max() == max(step.prefill_tokens for step in steps)
    assert (binned.largest >= binned.mean - 1e-9).all()


def test_steps_one_by_one_stand_where_they_ran():
    steps = engine_steps(count=40)
    end = steps[-1].start_s + steps[-1].duration_s
    shape = timeline.shape(steps, lambda s: s.decode_tokens, end, lasts=False, binned=False)
    assert len(shape.edges) == len(shape.mean) + 1
    assert (np.diff(shape.edges) >= 0).all()
    assert list(shape.mean[1::2]) == [step.decode_tokens for step in steps]
    assert not shape.mean[::2].any()  # between steps
    state = timeline.shape(steps, lambda s: s.num_waiting, end, lasts=True, binned=False)
    assert list(state.mean[1:]) == [step.num_waiting for step in steps]
    assert state.edges[1] == pytest.approx(steps[0].start_s + steps[0].duration_s)


def test_a_step_longer_than_a_bin_fills_all_of_its_bins():
    (step,) = engine_steps(count=1)
    shape = timeline.shape([step], lambda s: 7.0, step.duration_s * 2, lasts=False, binned=True)
    half = timeline.BINS // 2
    assert shape.mean[:half] == pytest.approx(7.0)
    assert not shape.mean[half:].any()


def drawn_steps(given, point="concurrency=8", pair=0):
    figure = timeline.draw(given, point, timeline.pairs(given, point)[pair])
    frame.png(figure, "demo")
    return np.array(figure.axes).reshape(len(timeline.HEIGHTS), -1)


def test_variants_stand_side_by_side_on_the_same_scales():
    steps = [*engine_steps("base", 300, chunk=4096), *engine_steps("new", 900, chunk=512, seed=1)]
    given = result(steps=steps)
    axes = drawn_steps(given)
    assert axes.shape == (4, 2)
    assert len({ax.get_xlim() for ax in axes.flatten()}) == 1
    for row in axes:
        assert row[0].get_ylim() == row[1].get_ylim()
    assert axes[0, 0].get_title(loc="left").startswith("whole prompts: 300 steps in ")
    assert "preemptions" in axes[0, 0].get_title(loc="left")
    marks = [line for line in axes[3, 0].lines if line.get_marker() == "v"]
    assert len(marks[0].get_xdata()) == sum(1 for step in steps if step.variant == "base" and step.preempted)
    assert "There are up to 900 steps, so the time is cut into 400 bins" in timeline.describe(given)
    assert "bins" not in timeline.describe(result(steps=engine_steps()))
    assert axes[-1, 0].get_xlabel() == "seconds from the start of the timed pass"


def test_a_map_of_blocks_has_a_colour_for_each_request_and_a_pale_one_for_what_is_empty():
    rows = [BlockRow("base", "concurrency=8", 0, 0, 9, "a"), BlockRow("base", "concurrency=8", 2, 5, 9, "b")]
    rows += [BlockRow("base", "concurrency=8", 1, 0, 9, "a", empty=True)]
    rows += [BlockRow("new", "concurrency=8", block, 0, 4, owner) for block, owner in enumerate(blocks.LOOKS)]
    given = replace(result(steps=[*engine_steps("base", 9), *engine_steps("new", 9)]), blocks=tuple(rows))
    figure = blocks.draw(given)
    frame.png(figure, "demo")
    base, new = (ax.images[0].get_array() for ax in figure.axes)
    assert base.shape == (3, 10, 3)
    assert new.shape == (2, 5, 3)
    assert base[0, 0].tolist() != base[2, 5].tolist()
    assert (base[2, 4] == 1).all(), "it was nobody's yet"
    assert (base[1] > base[0]).any(), "paler"
    assert len({tuple(new[block, 0]) for block in range(2)}) == 2
    assert "whole prompts: 3 blocks that requests had, of 500" in figure.axes[0].get_title(loc="left")
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown[:2] == ["a request's (colours come again)", "reserved, empty"]
    assert shown[2:] == [label for label, _ in blocks.LOOKS.values()]
    assert "blocks" in [picture.name for picture in gallery.of(given).others]


def test_a_figure_of_steps_holds_two_variants_first_those_that_are_compared():
    variants = {v: v for v in ("base", "a", "b", "c", "new")}
    steps = [step for v in variants for step in engine_steps(v, 5)]
    given = result(steps=steps, variants=variants)
    assert timeline.pairs(given, "concurrency=8") == [("base", "new"), ("a", "b"), ("c",)]
    assert drawn_steps(given, pair=2).shape == (4, 1)
    names = [picture.name for picture in chain(*gallery.of(given)) if picture.name.startswith("steps")]
    assert names == ["steps-concurrency=8", "steps-concurrency=8-2", "steps-concurrency=8-3"]


def test_every_request_is_a_line_of_what_it_went_through():
    asked = requests("base", 20)
    axes = drawn_steps(result(steps=engine_steps("base", 60), requests=asked))
    lines = {c.get_gid().partition(":")[2].split(" ")[1]: c.get_segments() for c in axes[2, 0].collections}
    assert set(lines) == {"queued", "prefill", "decode"}
    assert all(len(segments) == 20 for segments in lines.values())
    for row, request in enumerate(asked):  # they arrive one after the other
        assert lines["prefill"][row][:, 0] == pytest.approx([request.first_scheduled_s, request.first_token_s])
        assert set(lines["prefill"][row][:, 1]) == {row}
    low, high = axes[2, 0].get_ylim()
    assert low > high  # the first one is on top


def test_a_request_that_never_got_a_token_ends_where_it_is_known():
    (asked,) = requests(count=1)
    assert [phase for phase, _, _ in timeline.phases(asked)] == ["queued", "prefill", "decode"]
    assert [phase for phase, _, _ in timeline.phases(replace(asked, first_token_s=None, end_s=None))] == ["queued"]


def test_a_prompt_from_another_engine_goes_through_the_parts_of_its_way():
    times = {"first_scheduled_s": 0.5, "first_token_s": 2.0, "end_s": 3.0, "arrival_s": 0.0}
    spans = {"prefill_s": 1.0, "transfer_s": 0.7, "transfer_exposed_s": 0.1, "decode_wait_s": 0.2}
    asked = [replace(one, **times, **spans) for one in requests("new", 3)]
    assert [(phase, start, pytest.approx(end)) for phase, start, end in timeline.phases(asked[0])] == [
        ("queued", 0.0, 0.5),
        ("prefill", 0.5, 1.5),
        ("transfer after it", 1.5, 1.6),
        ("waiting for a decode step", 1.6, 1.8),
        ("first decode step", 1.8, 2.0),
        ("decode", 2.0, 3.0),
    ]
    plot = PlotSpec("requests", "Requests", (PanelSpec("ttft_ms", PanelKind.gantt),))
    figure = draw_panels(plot, result(requests=[*requests("base", 2), *asked]))
    own = figure.axes[1]
    assert [ax.get_title(loc="left") for ax in figure.axes] == list(VARIANTS.values())
    lines = dict(zip(own.get_legend_handles_labels()[1], own.collections, strict=True))
    assert lines["first decode step"].get_segments()[2][:, 0] == pytest.approx([1.8, 2.0])
    assert lines[timeline.COPIES].get_segments()[0][:, 0] == pytest.approx([0.9, 1.6])
    frame.png(figure, "demo")
    elsewhere = replace(plot, panels=(replace(plot.panels[0], where={"workload.concurrency": 1}),))
    given = result(sizes=(1, 8), requests=asked, plots=(elsewhere,))  # which are of the second point
    assert {request.point for request in asked} == {"concurrency=8"}
    assert "requests" not in [picture.name for picture in chain(*gallery.of(given))]


def test_kv_that_is_reserved_and_empty_can_be_seen():
    wasted = [replace(step, kv_used_slots=step.kv_reserved_slots // 4) for step in engine_steps("base", 60)]
    labels = lambda steps: drawn_steps(result(steps=steps))[3, 0].get_legend_handles_labels()[1]  # noqa: E731
    assert "KV reserved, empty" in labels(wasted)
    assert "KV reserved, empty" not in labels(engine_steps("base", 60))


def test_every_stored_point_has_its_own_timeline():
    steps = [*engine_steps(point="concurrency=8", count=5), *engine_steps(point="concurrency=1", count=5)]
    names = [picture.name for picture in chain(*gallery.of(result(steps=steps))) if picture.name.startswith("steps")]
    assert sorted(names) == ["steps-concurrency=1", "steps-concurrency=8"]
    assert timeline.pairs(result(), "concurrency=1") == []


def test_few_decodes_beside_long_prompts_can_be_seen():
    axes = drawn_steps(result(steps=engine_steps("base", 60, chunk=4096)))
    assert "√ scale" in axes[0, 0].get_ylabel()
    assert math.isclose(axes[0, 0].get_ylim()[0], 0)


# Panels of some of the points


def swept(**changes):
    """Two settings: sizes in two modes."""
    given = result(sizes=(1, 8), gates=(), claims=(), baseline=None, plots=())
    points = {f"size={n} mode={m}": {"size": n, "mode": m} for n in (1, 8) for m in ("a", "b")}
    rows = [
        replace(
            row, point=f"size={row.point.rpartition('=')[2]} mode={mode}", value=row.value * (2 if mode == "b" else 1)
        )
        for row in given.rows
        for mode in ("a", "b")
    ]
    return replace(given, info=replace(given.info, points=points, **changes), rows=tuple(rows))


def test_a_panel_may_show_some_points_alone():
    panels = [
        PanelSpec("ttft_p50_ms", where={"mode": "b"}),
        PanelSpec("ttft_p50_ms", PanelKind.lines, x="size", where={"mode": "a"}),
    ]
    (bars, lines) = axes_of(panels, swept())
    assert bars.get_title() == "mode b, lower is better"
    assert [label.get_text() for label in bars.get_yticklabels()] == ["1", "8"]
    assert lines.get_title() == "mode a, lower is better"
    assert len(lines.containers) == 2  # one line a variant


def test_several_bounds_are_marks_at_their_points():
    claims = tuple(
        Claim("ttft_p50_ms", "new", f"size={n} mode=a", Bound.at_most, bound)
        for n, bound in ((1, 90.0), (1, 80.0), (8, 300.0))
    )
    panels = [
        PanelSpec("ttft_p50_ms", PanelKind.lines, x="size", where={"mode": "a"}),
        PanelSpec("ttft_p50_ms", PanelKind.lines, x="size", where={"mode": "b"}),
    ]
    axes = axes_of(panels, swept(claims=claims))
    marks = [[line for line in ax.lines if line.get_color() == BOUND and len(line.get_ydata())] for ax in axes]
    assert [[float(line.get_ydata()[0]) for line in own] for own in marks] == [[90, 80, 300], []]
    assert [float(line.get_xdata()[0]) for line in marks[0]] == [1, 1, 8]
    assert "bound of a claim" in axes[0].get_legend_handles_labels()[1]
    of_two = replace(claims[0], variant="base"), replace(claims[2], aim=200.0)
    (ax,) = axes_of(panels[:1], swept(claims=of_two))
    marks = [line for line in ax.lines if line.get_markersize() == 17]
    assert [float(line.get_ydata()[0]) for line in marks] == [90, 300], "aims stand in the picture of effects"
    assert [line.get_color() for line in marks] == list(frame.COLOURS[:2])


def test_a_prompt_whose_kv_is_loaded_is_not_shown_as_computed():
    steps = engine_steps("base", 60)
    steps[10] = replace(steps[10], prefill_tokens=0, decode_tokens=0, num_prefilling=1, duration_s=0.2)
    load = (steps[10].start_s, steps[10].start_s + 0.2)
    asked = [replace(requests("base", 1)[0], arrival_s=0.0, first_scheduled_s=load[0], first_token_s=load[1] + 1)]
    axes = drawn_steps(result(steps=steps, requests=asked))
    for ax in (axes[1, 0], axes[2, 0]):
        assert timeline.LOADING in ax.get_legend_handles_labels()[1]
    (line,) = [c for c in axes[2, 0].collections if timeline.LOADING in c.get_gid()]
    assert line.get_segments()[0][:, 0] == pytest.approx(load)


def test_graphs_of_more_than_the_weights_are_in_no_picture():
    told = {"weights": "57 GiB", "KV": "4,778 blocks, 7 GiB", "CUDA graphs": "of 20 batch sizes (1.5 s, 314 MiB)"}
    assert stacks.memory_of(result(peers={"new": (told,)}))
    loaded = {**told, "CUDA graphs": "of 20 batch sizes (1.5 s, 59,180 MiB)"}
    assert not stacks.memory_of(result(peers={"new": (loaded,)}))


def test_a_piece_that_is_too_thin_for_its_number_has_it_in_the_legend():
    rows = {"a": {"prefill": 90.0, "decode step": 0.2}, "b": {"prefill": 200.0, "decode step": 0.3}}
    (legend,) = stacks.draw(rows, "ms", "time").legends
    assert [text.get_text() for text in legend.get_texts()] == ["prefill", "decode step: 0.200 to 0.300 ms"]


def test_shares_are_told_in_percent():
    given = result(metrics={"ttft_p50_ms": Metric("error", "", Better.lower, share=True)}, claims=(), gates=[])
    given = replace(given, rows=tuple(Row(v, "concurrency=8", 0, "ttft_p50_ms", 0.0239, "") for v in VARIANTS))
    (ax,) = axes_of([PanelSpec("ttft_p50_ms")], given)
    assert texts(ax) == ["2.39 %", "2.39 %"]
    assert "2 %" in ticks(ax.xaxis)
