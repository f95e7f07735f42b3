"""The answer as a picture: how many times better each quantity is, on a log axis, with interval, target and aim."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.show import answer, effects, wording
from experiments.lab.show.effects import Effect
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import INK
from experiments.lab.store.result import Result, RunInfo

ROWS = 5
LETTER = 0.0145  # of the axis
FAR = 3.0  # an end of an interval this many times beyond the outermost median or tick is an arrow
NEAR = (0.3, 0.5, 0.7, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
BETTER, WORSE, UNTOLD = "#0072B2", "#D55E00", "#8c8c8c"
TICKS = (("target", "#202020", 13), ("aim", "#E69F00", 19))  # colour and height


def draw(result: Result) -> Figure:
    """At most five rows, of a result with anything to compare."""
    found = effects.shown(result, ROWS)
    figure, ax = frame.one(1.15 + 0.48 * len(found), grid="x")
    marks = [1.0, *(effect.gain.median for effect in found if effect.gain)]
    marks += [tick for effect in found for tick in effect.ticks if tick]
    for row, effect in enumerate(found):
        _row(ax, row, effect, result.info, (min(marks) / FAR, max(marks) * FAR))
    ax.axvline(1, color=INK, linewidth=1)
    names, shared = _names(found, result.info)
    frame.name_rows(ax, names)
    frame.scale(ax.xaxis, log=True)
    left, right = min(ax.get_xlim()[0], 0.8), max(ax.get_xlim()[1], 1.25)
    if right / left > 6:
        places = ax.xaxis.get_major_locator().tick_values(left, right)
    else:  # finer ones where all rows lie near 1
        places = [place for place in NEAR if left <= place <= right]
        places = places if right / left > 2 else [0.9, *places, 1.1]
    frame.ticks(ax.xaxis, places)
    text = LETTER * max(len(note.get_text()) for note in ax.texts)  # the figures stand on the right
    ax.set_xlim(left, right * (right / left) ** (text / (1 - text)))
    ax.set_xlabel(f"{shared}{_axis(found, result.info)}", fontsize=9)
    frame.legend(figure, [ax], least=1)
    return figure


def _row(ax: Axes, row: int, effect: Effect, info: RunInfo, within: tuple[float, float]) -> None:
    gain = effect.gain
    assert gain is not None
    colour = {1: BETTER, -1: WORSE, 0: UNTOLD}[effect.told]
    ends = [gain.median if end is None else end for end in (gain.low, gain.high)]
    low, high = (min(max(end, within[0]), within[1]) for end in ends)
    ax.plot([low, high], [row, row], color=colour, linewidth=2.6, solid_capstyle="butt")
    for end, edge, marker in zip(ends, (low, high), "<>", strict=True):
        if end != edge:
            ax.plot([edge], [row], marker, color=colour, markersize=9)
    (dot,) = ax.plot([gain.median], [row], "o", color=colour, markersize=8)
    name = ", ".join(filter(None, _parts(effect, info)))
    frame.says(dot, [f"{name}: {wording.interval(gain, 'x')} better; {answer.figures(effect, info)}"])
    for tick, (label, shade, height) in zip(effect.ticks, TICKS, strict=True):
        if tick is not None:
            legend = frame.once(ax, label)
            ax.plot([tick], [row], "|", color=shade, markersize=height, markeredgewidth=2.2, label=legend)
    text = f"{wording.number(gain.median)}x   {answer.figures(effect, info)}"
    frame.beside(ax, text, (1, row), -4, xycoords=frame.EDGE, ha="right", fontsize=9, color=colour)


def _names(found: list[Effect], info: RunInfo) -> tuple[list[str], str]:
    """Of the rows, without what they all have in common, which stands below them."""
    parts = [_parts(effect, info) for effect in found]
    alike = [len({row[place] for row in parts}) == 1 for place in range(len(parts[0]))]
    own = [", ".join(text for text, same in zip(row, alike, strict=True) if text and not same) for row in parts]
    if not all(own):
        own, alike = [", ".join(filter(None, row)) for row in parts], []
    shared = ", ".join(text for text, same in zip(parts[0], alike, strict=False) if text and same)
    return ["\n".join(textwrap.wrap(name, 44)[:2]) for name in own], f"{shared}: " if shared else ""


def _parts(effect: Effect, info: RunInfo) -> tuple[str, str, str]:
    """Metric, variant and point."""
    many = len({v for v in info.variants if v not in (info.baseline, info.aa)}) > 1
    where = wording.point(effect.cell[1])
    if effect.reference is not None and effect.reference[0] == effect.cell[0]:
        where += f" beside {wording.point(effect.reference[1])}"
    return wording.short(effect.metric, info), info.variants[effect.cell[0]] if many else "", where


def _axis(found: list[Effect], info: RunInfo) -> str:
    beside = {info.variants[e.reference[0]] if e.reference and e.reference[0] != e.cell[0] else "" for e in found}
    if beside == {""}:
        named = {e.reference for e in found}
        return "times its target" if named == {None} else "times better than at the point that it is compared with"
    (other,) = beside if len(beside) == 1 else ("what it is compared with",)
    return f"times better than {'without it' if other == 'without' else other}"
