"""How figures look: colours, marks, and numbers on axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def plain(value: float) -> str:
    """`0.5  20  1,000  1,000,000`"""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def spread(places: Sequence[float], scale: Any = float) -> list[float]:
    """Ticks that leave each other room for a label, the largest first."""
    room = 0.15 * (scale(max(places)) - scale(min(places))) if places else 0.0
    shown: list[float] = []
    for place in sorted(places, reverse=True):
        if not shown or scale(shown[-1]) - scale(place) >= room:
            shown.append(place)
    return shown
