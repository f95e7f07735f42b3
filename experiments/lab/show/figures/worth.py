"""What mechanisms are worth: how many times better each quantity is, on a log axis with interval, target and aim; alone
and two by two, and whether their gains multiply. And the load of experts."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lab.config.spec import PanelSpec
from experiments.lab.judge import pairs
from experiments.lab.judge.claims import Verdict
from experiments.lab.show import answer, effects, wording
from experiments.lab.show.effects import Effect
from experiments.lab.show.figures import frame
from experiments.lab.store.result import Result, RunInfo

ROWS = 5
LETTER = 0.0145  # of the axis
FAR = 3.0  # an end of an interval this many times beyond the outermost median or tick is an arrow
NEAR = (0.3, 0.5, 0.7, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
BETTER, WORSE, UNTOLD = "#0072B2", "#D55E00", "#8c8c8c"
COLOURS = {1: BETTER, -1: WORSE, 0: UNTOLD}  # by what is told
SAYS = {BETTER: "better (the whole 95 % interval)", WORSE: "worse (the whole interval)", UNTOLD: "neither is shown"}
REACHED = {Verdict.supported: "met", Verdict.refuted: "missed", Verdict.inconclusive: "not shown"}
TICKS = {"target": "#202020", "aim": "#CC79A7"}
BY_MEDIAN = "by the baseline's median"


def forest(result: Result) -> Figure:
    """At most five rows, of a result with anything to compare."""
    info, found = result.info, [(effect, effect.gain) for effect in effects.shown(result, ROWS) if effect.gain]
    figure, ax = frame.one(1.15 + 0.48 * len(found))
    ticks = [effect.ticks for effect, _ in found]
    marks = [1.0, *(gain.median for _, gain in found), *(place for own in ticks for place in own if place)]
    least, most = min(marks) / FAR, max(marks) * FAR
    many = len({v for v in info.variants if v not in (info.baseline, info.aa)}) > 1
    parts: list[list[str]] = []  # of each row metric, variant, and what its point says
    for effect, _ in found:
        where = wording.point(effect.cell[1])
        if effect.reference and effect.at_another_point:
            where += f" beside {wording.point(effect.reference[1])}"
        who = [info.variants[effect.cell[0]]] if many else []
        parts.append([wording.short(effect.metric, info), *who, *filter(None, where.split(", "))])
    for row, (effect, gain) in enumerate(found):
        colour = COLOURS[effect.told]
        ends = [gain.median if end is None else end for end in (gain.low, gain.high)]
        edges = [min(max(end, least), most) for end in ends]
        ax.plot(edges, [row, row], color=colour, linewidth=2.6, solid_capstyle="butt")
        for end, edge, marker in zip(ends, edges, "<>", strict=True):
            if end != edge:
                ax.plot([edge], [row], marker, color=colour, markersize=9)
        (dot,) = ax.plot([gain.median], [row], "o", color=colour, markersize=8, label=SAYS[colour])
        name, figures = ", ".join(parts[row]), answer.figures(effect, info)
        frame.says(dot, [f"{name}: {wording.interval(gain, 'x')} better; {figures}"])
        # Where the claim is on the value itself a tick is thin: that an interval of ratios reaches it proves nothing.
        of_value = effect.is_absolute and effect.base is not None
        for tick, (label, shade) in zip(ticks[row], TICKS.items(), strict=True):
            if tick is not None:
                width, says = (1.0, f"{label}, {BY_MEDIAN}") if of_value else (2.2, label)
                ax.plot([tick], [row], "|", color=shade, markersize=13, markeredgewidth=width, label=says)
        text = f"{wording.number(gain.median)}x   {figures}{_asked(effect, info)}"
        frame.beside(ax, text, (1, row), -4, xycoords=frame.EDGE, ha="right", fontsize=9, color=colour)
    ax.axvline(1, color=frame.INK, linewidth=1)
    # What all rows have in common stands below them.
    alike = set.intersection(*map(set, parts))
    if any(alike >= set(row) for row in parts):
        alike = set()
    own = [", ".join(text for text in row if text not in alike) for row in parts]
    shared = ", ".join(text for text in parts[0] if text in alike)
    frame.name_rows(ax, ["\n".join(textwrap.wrap(name, 44)[:3]) for name in own])
    frame.scale(ax.xaxis, log=True)
    left, right = min(ax.get_xlim()[0], 0.8), max(ax.get_xlim()[1], 1.25)
    if right / left > 6:
        places = ax.xaxis.get_major_locator().tick_values(left, right)
    else:  # finer ones where all rows lie near 1
        places = [place for place in NEAR if left <= place <= right]
        places = places if right / left > 2 else [0.9, *places, 1.1]
    frame.ticks(ax.xaxis, places)
    longest = max(len(line) for note in ax.texts for line in note.get_text().split("\n"))
    room = LETTER * longest  # the figures stand on the right
    ax.set_xlim(left, right * (right / left) ** (room / (1 - room)))
    beside = list(dict.fromkeys(e.beside for e, _ in found if e.reference and not e.at_another_point))
    than = [f"{name} it" if name == "without" else name for name in beside]
    than = ["what it is compared with"] if len(than) > 1 else than
    than += ["at the point that it is compared with"] if any(e.at_another_point for e, _ in found) else []
    words = [f"times better than {', or than '.join(than)}"] if than else []
    words += ["times its target"] if any(e.reference is None for e, _ in found) else []
    ax.set_xlabel(f"{shared}{': ' if shared else ''}{', or '.join(words)}")
    frame.legend(figure, [ax], least=1)
    return figure


def _asked(effect: Effect, info: RunInfo) -> str:
    """What claims ask to be reached, in the units of the row, and whether it is."""
    if effect.reference is None and effect.target is not None:
        return f": {REACHED[effect.verdict]}"  # the figures have the target
    told, unit = list[str](), effect.base.median if effect.base else 1.0
    for name, bound, tick in zip(TICKS, (effect.target, effect.aim), effect.ticks, strict=True):
        if bound is not None and tick is not None:
            own = wording.value(unit * bound, effect.metric, info) if effect.is_absolute else f"{wording.number(tick)}x"
            told.append(f"{name} {own}")
    return f"\n{told[0]}: {REACHED[effect.verdict]}{''.join(f' ({aim})' for aim in told[1:])}" if told else ""


SHOWN = 0.3  # of the scale of colours: what is further from 1 is drawn no darker
NOISE = "#e0e0e0"  # of a pair whose interval holds 1: a colour would say more than is known
KEY = """bold: alone; below: the pair; above: the pair /
the product of both, purple: more, brown: less;
grey: may be 1"""


def matrix(ax: Axes, panel: PanelSpec, result: Result) -> bool:
    """Below the diagonal: a pair's gain. Above it: that gain over the product of both alone; below 1 they eat each
    other. Grey, and above it in brackets, is what cannot be told from 1. Points are taken together, by the geometric
    mean. False where there is nothing to show."""
    info, metric, names = result.info, panel.metric, pairs.mechanisms(result)
    told = {(n, n): alone for n, name in enumerate(names) if (alone := pairs.gain(result, name, metric))}
    if not told:
        return False
    for pair in pairs.of(result, metric):
        j, i = names.index(pair.first), names.index(pair.second)
        told |= {(i, j): pair.both, (j, i): pair.interaction}
    cells, noise = np.full((2, len(names), len(names)), np.nan)
    tips = []
    for (row, column), found in told.items():
        unit = "x" if row >= column else ""
        if not found.told:
            noise[row, column] = 0
        elif not unit:
            cells[row, column] = found.median
        text, weight = f"{found.median:.2f}{unit}", "bold" if row == column else "normal"
        text = text if found.told or unit else f"({text})"
        ax.annotate(text, (column, row), ha="center", va="center", fontsize=9, fontweight=weight)
        both = " and ".join(dict.fromkeys(info.variants[names[place]] for place in (column, row)))
        tips.append(f"{both}: {wording.interval(found, unit)}{'' if unit else ' of the product of both'}")
    ax.imshow(noise, cmap=ListedColormap([NOISE]))
    ax.imshow(cells, cmap="PuOr", norm=TwoSlopeNorm(1.0, 1 - SHOWN, 1 + SHOWN), alpha=0.5)  # numbers stand on it
    rows, columns = zip(*told, strict=True)
    (unseen,) = ax.plot(columns, rows, "s", alpha=0, markersize=20)
    frame.says(unseen, tips)
    labels = [textwrap.fill(info.variants[name], 12) for name in names]
    ax.set_xticks(range(len(names)), labels, fontsize=8, rotation=45)
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    ax.grid(visible=False)
    ax.set_title(f"gain in {info.metrics[metric].label}", fontsize=9)
    ax.set_xlabel(KEY, fontsize=8)
    return True


EXPERTS = "The load of experts"
MOST = 4.0  # times the average: what is above is drawn no darker


def experts(result: Result) -> Figure:
    """A panel a point, of the first variant that has it: variants differ in how tokens travel, not in where they go."""
    points = list(dict.fromkeys(row.point for row in result.experts))
    figure = frame.new(frame.WIDTH, 3.6)
    axes = figure.subplots(1, len(points), squeeze=False, sharex=True, sharey=True)
    for ax, point in zip(axes[0], points, strict=True):
        own = [row for row in result.experts if row.point == point]
        layers = [row for row in own if row.variant == own[0].variant]
        tokens = np.array([[int(count) for count in row.tokens] for row in layers], dtype=float)
        load = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
        image = ax.imshow(load, cmap="cividis", vmin=0, vmax=MOST, aspect="auto", interpolation="nearest")
        ax.grid(visible=False)
        ax.spines[:].set_visible(True)
        lines = ax.hlines(range(len(load)), -0.5, load.shape[1] - 0.5, alpha=0)
        told = [f"layer {n}: {row.max():.2f}x the average at expert {row.argmax()}, {row.min():.2f}x at least"
                for n, row in enumerate(load)]  # fmt: skip
        frame.says(lines, told)
        where = point or result.info.variants[own[0].variant]
        ax.set_title(f"{where}: busiest {load.max():.1f}x", fontsize=9, color="black")
        ax.set_xlabel("expert")
    axes[0][0].set_ylabel("layer with experts")
    for axis in (axes[0][0].xaxis, axes[0][0].yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=list(axes[0]), label="tokens, by the average expert's", extend="max")
    return figure
