"""Estimates rule an axis, and an interval that leaves it is seen to do so; no two variants look the same."""

from __future__ import annotations

import pytest
from made_up import result
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWNBASE, CARETLEFTBASE, CARETRIGHTBASE, CARETUPBASE
from test_lab_plots import axes_of

from experiments.lab.judge import stats
from experiments.lab.show.figures import bars
from experiments.lab.show.figures.frame import line_style
from experiments.lab.show.figures.intervals import NOTE, Reach, intervals, mark_cut, reach
from experiments.lab.spec import PanelKind, PanelSpec
from experiments.lab.store.rows import Row

ARROWS = (CARETUPBASE, CARETDOWNBASE, CARETLEFTBASE, CARETRIGHTBASE)
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


def turns(*repeats):
    """Of one process."""
    return [{(0, repeat): value for repeat, value in enumerate(values)} for values in repeats]


def arrows(ax):
    return [
        (line.get_marker(), x, y)
        for line in ax.lines
        if line.get_marker() in ARROWS
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def test_the_reach_is_as_much_again_as_the_estimates_take():
    assert reach([0.5, 2.0]) == Reach(0.0, 4.0)
    assert reach([5.0, 50.0], log=True) == Reach(0.5, 500.0)
    assert reach([5.0], log=True) == Reach(2.5, 10.0)
    assert reach([]) == reach([0.0]) == Reach(), "nothing can be said of an axis without height"


def test_intervals_end_where_they_are_cut():
    found = intervals(turns([9.0, 10.0, 11.0], WIDE, [3.0], [-1.0, 0.0, 5.0]), Reach(0.0, 20.0))
    assert found.medians == [10.0, 1.45, 3.0, 0.0]
    assert found.cut == ([False, False, False, True], [False, True, False, False])
    below, above = found.errors
    whole = stats.estimate([9.0, 10.0, 11.0])
    assert (below[0], above[0]) == (pytest.approx(10 - whole.low), pytest.approx(whole.high - 10))
    assert above[1] == pytest.approx(20 - 1.45)
    assert below[2] != below[2], "one repeat has no interval, and NaN is not drawn"
    assert below[3] == 0


def test_an_interval_is_of_what_varies_between_processes():
    apart = {(process, repeat): 10.0 + 5 * process for process in range(3) for repeat in range(4)}
    (below,), (above,) = intervals([apart], Reach()).errors
    alone = intervals(turns([10.0, 15.0, 20.0]), Reach()).errors
    assert ([below], [above]) == alone


def test_arrows_and_a_note_stand_only_where_something_is_cut():
    ax = Figure().subplots()
    ax.set_title("lower is better")
    mark_cut(ax, [1, 2], intervals(turns([9.0, 10.0, 11.0]) * 2, Reach(0.0, 20.0)))
    assert (arrows(ax), ax.get_title()) == ([], "lower is better")
    for _ in range(2):
        mark_cut(ax, [1, 2], intervals(turns([9.0, 10.0, 11.0], WIDE), Reach(0.0, 20.0)))
    assert arrows(ax) == [(CARETUPBASE, 2, 20.0)] * 2
    assert ax.get_title() == f"lower is better\n{NOTE}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "panel",
    [
        PanelSpec("ttft_p50_ms"),
        PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency"),
        PanelSpec("ttft_p50_ms", PanelKind.curve, x="output_tokens_per_s"),
        PanelSpec("output_tokens_per_s", PanelKind.formula, x="workload.concurrency"),
    ],
    ids=lambda panel: panel.kind.value,
)
def test_a_wide_interval_does_not_press_a_panel_flat(panel):
    (ax,) = axes_of([panel], given())
    assert ax.get_ylim()[1] < 6, "the interval goes to 250"
    ups = [(x, y) for marker, x, y in arrows(ax) if marker == CARETUPBASE]
    assert len(ups) == 1
    assert ups[0][1] <= ax.get_ylim()[1]
    assert NOTE in ax.get_title()
    if panel.kind is PanelKind.curve:
        assert ax.get_xlim()[1] < 6
        assert [marker for marker, _, _ in arrows(ax)].count(CARETRIGHTBASE) == 1
    narrow = axes_of([panel], given([1.0, 1.1, 1.2]))
    assert (arrows(narrow[0]), NOTE in narrow[0].get_title()) == ([], False)


@pytest.mark.slow
def test_horizontal_bars_and_log_axes_are_cut_likewise():
    (bars,) = axes_of([PanelSpec("ttft_p50_ms")], given(sizes=(1,)))
    assert bars.get_xlim()[1] < 6
    assert [marker for marker, _, _ in arrows(bars)] == [CARETRIGHTBASE]
    (number,) = [text for text in bars.texts if text.get_text() == "1.45"]
    assert number.get_position()[0] > 5, "behind the arrow"
    panel = PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency", log_y=True)
    (lines,) = axes_of([panel], given())
    assert lines.get_yscale() == "log"
    low, high = lines.get_ylim()
    assert 0.1 < low < high < 10
    assert {marker for marker, _, _ in arrows(lines)} == {CARETUPBASE, CARETDOWNBASE}


@pytest.mark.slow
def test_an_interval_below_zero_is_cut_at_the_axis():
    (ax,) = axes_of([PanelSpec("ttft_p50_ms")], given([0.0, 1.0, 1.5]))
    assert [(marker, y) for marker, _, y in arrows(ax)][:1] == [(CARETDOWNBASE, 0.0)]
    assert ax.get_ylim()[0] == 0


def test_any_two_variants_look_different():
    """In bars by colour and hatch, in lines by colour, marker and dashes, in distributions without markers."""
    styles = [line_style(variant, 0) for variant in range(36)]
    looks = {
        "lines": [(style["color"], style["marker"]) for style in styles],
        "distributions": [(style["color"], style["linestyle"]) for style in styles],
        "bars": [(style["color"], style["hatch"]) for style in map(bars._bar_style, range(36))],
    }
    for where, own in looks.items():
        assert len(set(own)) == len(own), where
    assert len({style["color"] for style in styles[:9]}) == 9
