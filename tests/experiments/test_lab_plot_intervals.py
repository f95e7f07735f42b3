"""What is measured rules an axis, and a very wide interval runs off it; no two variants look the same."""

from __future__ import annotations

import pytest
from made_up import result
from test_lab_plots import axes_of

from experiments.lab.config.spec import PanelKind, PanelSpec
from experiments.lab.judge import stats
from experiments.lab.show.figures import bars
from experiments.lab.show.figures.frame import line_style
from experiments.lab.show.figures.lines import intervals
from experiments.lab.store.rows import Row

WIDE = [1.91, 1.45, 0.02]  # the interval goes from 0.0005 to 250


def given(wide=WIDE, sizes=(1, 8)):
    """One wide interval, of the second variant at the first point."""
    values = {("base", 1): [0.9, 1.0, 1.1], ("base", 8): [1.1, 1.2, 1.3], ("new", 1): wide, ("new", 8): [0.8, 0.9, 1.0]}
    rows = [
        Row(variant, f"concurrency={n}", repeat, metric, value, "")
        for (variant, n), repeats in values.items()
        if n in sizes
        for repeat, value in enumerate(repeats)
        for metric in ("ttft_p50_ms", "output_tokens_per_s")
    ]
    return result(rows=rows, sizes=sizes, claims=())


def ends(ax, column):
    """Of all intervals: the x (column 0) or y where they end."""
    return [end for bar in ax.collections for segment in bar.get_segments() for end in segment[:, column]]


def arrows(ax):
    """Where intervals leave the axes."""
    return [line.get_marker() for line in ax.lines if line.get_marker() in list("<>^v") and not line.get_clip_on()]


def test_intervals_are_of_what_varies_between_processes():
    apart = {(process, repeat): 10.0 + 5 * process for process in range(3) for repeat in range(4)}
    one_process = {(0, repeat): value for repeat, value in enumerate([10.0, 15.0, 20.0])}
    found = intervals([apart, one_process, {(0, 0): 3.0}])
    assert not found.caps
    of_two = intervals([{(0, 0): 3.0, (0, 1): 3.5}, {(0, 0): 4.0}])
    assert (of_two.medians, of_two.errors) == ([3.25, 4.0], ([0.25, 0.0], [0.25, 0.0])), "their range"
    assert of_two.caps["capsize"] == 0
    whole = stats.estimate([10.0, 15.0, 20.0])
    assert found.medians == [15.0, 15.0, 3.0]
    for errors, distance in zip(found.errors, (15 - whole.low, whole.high - 15), strict=True):
        assert errors[:2] == pytest.approx([distance] * 2)
        assert errors[2] != errors[2], "one repeat has no interval, and NaN is not drawn"


@pytest.mark.slow
@pytest.mark.parametrize(
    "panel",
    [
        PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency"),
        PanelSpec("ttft_p50_ms", PanelKind.curve, x="output_tokens_per_s"),
        PanelSpec("output_tokens_per_s", PanelKind.formula, x="workload.concurrency"),
    ],
    ids=lambda panel: panel.kind.value,
)
def test_a_wide_interval_does_not_press_a_panel_flat(panel):
    (ax,) = axes_of([panel], given())
    assert ax.get_ylim()[1] < 6 < max(ends(ax, 1)), "the interval goes to 250, and is seen to run off"
    if panel.kind is PanelKind.curve:
        assert ax.get_xlim()[1] < 6 < max(ends(ax, 0))
    (narrow,) = axes_of([panel], given([1.0, 1.1, 1.2]))
    assert max(ends(narrow, 1)) <= narrow.get_ylim()[1]


@pytest.mark.slow
def test_bars_and_log_axes_are_held_likewise():
    for sizes in ((1,), (1, 8)):
        (bars,) = axes_of([PanelSpec("ttft_p50_ms")], given(sizes=sizes))
        assert bars.get_xlim()[1] < 6 < max(ends(bars, 0))
        number = next(text for text in bars.texts if text.get_text() == "1.45")
        assert number.xy[0] == bars.get_xlim()[1], "where the interval leaves the axis"
        assert arrows(bars) == [">"]
    panel = PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency", log_y=True)
    (lines,) = axes_of([panel], given())
    assert lines.get_yscale() == "log"
    low, high = lines.get_ylim()
    assert min(ends(lines, 1)) < 0.1 < low < high < 10 < max(ends(lines, 1))
    (of_two,) = axes_of([panel], given(WIDE[:2]))
    assert max(ends(of_two, 1)) == max(WIDE), "of two values the range is drawn"
    assert (arrows(lines), arrows(of_two)) == (["v", "^"], [])


@pytest.mark.slow
def test_of_bars_beside_each_other_only_those_of_two_values_have_their_range():
    """Apart as these two are, they stand there instead of a median."""
    values = {"base": [9.0, 10.0, 11.0], "new": [2.0, 30.0]}
    rows = [Row(v, "concurrency=8", n, "ttft_p50_ms", x, "ms") for v, own in values.items() for n, x in enumerate(own)]
    (ax,) = axes_of([PanelSpec("ttft_p50_ms")], result(rows=rows, sizes=(8,), claims=()))
    whole = stats.estimate(values["base"])
    assert ends(ax, 0) == pytest.approx([whole.low, whole.high, 2.0, 30.0])
    assert [bar.get_linewidth()[0] for bar in ax.collections] == [1.4, 0.8]
    assert [text.get_text() for text in ax.texts] == ["10", "2 and 30"]


@pytest.mark.slow
def test_an_axis_starts_at_zero_whatever_an_interval_says():
    (ax,) = axes_of([PanelSpec("ttft_p50_ms")], given([0.0, 1.0, 1.5]))
    assert min(ends(ax, 0)) == ax.get_xlim()[0] == 0


def test_any_two_variants_look_different():
    """In bars by colour and hatch, in lines by colour, marker and dashes, in distributions without markers."""
    styles = [line_style(variant, 0) for variant in range(36)]
    looks = {
        "lines": [(style["color"], style["marker"]) for style in styles],
        "distributions": [(style["color"], style["linestyle"]) for style in styles],
        "bars": [(style["color"], style["hatch"]) for style in map(bars.bar_style, range(36))],
    }
    for where, own in looks.items():
        assert len(set(own)) == len(own), where
    assert len({style["color"] for style in styles[:9]}) == 9
