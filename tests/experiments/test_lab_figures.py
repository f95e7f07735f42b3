"""Figures that are made from whatever a result holds: how much better, load, memory, and what the pointer is told."""

import re
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from made_up import equal, requests, result
from matplotlib.colors import to_hex

from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.profile import KernelRow, StepProfile
from experiments.lab.measure.traces import ExpertRow, expert_rows
from experiments.lab.show import effects, wording
from experiments.lab.show.figures import bars, frame, gallery, load, stacks, worth
from experiments.lab.store.rows import Row

pytestmark = pytest.mark.slow  # together they take a while

STARTED = {
    "weights": "14.00 GiB",
    "KV": "34,816 blocks, 30.00 GiB",
    "CUDA graphs": "of 12 batch sizes up to 128 (0.6 s, 512 MiB)",
    "CUDA graphs of steps with prompts": "of 32 numbers of tokens up to 2048 (2.1 s, 512 MiB)",
}


def names(given):
    return [picture.name for picture in chain(*gallery.of(given))]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def rows(values, metric="output_tokens_per_s", point="concurrency=8", repeats=3):
    """The same value in each repeat, but for a little."""
    return [
        Row(v, point, r, metric, value * (1 + 0.001 * r), "") for v, value in values.items() for r in range(repeats)
    ]


# How much better


def test_a_forest_has_five_rows_at_most_with_what_is_better_on_the_right():
    bad = Claim("itl_p99_ms", "new", "concurrency=1", Bound.ratio_at_most, 1.0, "base", "concurrency=1")
    given = result(sizes=(1, 2, 4, 8, 16), noise=0.001)
    slower = [replace(r, value=2 * r.value) if (r.variant, r.metric) == ("new", bad.metric) else r for r in given.rows]
    given = replace(given, rows=tuple(slower), info=replace(given.info, claims=(*given.info.claims, bad)))
    (ax,) = worth.forest(given).axes
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dots) == 5
    places = [float(dot.get_xdata()[0]) for dot in dots]
    assert places == pytest.approx([1.5, 1.5, 1.5, 1 / 0.7, 0.5], rel=0.01)  # metric by metric, then by points
    assert [to_hex(dot.get_color()).upper() for dot in dots[2:]] == [worth.BETTER, worth.BETTER, worth.WORSE]
    names_of_rows = [text.get_text() for text in ax.get_yticklabels()]
    assert names_of_rows[1:3] == ["tokens/s, concurrency 8", "tokens/s, concurrency 16"]
    assert ax.get_xscale() == "log"
    ticks = [float(line.get_xdata()[0]) for line in ax.lines if line.get_marker() == "|"]
    assert ticks[0] == pytest.approx(1.2)  # the target of the first claim
    assert texts(ax)[2].startswith("1.50x   ")


def test_what_all_rows_have_in_common_is_said_once():
    given = result(sizes=(1, 8), noise=0.001)
    (ax,) = worth.forest(replace(given, info=replace(given.info, claims=given.info.claims[:1]))).axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["concurrency 1", "concurrency 8"]
    assert ax.get_xlabel() == "tokens/s: times better than whole prompts"


def test_every_variant_has_its_share_of_the_rows():
    variants = {"base": "off", "a": "a", "b": "b", "c": "c"}
    claims = [Claim("output_tokens_per_s", v, f"concurrency={n}", Bound.ratio_at_least, 1.2, "base", f"concurrency={n}")
              for v in "abc" for n in (1, 2, 8)]  # fmt: skip
    given = result(variants=variants, sizes=(1, 2, 8), claims=tuple(claims))
    shown = [(effect.cell[0], effect.cell[1][-1]) for effect in effects.shown(given, 5)]
    assert shown == [("a", "1"), ("a", "8"), ("b", "1"), ("b", "8"), ("c", "1")]  # what comes of it at the other end


@pytest.mark.parametrize(
    ("times", "bound", "value", "source", "colour", "ticks", "told"),
    [
        (1.5, Bound.ratio_at_least, 1.6, "needed", worth.BETTER, [1.6], "target 1.60x: missed"),
        (1.5, Bound.ratio_at_least, 1.2, "needed", worth.BETTER, [1.2], "target 1.20x: met"),
        (1.5, Bound.ratio_at_least, 1.2, "aim", worth.BETTER, [1.2], "aim 1.20x: met"),
        (1.5, Bound.ratio_at_least, 1.5, "needed", worth.BETTER, [1.5], "target 1.50x: not shown"),
        (1.5, Bound.ratio_at_most, 0.9, "simulated", worth.BETTER, [], ""),
        (0.8, Bound.ratio_at_least, 0.75, "needed", worth.WORSE, [0.75], "target 0.750x: met"),
        (0.8, Bound.ratio_at_most, 0.9, "simulated", worth.WORSE, [], ""),
        (1.0, Bound.ratio_at_least, 0.9, "needed", worth.UNTOLD, [0.9], "target 0.900x: met"),
    ],
)
def test_the_colour_is_whether_it_is_better_and_the_verdict_stands_beside_it(
    times, bound, value, source, colour, ticks, told
):
    """Who claims that it is at most so good has nothing to reach."""
    claim = Claim("output_tokens_per_s", "new", "concurrency=8", bound, value, "base", "concurrency=8", source)
    given = result(sizes=(8,), claims=(claim,), noise=0.01)
    scaled = [replace(row, value=row.value * times / 1.5) if row.variant == "new" else row for row in given.rows]
    (ax,) = worth.forest(replace(given, rows=tuple(scaled))).axes
    (dot,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert dot.get_xdata()[0] == pytest.approx(times, rel=0.05)
    assert (to_hex(dot.get_color()).upper(), dot.get_label()) == (colour.upper(), worth.SAYS[colour])
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "|"] == pytest.approx(ticks)
    assert texts(ax)[0].partition("\n")[2] == told


@pytest.mark.parametrize(
    ("at_most", "reached"),
    [(80, "met"), (60, "not shown"), (40, "missed")],
)
def test_an_absolute_target_is_told_beside_a_ratio_and_stands_thin_on_its_axis(at_most, reached):
    """Here the baseline varies less than the claimed variant, of which the claim alone is."""
    values = {"base": (120, 120, 120), "new": (55, 60, 65)}
    found = [Row(v, "concurrency=8", r, "ttft_p50_ms", x, "ms") for v, own in values.items() for r, x in enumerate(own)]
    claims = [Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, at_most, source="target", aim=at_most - 5)]
    claims += [
        Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 1.0, "base", "concurrency=8", "needed")
    ]
    (ax,) = worth.forest(result(rows=found, sizes=(8,), claims=tuple(claims))).axes
    ticks = [line for line in ax.lines if line.get_marker() == "|"]
    assert [(line.get_label(), line.get_markeredgewidth()) for line in ticks] == [
        (f"{name}, by the baseline's median", 1) for name in ("target", "aim")
    ]
    assert [line.get_xdata()[0] for line in ticks] == pytest.approx([120 / at_most, 120 / (at_most - 5)])
    assert texts(ax) == [f"2x   60 ms against 120\ntarget {at_most} ms: {reached} (aim {at_most - 5} ms)"]


def test_the_target_of_a_ratio_keeps_its_tick_beside_an_absolute_claim():
    ratio = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 0.8, "base", "concurrency=8", "target")
    needed = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, 500.0, source="needed")
    (ax,) = worth.forest(result(sizes=(8,), claims=(ratio, needed))).axes
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "|"] == [1 / 0.8]
    assert [text.partition("\n")[2] for text in texts(ax)] == ["target 1.25x: met"]


def test_the_axis_says_all_that_rows_are_compared_with():
    def label(*claims):
        return worth.forest(result(claims=claims)).axes[0].get_xlabel().partition(": ")[2]

    here = Claim("output_tokens_per_s", "new", "concurrency=8", Bound.ratio_at_least, 1.2, "base", "concurrency=8")
    apart = replace(here, bound=Bound.ratio_at_least, reference_variant="new", reference_point="concurrency=1")
    alone = Claim("ttft_p50_ms", "base", "concurrency=8", Bound.at_most, 900.0)
    assert label(here) == "times better than whole prompts"
    both = label(here, apart)
    assert both == "times better than whole prompts, or than at the point that it is compared with"
    (ax,) = worth.forest(result(claims=(here, alone))).axes
    assert ax.get_xlabel() == "times better than whole prompts, or times its target"
    assert [text[-5:] for text in texts(ax)[-1:]] == [": met"]


def test_a_prediction_is_no_gain():
    variants = {"base": "off", "base predicted": "off, predicted", "new": "on", "new predicted": "on, predicted"}
    of_new = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 0.9, "base", "concurrency=8")
    near = Claim("ttft_p50_ms", "new predicted", "concurrency=8", Bound.ratio_at_most, 1.05, "new", "concurrency=8")
    given = result(variants=variants, gates=[], claims=(near, of_new))
    assert {effect.cell[0] for effect in effects.shown(given, 5)} == {"new"}
    about_predictions = replace(given, info=replace(given.info, claims=(near,)))
    assert effects.shown(about_predictions, 5) == []
    assert "effects" not in names(about_predictions)


def test_what_is_not_told_from_one_is_grey():
    (ax,) = worth.forest(result(noise=0.8, seed=1)).axes
    (first, *_) = [line for line in ax.lines if line.get_marker() == "o"]
    assert to_hex(first.get_color()) == worth.UNTOLD


def test_nothing_to_compare_has_no_forest():
    given = result(variants={"base": "mini-infer"}, baseline=None, gates=[], claims=())
    assert names(given) == ["speed"]


def test_an_interval_far_beyond_the_medians_is_an_arrow():
    found = [Row(v, "concurrency=1", n, "output_tokens_per_s", x, "") for v, own in
             {"base": (10, 10, 10), "new": (2, 15, 300)}.items() for n, x in enumerate(own)]  # fmt: skip
    (ax,) = worth.forest(result(rows=found, sizes=(1,), claims=())).axes
    assert [line.get_marker() for line in ax.lines if line.get_marker() in ("<", ">")] == ["<", ">"]
    left, right = (line for line in ax.lines if line.get_marker() in ("<", ">"))
    assert (left.get_xdata()[0], right.get_xdata()[0]) == (pytest.approx(1 / 3), pytest.approx(1.5 * 3))


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (2, 300, ["3", "10", "30", "100", "300"]),
        (2, 90, ["2", "5", "10", "20", "50"]),
        (3, 9, ["3", "5", "7"]),
        (10.1, 12, None),
    ],
)
def test_a_log_axis_has_several_numbers_whatever_it_spans(low, high, labels):
    figure, ax = frame.one(3)
    ax.plot([low, high], [1, 1])
    ax.set_xscale("log")
    frame.log_ticks(ax.xaxis)
    ax.set_xlim(low, high)
    figure.canvas.draw()
    found = [float(label.get_text()) for label in ax.get_xticklabels()]
    shown = [frame.plain(place) for place in found if low <= place <= high]
    assert len(shown) >= 3 if labels is None else shown == labels


def test_a_picture_of_nothing_that_the_run_has_measured_is_left_out():
    unknown = PanelSpec("ttft_p50_ms", PanelKind.curve, x="decode_ms")
    given = result(plots=(PlotSpec("speed", "", (unknown,)), PlotSpec("both", "", (unknown, PanelSpec("itl_p99_ms")))))
    assert names(given) == ["effects", "both"]


def test_a_picture_in_which_no_value_counts_is_left_out():
    """Not even where values count at points that it does not show."""
    given = result()
    lines = PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency")
    elsewhere = [PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.rate_per_s"),
                 PanelSpec("ttft_p50_ms", where={"workload.concurrency": 2}),
                 PanelSpec("ttft_p50_ms", PanelKind.curve, x="itl_p99_ms")]  # fmt: skip
    whole = [
        PanelSpec("ttft_p50_ms", PanelKind.gantt),
        PanelSpec("ttft_p50_ms", PanelKind.stack, parts=("itl_p99_ms",)),
    ]
    plots = [PlotSpec(f"p{n}", "", (panel,)) for n, panel in enumerate([*elsewhere, *whole, lines])]
    bad = [replace(row, valid=False, reason="short") if row.metric == "itl_p99_ms" else row for row in given.rows]
    given = replace(
        given, rows=tuple(bad), info=replace(given.info, plots=(*plots, PlotSpec("last", "", (*elsewhere, lines))))
    )
    assert names(given) == ["effects", "p5", "last"]


# Bars that would say nothing


def test_a_bar_that_dwarfs_another_is_a_dot_on_a_log_axis():
    panel = PanelSpec("output_tokens_per_s")
    variants = {"base": "one", "new": "two", "third": "three"}
    given = result(sizes=(8,), variants=variants, rows=rows({"base": 1, "new": 400, "third": 20}))
    (ax,) = gallery.panels(PlotSpec("plot", "A title", (panel,)), given).axes
    assert ax.get_xscale() == "log"
    assert not ax.patches
    dots = [float(line.get_xdata()[0]) for line in ax.lines if line.get_gid()]
    assert dots == pytest.approx([1, 400, 20], rel=0.01)
    even = replace(given, rows=tuple(rows({"base": 10, "new": 20, "third": 20})))
    (ax,) = gallery.panels(PlotSpec("plot", "A title", (panel,)), even).axes
    assert (len(ax.patches), ax.get_xscale()) == (3, "linear")


def test_more_variants_than_can_be_told_apart_in_a_group_are_rows():
    variants = {"base": "base"} | {f"v{i}": f"v{i}" for i in range(6)}
    assert bars.of(PanelSpec("itl_p99_ms"), result(variants=variants)).names == list(variants.values())
    values = dict.fromkeys(variants, 5.0)
    given = result(variants=variants, rows=[*rows(values), *rows(values, point="concurrency=1")])
    found = bars.of(PanelSpec("output_tokens_per_s"), given)
    assert found.series == ["concurrency 1", "concurrency 8"]
    assert (found.dots, found.log) == (True, False)
    few = {"base": 5.0, "new": 6.0}
    given = result(rows=[*rows(few), *rows(few, point="concurrency=1")])
    found = bars.of(PanelSpec("output_tokens_per_s"), given)
    assert (found.names, found.series, found.dots) == (["1", "8"], list(given.info.variants.values()), False)


def test_up_to_six_variants_at_several_points_are_dots_in_their_colours():
    variants = {f"v{i}": f"v{i}" for i in range(6)}
    values = {v: 5.0 + n for n, v in enumerate(variants)}
    given = result(variants=variants, rows=[*rows(values), *rows(values, point="concurrency=1")], claims=())
    (ax,) = gallery.panels(PlotSpec("plot", "A title", (PanelSpec("output_tokens_per_s"),)), given).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "8"]
    dots = [line for line in ax.lines if line.get_gid()]
    assert [to_hex(line.get_color()).upper() for line in dots[::2]] == list(frame.COLOURS[:6])
    assert texts(ax) == [wording.number(1.001 * values[v]) for v in variants for _ in "18"], "each has its number"


def test_of_many_rows_the_best_are_drawn_and_those_that_are_all_alike_are_told():
    """What is the best by the first panel need not be so by another, whose title does not say it."""
    points = {f"case {n}": {"case": f"case {n}"} for n in range(17)}
    found = [row for n, p in enumerate(points) for metric, x in (("ttft_p50_ms", 40 - n), ("output_tokens_per_s", 100))
             for row in rows({"new": x}, metric, p, repeats=1)]  # fmt: skip
    given = result(
        variants={"new": "on"}, baseline=None, gates=[], claims=(), sizes=range(17), points=points, rows=found
    )
    panels = (PanelSpec("ttft_p50_ms"), PanelSpec("output_tokens_per_s"))
    first, second = gallery.panels(PlotSpec("plot", "A title", panels), given).axes
    assert [label.get_text() for label in first.get_yticklabels()] == list(points)[2:]
    assert first.get_title() == "the best 15 of 17, lower is better"
    assert second.get_title() == "the same 15 of 17, higher is better"
    assert texts(second) == ["all from 100 to 100"]
    (alone,) = gallery.panels(PlotSpec("plot", "A title", panels[1:]), given).axes
    assert len(alone.patches) == 15, "somebody has to name the rows"
    few = replace(given, info=replace(given.info, points=dict(list(points.items())[:15])))
    assert [ax.get_title() for ax in gallery.panels(PlotSpec("plot", "A title", panels), few).axes] == [
        "lower is better",
        "higher is better",
    ]


def test_pairs_that_cannot_be_told_from_one_are_grey():
    measured = {"none": (100, 101, 99), "a": (150, 151, 149), "b": (120, 180, 80), "a+b": (180, 181, 179)}
    found = [Row(v, "concurrency=1", r, "output_tokens_per_s", x, "") for v, own in measured.items()
             for r, x in enumerate(own)]  # fmt: skip
    given = result(sizes=(1,), variants={v: v for v in measured}, baseline="none", rows=found)
    figure = frame.new(4, 4)
    ax = figure.subplots()
    assert worth.matrix(ax, PanelSpec("output_tokens_per_s"), given)
    noise = ax.images[0].get_array()
    assert noise.mask.tolist() == [[True, False], [True, False]]  # a is told from 1, b and its interaction are not
    assert "(1.00)" in texts(ax)


def test_cases_with_long_names_are_of_one_colour_where_one_variant_has_them():
    points = {name: {"case": name} for name in (f"a case with a name, {n}" for n in range(6))}
    given = result(variants={"new": "on"}, baseline=None, gates=[], claims=(), sizes=range(6), points=points)
    given = replace(given, rows=tuple(rows({"new": 100 + n}, point=point)[0] for n, point in enumerate(points)))
    (ax,) = gallery.panels(PlotSpec("plot", "A title", (PanelSpec("output_tokens_per_s"),)), given).axes
    assert [text.get_text() for text in ax.get_yticklabels()] == list(points)
    assert len({to_hex(bar.get_facecolor()) for bar in ax.patches}) == 1, "all are of one variant"


def test_a_variant_that_was_not_measured_takes_no_place_in_a_group():
    given = result(sizes=(1, 8), variants={"absent": "absent", "base": "off", "new": "on"}, claims=())
    given = replace(given, rows=tuple(row for row in given.rows if row.variant != "absent"))
    (ax,) = gallery.panels(PlotSpec("plot", "A title", (PanelSpec("output_tokens_per_s"),)), given).axes
    assert ax.get_legend_handles_labels()[1] == ["off", "on"]
    assert [to_hex(bar.get_facecolor()).upper() for bar in ax.patches[::2]] == list(frame.COLOURS[1:3])
    assert [bar.get_y() + bar.get_height() / 2 for bar in ax.patches[::2]] == pytest.approx([-0.2, 0.2])


# Memory, kernels


def test_the_interval_of_a_share_stays_within_it():
    metric = Metric("share of the drafts that were accepted", "", Better.higher, share=True)
    found = [row for v in ("base", "new") for n, x in enumerate((0.7, 0.8, 0.99)) for row in
             rows({v: x}, "acceptance", repeats=1) for row in [replace(row, repeat=n)]]  # fmt: skip
    given = result(rows=found, metrics={"acceptance": metric}, claims=(), sizes=(8,))
    lines = PanelSpec("acceptance", PanelKind.lines, x="workload.concurrency")
    (ax,) = gallery.panels(PlotSpec("plot", "A title", (lines,)), given).axes
    ends = [y for bar in ax.collections for segment in bar.get_segments() for y in segment[:, 1]]
    assert max(ends) == 1
    assert 1 < ax.get_ylim()[1] < 1.2, "what is highest has room for its marker"


def test_memory_is_what_the_engine_said_when_it_started():
    given = result(peers={"base": (STARTED,), "new": ({"vllm": "0.23"},)})
    assert stacks.memory_of(given) == {given.info.variants["base"]: {"weights": 14.0, "KV": 30.0, "CUDA graphs": 1.0}}
    device = given.info.provenance.device | {"gpu_memory_gib": 80.0}
    on_gpu = replace(given, info=replace(given.info, provenance=replace(given.info.provenance, device=device)))
    (ax,) = stacks.memory(on_gpu).axes
    assert [bar.get_width() for bar in ax.patches] == [14.0, 30.0, 1.0]
    assert texts(ax)[-1] == "45 of 80"
    drafts = {"draft model": "0.75 GiB, KV 0.25 GiB", "CUDA graphs of steps with drafts": "of 3 (1 s, 1 GiB)"}
    parts = stacks.memory_of(result(peers={"base": (STARTED | drafts,)}))[given.info.variants["base"]]
    assert parts == {"weights": 14.0, "draft model": 1.0, "KV": 30.0, "CUDA graphs": 2.0}
    others = {"new": (STARTED,), "third": (STARTED | drafts,), "fourth": (STARTED,)}
    (ax,) = stacks.memory(result(variants={v: v for v in others}, baseline="new", peers=others)).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["new and 1 alike", "third"]
    assert "memory-map" in names(given)
    assert "memory-map" not in names(result())


def test_the_kernels_of_a_peers_step_stand_beside_ours():
    plain = {"base": 950.0, "new": 1100.0}
    profiles = tuple(StepProfile(v, "concurrency=8", 4, 8, us, 1000.0, 900.0, 50.0) for v, us in plain.items())
    kernels = (
        KernelRow("base", "concurrency=8", "other", "_fma_kernel", 4, 800.0),  # as an older result called it
        KernelRow("base", "concurrency=8", "other", "_gather", 4, 100.0),
        KernelRow("new", "concurrency=8", "other", "something", 4, 900.0),
    )
    given = replace(result(profiles=profiles), kernels=kernels)
    (ax,) = stacks.steps(given).axes
    labels = ax.get_legend_handles_labels()[1]
    assert labels[:2] == [stacks.PLAIN, "linear"]
    ticks, _ = (line for line in ax.lines if line.get_marker() == "|")
    assert list(ticks.get_xdata()) == [950.0, 1100.0]
    sums = [(text.get_text(), text.xy[0]) for text in ax.texts if "tick" in text.get_text()]
    assert sums == [("1,000 (tick: 950)", 1000.0), ("1,000 (tick: 1,100)", 1100.0)], "behind both"
    assert [text.get_text().replace("\n", " ") for text in ax.get_yticklabels()] == [
        f"{label}, concurrency 8" for label in given.info.variants.values()
    ]
    assert [picture.name for picture in gallery.of(given).first] == ["effects", "profile"]
    grids = [grid for grid in stacks.tables("concurrency=8", given) if "whole prompts" in grid.title]
    assert grids[0].rows[0][:2] == ("_fma_kernel", "linear")


# The pointer


def test_what_points_say_stands_in_the_svg_as_often_as_there_are_points():
    gates = [equal("new", f"concurrency={n}") for n in (1, 8)]
    given = result(gates=gates, variants={"base": 'a "b" <c>', "new": "on"})
    lines = PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency")
    text = frame.svg(gallery.panels(PlotSpec("plot", "A title", (PanelSpec("output_tokens_per_s"), lines)), given), "f")
    root = ElementTree.fromstring(text)  # a name with quotes breaks nothing
    told = {e.get("data-tip"): e for e in root.iter() if e.get("data-tip")}
    of_lines = [tip for tip in told if frame.NEXT in tip]
    assert len(told) == 4 + 2  # bars, and lines
    assert len(of_lines) == 2
    uses = [child for child in told[of_lines[0]].iter() if child.tag.endswith("use")]
    assert len(uses) == len(of_lines[0].split(frame.NEXT)) == 2
    assert any(tip.startswith('a "b" <c>, 1: ') for tip in of_lines)
    assert "<metadata>" not in text


def test_distributions_matrices_and_formulas_answer_to_the_pointer():
    given = result(requests=requests(point="concurrency=1"))
    told = re.findall('data-tip="([^"]*)"', frame.svg(load.waits(load.waits_of(given), given), "f"))
    assert len(told) == 1
    assert re.match(r"whole prompts: 90 % of requests above [\d.]+ ms", told[0])
    assert len(told[0].split(frame.NEXT)) == 6, "down to the share of one request"
    measured = {"none": (100, 101, 99), "a": (150, 151, 149), "b": (120, 121, 122), "a+b": (180, 181, 179)}
    found = [Row(v, "concurrency=1", r, "output_tokens_per_s", x, "") for v, own in measured.items()
             for r, x in enumerate(own)]  # fmt: skip
    given = result(sizes=(1,), variants={v: v.upper() for v in measured}, baseline="none", rows=found, claims=())
    panel = PanelSpec("output_tokens_per_s", PanelKind.matrix)
    (told,) = re.findall('data-tip="([^"]*)"', frame.svg(gallery.panels(PlotSpec("p", "", (panel,)), given), "f"))
    alone, _, pair, product = told.split(frame.NEXT)
    assert alone.startswith("A: 1.50x [")
    assert pair.startswith("A and B: 1.80x [")
    assert product.endswith("] of the product of both")


def test_a_heat_map_shows_where_tokens_went():
    loads = [((3, 1), (0, 0)), (), ((1, 3), (9, 1))]  # by step, layer and expert; nobody counted in the second
    served = SimpleNamespace(records=[SimpleNamespace(expert_tokens=load) for load in loads])
    rows = expert_rows("base", "concurrency=8", served)
    assert rows == [
        ExpertRow("base", "concurrency=8", 0, ("4", "4")),
        ExpertRow("base", "concurrency=8", 1, ("9", "1")),
    ]
    counted = replace(result(), experts=(*rows, *expert_rows("new", "concurrency=8", served)))
    picture = next(picture for picture in chain(*gallery.of(counted)) if picture.title == worth.EXPERTS)
    ax, *_ = picture.draw().axes
    assert ax.images[0].get_array().tolist() == [[1.0, 1.0], [1.8, 0.2]]
    assert ax.get_title() == "concurrency=8: busiest 1.8x"
    assert "layer 1: 1.80x the average at expert 0, 0.20x at least" in frame.svg(ax.figure, "f")
