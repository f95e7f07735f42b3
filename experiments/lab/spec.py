"""What the YAML of an experiment may say, whatever the experiment measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from experiments.lab.check import Checked
from mini_infer.core.errors import ConfigError

VARIANT_KEYS = ("kind", "label")  # of a variant, beside the engine's sections
RATE = "workload.rate_per_s"  # what a search varies
IN_TIME = 0.9  # of the requests, at a rate that is called sustained
PREDICTED = " predicted"  # behind a variant's name: the same one, simulated
STEPS = "steps' times"  # of a simulated variant, among the facts about it: where they come from
# How that begins where nobody has measured them.
BOUND = "the roofline, a bound that no step can beat"
ESTIMATE = "estimated from those of one rank"
NOT_MEASURED = " (not measured)"  # behind a plan's name: what the steps of its layout take
PREFILL_SHARE = "prefill_share"  # of the engines, which then compute prompts for the others: 0 where all do both
# Settings of how GPUs are put together, and of what a step takes there: layouts in which they are equal have one shape.
SHAPE = ("engine.parallel.tensor", "engine.parallel.pipeline", PREFILL_SHARE, "engine.model.quantization",
         "engine.speculation.method")  # fmt: skip


def settings_of(variant: Mapping[str, Any]) -> dict[str, Any]:
    """Of the engine, that it changes."""
    return {key: value for key, value in variant.items() if key not in VARIANT_KEYS}


@dataclass(frozen=True)
class ClaimSpec:
    """One bound, or at_least and at_most together. A ratio is to the variant `to` at the same point (default: the
    baseline), or to the same variant at `against`. With `everywhere` it is a claim for each point. `aim` is a stricter
    bound: shown, not judged."""

    metric: str
    variant: str
    at: dict[str, Any] = field(default_factory=dict)
    everywhere: bool = False
    against: dict[str, Any] = field(default_factory=dict)
    to: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    ratio_at_least: float | None = None
    ratio_at_most: float | None = None
    aim: float | None = None
    source: str = ""  # where the figure comes from


class PanelKind(str, Enum):
    bars = "bars"  # one group of bars a point
    lines = "lines"  # one line a variant, over a numeric setting
    curve = "curve"  # one curve a variant through its points: the metric over another metric, such as a reached rate
    matrix = "matrix"  # pairs of mechanisms, from variants called a, b and a+b beside the baseline
    formula = "formula"  # speed-up over the baseline, measured and by Leviathan's formula, over a setting or a metric
    front = "front"  # every point's metric over another one, `x`: the best so far as a line, bounds as hollow marks
    stack = "stack"  # bars of pieces, which are `parts`; the figure's only panel
    gantt = "gantt"  # requests of a point over time, a column a variant; the figure's only panel


@dataclass(frozen=True)
class PanelSpec:
    metric: str
    kind: PanelKind = PanelKind.bars
    x: str | None = None  # lines: the point's key along the x axis; curve: the metric along it; formula: either
    x_label: str = ""
    log_x: bool = False
    log_y: bool = False
    where: dict[str, Any] = field(default_factory=dict)  # only points with these settings, which stand in its title
    mark: float | None = None  # formula: a place on the x axis to be marked
    mark_label: str = ""
    parts: tuple[str, ...] = ()  # stack: the metrics of its pieces, in their order

    def __post_init__(self) -> None:
        along = {
            PanelKind.lines: "lines: name the point's key",
            PanelKind.curve: "a curve: name the metric",
            PanelKind.front: "a front: name the metric",
            PanelKind.formula: "a formula: name the point's key, or the metric,",
        }
        if self.kind in along and self.x is None:
            raise ConfigError(f"the panel of {self.metric!r} draws {along[self.kind]} along its x axis in `x`")
        if self.mark is not None and self.kind is not PanelKind.formula:
            raise ConfigError(f"the panel of {self.metric!r}: `mark` goes with kind: formula")
        if self.kind is PanelKind.bars and self.log_y:
            raise ConfigError(f"the panel of {self.metric!r}: bars start at 0; for a log axis choose kind: lines")
        if (self.kind is PanelKind.stack) != bool(self.parts):
            raise ConfigError(f"the panel of {self.metric!r}: kind: stack and `parts` go together")


@dataclass(frozen=True)
class PlotSpec:
    name: str  # of the file
    title: str
    panels: tuple[PanelSpec, ...] = ()


@dataclass(frozen=True)
class ExperimentSpec(Checked, section="experiment"):
    """The texts, claims and figures of a report."""

    title: str
    question: str
    method: str = ""  # how it was measured, in a paragraph for a stranger
    claims: tuple[ClaimSpec, ...] = ()
    plots: tuple[PlotSpec, ...] = ()
    code: tuple[str, ...] = ()  # files that implement the mechanism
    limits: tuple[str, ...] = ()  # what the numbers do not say
    original: str = ""  # the original project's figure, as the index shows it
    target: str = ""  # the figure to reach or beat
