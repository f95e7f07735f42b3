"""Claims and their verdicts: a claim is judged by the interval of what was measured, never by the median alone, and
against its target; an aim beyond the target is shown beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from experiments.lab.config.explain import require_known
from experiments.lab.config.points import Point, find_point
from experiments.lab.config.spec import ClaimSpec
from experiments.lab.judge import stats
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.store.rows import Table
from mini_infer.core.errors import ConfigError

AIM = "aim"  # begins the source of a claim that has no target


class Bound(str, Enum):
    at_least = "at_least"
    at_most = "at_most"
    ratio_at_least = "ratio_at_least"
    ratio_at_most = "ratio_at_most"
    within = "within"  # at least `value`, and at most `upper`
    ratio_within = "ratio_within"

    @property
    def is_ratio(self) -> bool:
        return self.value.startswith("ratio_")

    @property
    def is_floor(self) -> bool:
        return self in (Bound.at_least, Bound.ratio_at_least)


class Verdict(str, Enum):
    supported = "supported"
    refuted = "refuted"
    inconclusive = "inconclusive"


@dataclass(frozen=True)
class Claim:
    """`metric` of `variant` at `point` against a bound: an absolute one, or one on the ratio to a reference."""

    metric: str
    variant: str
    point: str
    bound: Bound
    value: float
    reference_variant: str | None = None  # both set for a ratio, else None
    reference_point: str | None = None
    source: str = ""
    upper: float | None = None  # set for `within` and `ratio_within` alone
    aim: float | None = None  # a stricter value, against which nothing is judged

    @property
    def limits(self) -> tuple[float, float]:
        """What the interval must lie between; infinite where there is no bound."""
        if self.upper is not None:
            return self.value, self.upper
        return (self.value, math.inf) if self.bound.is_floor else (-math.inf, self.value)


@dataclass(frozen=True)
class Judgement:
    claim: Claim
    verdict: Verdict
    estimate: stats.Estimate | None
    reason: str = ""  # why it is inconclusive


def resolve_all(
    specs: Sequence[ClaimSpec], variants: list[str], baseline: str | None, metrics: list[str], points: Sequence[Point]
) -> list[Claim]:
    """`experiment.claims`, each checked against what will be measured."""
    found, said = list[Claim](), set[tuple[Any, ...]]()  # quantities with their references
    for index, spec in enumerate(specs):
        where = f"experiment.claims[{index}]"
        bound, value, upper = _bound(spec, where)
        require_known(f"{where} is about a metric that is not measured,", [spec.metric], metrics)
        require_known(f"{where} is about an unknown variant,", [spec.variant], variants)
        if spec.everywhere and (spec.at or spec.against):
            raise ConfigError(f"{where} is made everywhere, and so at no point: leave out `at` and `against`")
        to = spec.variant if spec.against else spec.to or baseline
        if bound.is_ratio and not spec.against and (to == spec.variant or to not in variants):
            either = "a baseline, another variant in `to`, or `against: {key: value}` for another point"
            raise ConfigError(f"{where}: a ratio needs {either}")
        for point in points if spec.everywhere else [find_point(points, spec.at, f"{where}.at")]:
            reference: tuple[str | None, str | None] = (None, None)
            if bound.is_ratio:
                other = find_point(points, spec.against, f"{where}.against") if spec.against else point
                reference = to, other.name
            claim = Claim(spec.metric, spec.variant, point.name, bound, value, *reference, spec.source, upper, spec.aim)
            key = (claim.metric, claim.variant, claim.point, *reference, bound.is_floor)  # one from either side
            if key in said:
                again = f"{where} says again what a claim before it says of {spec.metric} of {spec.variant}"
                ways = "leave one out, or make them one bound with a stricter `aim`"
                raise ConfigError(f"{again}, beside the same reference: {ways}")
            found.append(claim)
            said.add(key)
    return found


def _bound(spec: ClaimSpec, where: str) -> tuple[Bound, float, float | None]:
    """The bound, its value, and the upper one of two."""
    known = [bound.value for bound in Bound if bound not in (Bound.within, Bound.ratio_within)]
    given = {Bound(name): float(getattr(spec, name)) for name in known if getattr(spec, name) is not None}
    bound, value = next(iter(given.items()), (Bound.within, 0.0))
    if len(given) == 2 and len({bound.is_ratio for bound in given}) == 1:  # from both sides
        _, upper = given.values()
        if value > upper:
            raise ConfigError(f"{where}: nothing is at least {value} and at most {upper}")
        if spec.aim is not None:
            raise ConfigError(f"{where}: an aim goes with one bound, not with at_least and at_most together")
        return Bound.ratio_within if bound.is_ratio else Bound.within, value, upper
    if len(given) != 1:
        one = f"exactly one of {', '.join(known)}"
        raise ConfigError(f"{where} needs {one}, or at_least and at_most together; it has {len(given)}")
    if spec.aim is not None and not (spec.aim > value if bound.is_floor else spec.aim < value):
        raise ConfigError(f"{where}: the aim, {spec.aim}, must be stricter than {bound.value}, {value}")
    return bound, value, None


def judge(
    claim: Claim, table: Table, gates: Sequence[Gate | ErrorGate], share: bool = False, of_several: bool = False
) -> Judgement:
    """`share`: the metric lies between 0 and 1. `of_several`: a result is made of several processes."""
    inconclusive = partial(Judgement, claim, Verdict.inconclusive)
    cells = (claim.variant, claim.point), (str(claim.reference_variant), str(claim.reference_point))
    for gate in (gate for gate in gates if not gate.passed):
        why = "its tokens differ from the baseline's"
        if isinstance(gate, ErrorGate):
            why = f"its numbers are too far from {gate.against}"
        if gate.covers(*cells[0]):
            return inconclusive(None, f"{why}, so its speed does not count")
        if gate.covers(*cells[1]):
            return inconclusive(None, f"what it is compared with does not count: {why}")
    values, reference = (table.values(*cell, claim.metric) for cell in cells)
    if claim.bound.is_ratio:
        found = stats.ratio(values, reference)
    else:
        found = stats.absolute(values, share) if values else None
    if found is None:
        if not (stats.in_range(values) and stats.in_range(reference)):
            return inconclusive(None, "the knee lies outside of the searched range, which tells no ratio")
        absent = [f"not measured, because {cell[0]} is absent" for cell in cells if cell in table.absent]
        return inconclusive(None, (absent or ["no valid measurement"])[0])
    if found.judged is None:
        return inconclusive(found, "one repeat has no interval")
    if of_several and found.processes == 1 and not claim.bound.is_ratio:
        return inconclusive(found, "one process does not tell what varies between processes")
    (least, most), (low, high) = claim.limits, found.judged
    if high < least or low > most:
        return Judgement(claim, Verdict.refuted, found)
    if least <= low and high <= most:
        return Judgement(claim, Verdict.supported, found)
    reaches = f", as searches may scatter from {low:.3g} to {high:.3g}" if found.uncut else ""
    return inconclusive(found, f"the interval holds {'a' if claim.upper else 'the'} bound{reaches}")
