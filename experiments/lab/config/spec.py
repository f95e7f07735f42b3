"""What the YAML of any experiment may say; and what settings may be, by their fields' types: `count: Count = 16`."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar

from mini_infer.core.config import DType
from mini_infer.core.errors import ConfigError

VARIANT_KEYS = ("kind", "label", "needs")  # of a variant, beside the engine's sections
RATE = "workload.rate_per_s"  # what a search varies
IN_TIME = 0.9  # of the requests, at a rate that is called sustained
PREDICTED = " predicted"  # behind a variant's name: the same one, simulated
TAKE = "What simulated steps take: "  # begins the note on where their costs are from
NONE_OF = "Nothing is predicted of "  # begins the note on variants that the simulator does not know
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
class Rule:
    words: str
    fits: Callable[[Any], bool]


def _at_least(bound: int) -> Rule:
    return Rule(f"at least {bound}", lambda value: bound <= value < math.inf)


_ABOVE_ZERO = Rule("above 0", lambda value: 0 < value < math.inf)
Name = Annotated[str, Rule("a name, not an empty one", bool)]
Natural = Annotated[int, _at_least(0)]
Count = Annotated[int, _at_least(1)]
Several = Annotated[int, _at_least(2)]
FromZero = Annotated[float, _at_least(0)]
FromOne = Annotated[float, _at_least(1)]
Positive = Annotated[float, _ABOVE_ZERO]
Share = Annotated[float, Rule("a share, from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[Share, _ABOVE_ZERO]
Part = Annotated[float, Rule("from 0 to less than 1", lambda value: 0 <= value < 1)]
Floating = Annotated[DType, Rule("one of float32, bfloat16, float16", lambda dtype: dtype is not DType.auto)]


@dataclass(frozen=True)
class Checked:
    """A section of the config. None was not given, and passes. Of a list each value is checked, and there must be one.
    Where a field is called max_x, and another one min_x, that one must not be larger."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        for name, rule in ((name, rule) for name, hint in _hints(type(self)).items() for rule in _within(hint)):
            value = getattr(self, name)
            several = isinstance(value, (list, tuple))
            values = value if several else [] if value is None else [value]
            if (several and not values) or not all(map(rule.fits, values)):
                each = "a list of numbers, each " if several else ""
                got = list(value) if several else value
                raise ConfigError(f"{self.section}.{name} must be {each}{rule.words}, got {got}")
            low = "min_" + name.removeprefix("max_") if name.startswith("max_") else ""
            least = getattr(self, low, None) if value is not None else None
            if least is not None and value < least:
                raise ConfigError(f"{self.section}.{name}={value} is below {self.section}.{low}={least}")


_hints: Callable[[Any], dict[str, Any]] = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def _within(hint: Any) -> Iterator[Rule]:
    if isinstance(hint, Rule):
        yield hint
    for part in typing.get_args(hint):
        yield from _within(part)


@dataclass(frozen=True)
class ClaimSpec:
    """One bound, or two, from both sides. A ratio is to the variant `to` at the same point (default: the
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
        kind, over = self.kind, (PanelKind.lines, PanelKind.curve, PanelKind.front, PanelKind.formula)
        for problem, found in {
            "name the point's key or the metric along its x axis in `x`": kind in over and self.x is None,
            "`mark` goes with kind: formula": self.mark is not None and kind is not PanelKind.formula,
            "bars start at 0; for a log axis choose kind: lines": kind is PanelKind.bars and self.log_y,
            "kind: stack and `parts` go together": (kind is PanelKind.stack) != bool(self.parts),
        }.items():
            if found:
                raise ConfigError(f"the panel of {self.metric!r}, {kind.value}: {problem}")


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
    original: str = ""  # the original project's figure
    target: str = ""  # the figure to reach or beat
    bounded_by: str = ""  # what limits the figures, where the page cannot compute it
