"""What a time is made of: metrics of one result as the pieces of a bar, a bar for each variant and point."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.lab.judge import stats
from experiments.lab.show import wording
from experiments.lab.show.figures import frame
from experiments.lab.show.figures.frame import COLOURS, HATCHES
from experiments.lab.spec import PanelSpec
from experiments.lab.store.result import Result


def draw(panel: PanelSpec, result: Result) -> Figure | None:
    """None where no variant has all the pieces anywhere."""
    info = result.info
    known = [part for part in panel.parts if part in info.metrics]
    rows: dict[str, dict[str, float]] = {}
    for point in info.points:
        for variant, label in info.variants.items():
            found = {part: list(result.table.values(variant, point, part).values()) for part in known}
            if found and all(found.values()):
                pieces = {info.metrics[part].label: max(0.0, stats.median(values)) for part, values in found.items()}
                rows[f"{label}, {wording.point(point)}"] = pieces
    if not rows:
        return None
    names = [info.metrics[part].label for part in known]
    looks = {name: {"color": COLOURS[i], "hatch": HATCHES[i]} for i, name in enumerate(names)}
    figure = frame.stacks(rows, looks, info.metrics[panel.metric].unit)
    figure.axes[0].set_xlabel(frame.axis_label(info.metrics[panel.metric], 60), fontsize=9)
    return figure
