"""The bounds of absolute claims, in the figures of their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from experiments.lab.judge.claims import Claim
from experiments.lab.show import wording
from experiments.lab.show.figures.style import BOUND, ON_TOP
from experiments.lab.spec import PanelKind, PanelSpec
from experiments.lab.store.result import Result

FAR = 3  # a bound this many times above everything measured would only press the data flat


def draw(ax: Axes, panel: PanelSpec, result: Result, places: Mapping[str, float]) -> None:
    """The bounds of absolute claims about this metric. A single one is a line with words; several are marks at their
    points, whose numbers stand in the table of claims."""
    claims = []
    for claim in (side for both in result.info.claims for side in both.sides):
        if claim.metric == panel.metric and not claim.bound.is_ratio and claim.point in result.info.points:
            top = ax.get_ylim()[1]
            if claim.value <= FAR * top:
                ax.set_ylim(top=max(top, 1.12 * claim.value))
                claims.append(claim)
    if len(claims) > 1 and len(places) > 1:
        _marks(ax, panel, [claim for claim in claims if claim.point in places], places)
        return
    for index, claim in enumerate(claims):
        ax.axhline(claim.value, color=BOUND, linewidth=1, linestyle="--")
        side = "at least" if claim.bound.is_floor else "at most"
        text = f"claim: {side} {wording.number(claim.value)}" + (f" at {claim.point}" if claim.point else "")
        place = (0.02 + 0.48 * (index % 2), claim.value)
        note = ax.annotate(text, place, (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                           fontsize=8, color=BOUND, annotation_clip=True, **ON_TOP)  # fmt: skip
        note.set_in_layout(False)


def _marks(ax: Axes, panel: PanelSpec, claims: Sequence[Claim], places: Mapping[str, float]) -> None:
    label: str | None = "bound of a claim"
    for claim in claims:
        x = places[claim.point]
        if panel.kind is PanelKind.bars:
            ax.plot([x - 0.46, x + 0.46], [claim.value] * 2, color=BOUND, linewidth=1.6, zorder=5, label=label)
        else:
            ax.plot([x], [claim.value], "_", color=BOUND, markersize=17, markeredgewidth=1.8, zorder=5, label=label)
        label = None
