"""What all figures share: size, colours, axes with numbers that a person reads, a legend, and the files they become.
The same result gives the same bytes: no pyplot, default style, no date."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from PIL import Image  # matplotlib writes its PNGs with it

from experiments.lab.judge.metrics import Metric

# Okabe and Ito's palette, which people with any colour vision can tell apart, with a brown for its black, on which no
# interval could be seen. Of nine colours, seven hatches, seven markers and four dashes any two of 36 variants differ.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#661100", "#F0E442")
BOUND = "#D55E00"
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "ooo", "---")
MARKERS = "os^Dv<>"
DASHES = ("-", "--", "-.", ":")
INK = "#404040"
ON_TOP: dict[str, Any] = {  # a text that may cross lines and bars
    "zorder": 6,
    "bbox": {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
}
EDGE: Any = ("axes fraction", "data")  # coordinates: from the left end of the axes to the right one, and rows
DPI = 144
WIDTH = 10.2  # inches: about what a code-hosting page shows without shrinking
FOLD = 6.25  # inches, 900 pixels: what a picture above the fold may take of a screen
LINE = 0.15  # inches of a name beside an axis
MADE_FOR = "mini-infer report: "
LEGEND_ROWS, LEGEND_ROW = 4, 0.19  # that every figure has room for; inches
LEGEND_CHARACTERS = 110  # a row
ROOM = 1.05  # times the highest value an axis from 0 reaches
SPARE = 2.0  # times what is measured it reaches at most, whatever its intervals
MARGIN = 1.25  # times what rules it, beyond which all else runs off
_TIP, NEXT = "tip:", "\u2016"  # begin and separate what the points of an artist say to the pointer
_STYLE = {
    **{"axes.labelsize": 9, "axes.titlesize": 8, "axes.titlecolor": INK, "xtick.labelsize": 9, "ytick.labelsize": 9},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": "#dddddd", "grid.linewidth": 0.8},
}
default_style = partial(matplotlib.style.context, ["default", _STYLE])  # whatever a user's matplotlibrc says


def new(width: float, height: float) -> Figure:
    """In inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def one(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    figure = new(width, height)
    return figure, figure.subplots()


def png(figure: Figure, page: str) -> bytes:
    """The file names its page, so that a report whose results are gone can be told from other pictures."""
    buffer = io.BytesIO()
    with default_style():  # savefig would draw it once more, for sizes that the layout has found
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None, "Description": f"{MADE_FOR}{page}"})
    figure.set_layout_engine(None)  # everything has its place by now, and with an engine a file is drawn twice
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> str:
    """An <svg> element for a page, with coordinates to a tenth of a point; what `says` attached stands in `data-tip`, a
    text a point. Its ids follow from `name`, so that no other figure of the page has them."""
    buffer, dpi = io.StringIO(), figure.dpi
    with default_style(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    figure.dpi = dpi
    text = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue())
    text = re.sub(rf"""id=(["']){_TIP}""", r"data-tip=\1", re.sub(r'<g id="[\w.]+"', "<g", text))
    text = re.sub(r"<(?!g data-tip)[^>]*>", lambda tag: _shorter(tag[0]), text)
    for number, clip in enumerate(re.findall(r'<clipPath id="(\w+)"', text)):  # called after coordinates, whose last
        text = text.replace(clip, f"{name}-{number}")  # digits differ from process to process
    return re.sub(r"\s*\n\s*", "\n", text)


def _shorter(tag: str) -> str:
    tag = re.sub(r'font-family:[^;"]*;?', "", " ".join(tag.split()).replace("xlink:href", "href"))
    tag = re.sub(r'(?<=[\d"]) ?([MLCQz]) ?', r"\1", tag)  # of a path
    return re.sub(r"(\d+\.\d)\d+", r"\1", tag)


def says(artist: Artist, tips: Sequence[str]) -> None:
    """What an artist's points say to the pointer, in the order in which they are drawn."""
    artist.set_gid(_TIP + NEXT.join(tips))


def made_for(path: Path) -> str | None:
    """The page on which a picture belongs; None where it is not one of ours."""
    try:
        with Image.open(path) as image:
            description = str(image.info.get("Description", ""))
    except OSError:
        return None
    return description.removeprefix(MADE_FOR) if description.startswith(MADE_FOR) else None


def legend(figure: Figure, axes: Iterable[Axes], least: int = 2) -> None:
    """One legend below all panels, each label once, its columns as wide as the longest; none of fewer than `least`. It
    is what a figure gets last: intervals that run off its axes get their arrows."""
    found: dict[str, dict[str, Any]] = {}
    for ax in axes:
        _arrows(ax)
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            kind = "bar" if isinstance(handle, (BarContainer, Patch)) else "line"
            found.setdefault(label, {}).setdefault(kind, handle)
    if len(found) >= least:
        columns = max(1, LEGEND_CHARACTERS // (max(len(label) for label in found) + 10))
        height, more = figure.get_figheight(), max(0, -(-len(found) // columns) - LEGEND_ROWS)
        figure.set_figheight(max(height, min(height + more * LEGEND_ROW, FOLD)))  # which the axes would lack
        handles: list[Any] = [tuple(kinds.values()) for kinds in found.values()]
        figure.legend(handles, found.keys(), loc="outside lower center", ncols=min(columns, len(found)), fontsize=9,
                      frameon=False, handlelength=3.4, handler_map={tuple: HandlerTuple(ndivide=None)})  # fmt: skip


def _arrows(ax: Axes) -> None:
    """Where an interval leaves the axis."""
    limits = [sorted(ax.get_xlim()), sorted(ax.get_ylim())]
    bars = [bar for each in ax.containers if isinstance(each, ErrorbarContainer) for bar in each.lines[2]]
    for colour, (start, end) in [(bar.get_color(), ends) for bar in bars for ends in bar.get_segments() if len(ends)]:
        along = int(start[0] == end[0])  # 0: from left to right, 1: from below
        for place, edge, marker in zip((start, end), limits[along], ("<>", "v^")[along], strict=True):
            beyond = place[along] < edge if marker in "<v" else place[along] > edge
            if beyond and limits[1 - along][0] <= place[1 - along] <= limits[1 - along][1]:
                where = (edge, place[1]) if along == 0 else (place[0], edge)
                ax.plot(*where, marker, color=colour, markersize=5, clip_on=False, scalex=False, scaley=False)


def axis_label(metric: Metric, width: int) -> str:
    label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
    return textwrap.fill(label, width)


def scale(axis: XAxis | YAxis, log: bool = False, share: bool = False) -> None:
    """Of an axis. A linear one starts at 0, and what is highest has room for its marker; that of shares which are all
    above one half, and from 0 on look alike, ends at 1."""
    ax, name = axis.axes, axis.axis_name
    along, limit = "xy".index(name), getattr(ax, f"set_{name}lim")
    low, most = (float(ends[along]) for ends in (ax.dataLim.min, ax.dataLim.max))
    if log:
        getattr(ax, f"set_{name}scale")("log")
        log_ticks(axis)
    elif share and 0.5 < low < 1:
        limit(1 - ROOM * (1 - low), 1 + (ROOM - 1) * (1 - low))
        return linear(axis, 8)
    else:
        limit(0, max(axis.get_view_interval()[1], ROOM * most) or 1)
        linear(axis, 5 if name == "x" else 8)
    # What is measured rules an axis, and so do intervals with caps that are not very wide beside it. Others run off:
    # whole they would press everything else flat.
    caps = [cap for each in ax.containers if isinstance(each, ErrorbarContainer) for cap in each.lines[1]]
    every = {line: np.asarray(line.get_data()[along], dtype=np.float64).tolist() for line in ax.lines}
    ends = [place for places in every.values() for place in places if place > 0]
    drawn = [place for line, places in every.items() for place in places if place > 0 and line not in caps]
    if drawn:
        least = max(min(drawn) / SPARE, min(ends) / MARGIN) if log else 0.0
        most = min(max(drawn) * SPARE, max(ends) * MARGIN)
        start, end = axis.get_view_interval()
        if start < least or end > most:
            limit(max(start, least), min(end, most))


class _LogTicks(LogLocator):
    """As few marks as give three labels, whatever the axis spans."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        decades = [10.0**n for n in range(math.floor(math.log10(vmin)), math.ceil(math.log10(vmax)))]
        for subs in ((1, 10), (1, 3, 10) if vmax > 60 * vmin else (1, 2, 5, 10), (1, 1.5, 2, 3, 5, 7, 10)):
            every = sorted({round(decade * sub, 12) for decade in decades for sub in subs})
            if len(found := [place for place in every if vmin <= place <= vmax]) >= 3:
                return found
        return MaxNLocator(nbins=4, steps=[1, 2, 5, 10]).tick_values(vmin, vmax)


def percent(axis: Axis) -> None:
    axis.set_major_formatter(lambda place, _: f"{plain(round(100 * place, 9))} %")


def log_ticks(axis: Axis) -> None:
    """Ticks of a log axis as numbers that a person reads: 0.5 20 1,000 instead of powers."""
    axis.set_major_locator(_LogTicks())
    axis.set_major_formatter(plain)
    axis.set_minor_locator(NullLocator())  # of the marks between them each would cost as much as a label


def ticks(axis: Axis, places: Sequence[float], names: Sequence[str] | None = None) -> None:
    axis.set_ticks(places, [plain(place) for place in places] if names is None else names)
    axis.set_minor_locator(NullLocator())


def linear(axis: Axis, ticks: int) -> None:
    axis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(plain)


def pitch(names: Sequence[str], most: float, room: float) -> float:
    """Inches from row to row: `most`; less where all would take more than `room`, but enough for two lines of a name,
    or for as many as the longest has."""
    lines = max((1 + name.count("\n") for name in names), default=1)
    return max(min(most, room / max(1, len(names))), LINE * max(2, lines))


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.4, -0.6))
    grid_of_rows(ax)


def grid_of_rows(ax: Axes) -> None:
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")


def beside(ax: Axes, text: str, place: tuple[float, float], away: float, **more: Any) -> None:
    """A text `away` points to the right of a place, or to the left."""
    looks: Any = {"va": "center", "fontsize": 8}
    ax.annotate(text, place, (away, 0), textcoords="offset points", **looks | more)


def line_style(variant: int, kind: int) -> dict[str, Any]:
    colour = COLOURS[variant % len(COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[variant % len(MARKERS)],
        "linestyle": DASHES[(variant + kind) % len(DASHES)],
        "markerfacecolor": "white" if kind % 2 else colour,  # and where lines cover each other, rings show
        "markersize": 5.5,
        "capsize": 3,
    }


def plain(value: float, _: object = None) -> str:
    """`0.5  20  1,000  1,000,000`"""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def spread(ax: Axes, places: Sequence[float], log: bool) -> None:
    """The x axis, with ticks at those places that leave each other room for a label, the largest first."""
    ax.set_xscale("log" if log else "linear")
    along = [(math.log(place) if log else place, place) for place in sorted({*places}, reverse=True)]
    shown = along[:1]
    for at, place in along[1:]:
        if shown[-1][0] - at >= 0.15 * (along[0][0] - along[-1][0]):
            shown.append((at, place))
    ticks(ax.xaxis, [place for _, place in shown])
