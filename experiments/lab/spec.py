"""What the YAML of an experiment may say, whatever the experiment measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class ClaimSpec:
    """Exactly one bound. A ratio is to the baseline at the same point, or to the same variant at `against`."""

    metric: str
    variant: str
    at: dict[str, Any] = field(default_factory=dict)
    against: dict[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None
    ratio_at_least: float | None = None
    ratio_at_most: float | None = None
    source: str = ""  # where the figure comes from


class PanelKind(str, Enum):
    bars = "bars"  # one group of bars a point
    lines = "lines"  # one line a variant, over a numeric setting


@dataclass(frozen=True)
class PanelSpec:
    metric: str
    kind: PanelKind = PanelKind.bars
    x: str | None = None  # lines: the point's key along the x axis
    x_label: str = ""
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        if self.kind is PanelKind.lines and self.x is None:
            raise ConfigError(f"the panel of {self.metric!r} draws lines: name the point's key along its x axis in `x`")


@dataclass(frozen=True)
class PlotSpec:
    name: str  # of the file
    title: str
    panels: tuple[PanelSpec, ...] = ()


@dataclass(frozen=True)
class ExperimentSpec:
    """The texts, claims and figures of a report."""

    title: str
    question: str
    method: str = ""  # how it was measured, in a paragraph for a stranger
    claims: tuple[ClaimSpec, ...] = ()
    plots: tuple[PlotSpec, ...] = ()
    code: tuple[str, ...] = ()  # files that implement the mechanism
    limits: tuple[str, ...] = ()  # what the numbers do not say
