"""What an experiment found, quantity by quantity: one effect for each metric of a variant at a point that a claim
names, beside what it is compared with, its target and its aim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.lab.config.spec import PREDICTED, RATE
from experiments.lab.judge.claims import AIM, Claim, Judgement, Verdict
from experiments.lab.judge.metrics import Better
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import wording
from experiments.lab.store.result import Result, RunInfo

TARGET = "target"  # begins the source of a claim
CHECKS = ("client_busy", "preemptions")  # claims on these say that the measurement is sound, not what was found
PEERS = (  # kinds of variants; and of implementations of a kernel, what others wrote
    *("vllm", "vllm_served", "hf", "hf_continuous"),
    *("fa3", "fa4", "flash_attn", "flash_mla", "sdpa", "torch", "compile"),
)
WORSE_LAST = (Verdict.supported, Verdict.inconclusive, Verdict.refuted)  # what several claims come to is the worst
Cell = tuple[str, str]  # variant, point


@dataclass(frozen=True)
class Effect:
    """Of `metric` at `cell`, beside `reference`, where there is one."""

    metric: str
    cell: Cell
    reference: Cell | None
    better: Better
    own: Estimate | None
    base: Estimate | None
    ratio: Estimate | None  # of own to base, repeat by repeat; None without a reference
    # target, aim: bounds on `ratio`; without a reference, on `own`.
    target: float | None = None
    aim: float | None = None
    guards: bool = False  # a claim asks that nothing is lost, not that something is gained
    reason: str = ""  # why there is no figure that counts
    open: str = ""  # the bounds that its interval neither keeps nor misses, in words
    missed: str = ""  # those that it misses
    is_absolute: bool = False  # whether the claim bounds `own`, and not `ratio`
    beside: str = ""  # the label of the reference's variant
    verdict: Verdict = Verdict.inconclusive  # on the claims, of aims where there are no others

    @property
    def at_another_point(self) -> bool:
        return self.reference is not None and self.reference[0] == self.cell[0]

    @property
    def gain(self) -> Estimate | None:
        """How many times better than the reference; without one, than the target."""
        found, own, unit = self.ratio, self.own, self.target
        if self.reference is None and own is not None and unit and own.median > 0:
            found = Estimate(own.median / unit, _over(own.low, unit), _over(own.high, unit), own.n, own.processes)
            found = replace(found, uncut=own.uncut and (own.uncut[0] / unit, own.uncut[1] / unit))
        if found is None or self.better is Better.higher or found.median <= 0:
            return found
        few = () if 0 in found.few else tuple(1 / value for value in reversed(found.few))
        turned = replace(found, median=1 / found.median, low=_over(1, found.high), high=_over(1, found.low), few=few)
        return replace(turned, uncut=found.uncut and (1 / found.uncut[1], 1 / found.uncut[0]))

    @property
    def ticks(self) -> tuple[float | None, float | None]:
        """Target and aim on the axis of `gain`."""
        unit = 1.0 if self.reference is not None else self.target or 1.0
        found = (_over(self.target, unit), _over(self.aim, unit))
        return found if self.better is Better.higher else (_over(1, found[0]), _over(1, found[1]))

    @property
    def told(self) -> int:
        """1 where the whole interval is better, -1 where it is worse, 0 where nothing is shown."""
        return self.gain.told if self.gain else 0


def of_claims(result: Result) -> list[Effect]:
    """In the order of the claims; several claims on one quantity are one effect, and checks are none."""
    claims: dict[tuple[str, Cell, Cell | None], list[Judgement]] = {}
    for j in result.judgements:
        if j.claim.metric not in CHECKS:
            key = (j.claim.metric, (j.claim.variant, j.claim.point), _reference(j.claim, result))
            claims.setdefault(key, []).append(j)
    return [_of_judgements(between(result, *key), own, result.info) for key, own in claims.items()]


def _of_judgements(effect: Effect, own: Sequence[Judgement], info: RunInfo) -> Effect:
    """A target is a claim of that name, or the first one that is no aim. That it is at most so good is none."""
    target = aim = None
    for claim in (j.claim for j in own):
        unit = 1.0 if effect.reference is None or claim.bound.is_ratio else effect.base and effect.base.median
        if claim.upper is not None or not unit or claim.bound.is_floor != (effect.better is Better.higher):
            continue
        if claim.source.startswith(AIM):
            aim = claim.value / unit
        elif target is None or claim.source.startswith(TARGET):
            target, aim = claim.value / unit, aim if claim.aim is None else claim.aim / unit
    if len({j.claim.bound.is_floor for j in own}) > 1:  # then neither bound is what is to be reached
        target = aim = None
    ratios = [j.claim for j in own if j.claim.bound.is_ratio]
    judged = [j.verdict for j in own if not j.claim.source.startswith(AIM)] or [j.verdict for j in own]
    bounds = {v: [wording.bound(j.claim, info) for j in own if j.estimate and j.verdict is v] for v in Verdict}
    return replace(
        effect,
        target=target,
        aim=aim,
        guards=any(claim.upper is not None or 0.9 <= claim.value <= 1.1 for claim in ratios),
        reason=own[0].reason,
        open=", ".join(bounds[Verdict.inconclusive]),
        missed=", ".join(bounds[Verdict.refuted]),
        is_absolute=not own[0].claim.bound.is_ratio,
        verdict=max(judged, key=WORSE_LAST.index),
    )


def worst_elsewhere(result: Result, effect: Effect) -> list[Effect]:
    """Where the mechanism costs most of the metric, of the points that `effect` is not of, if that is shown."""
    info, (variant, point) = result.info, effect.cell
    if info.baseline is None or effect.reference != (info.baseline, point):
        return []
    others = [at for at in info.points if at != point and not is_scheduled(effect.metric, at, info)]
    found = (between(result, effect.metric, (variant, at), (info.baseline, at)) for at in others)
    worse = {each.gain.median: each for each in found if each.gain is not None and each.told < 0}
    return [worse[least] for least in sorted(worse)[:1]]


def shown(result: Result, most: int) -> list[Effect]:
    """What can be drawn, by metric, variant and point: the claims', then the first one's metric at other cells.
    Predictions are no gains: nothing where all claims are on these."""
    info, every = result.info, of_claims(result)
    claimed = [effect for effect in every if not is_prediction(effect, info)]
    if every and not claimed:
        return []
    found = [effect for effect in claimed if effect.gain is not None]
    if info.baseline is not None and len(found) < most:
        metric = claimed[0].metric if claimed else next(iter(info.metrics))
        known = {(effect.metric, effect.cell) for effect in found}
        predicted = [name + PREDICTED for name in info.variants]  # they run nowhere
        left_out = (info.baseline, info.aa, *peers(info), *predicted)
        for cell in (cell for cell in info.cells if cell[0] not in left_out):
            if (metric, cell) not in known and not info.fails(*cell) and not is_scheduled(metric, cell[1], info):
                more = between(result, metric, cell, (info.baseline, cell[1]))
                found += [more] if more.gain is not None else []
    of_variant = [effect.cell[0] for effect in found]
    # Each variant has as many as there is room for: its first one, its last one, and those in between.
    last = {name: n for n, name in enumerate(of_variant)}
    turn = [of_variant[:n].count(name) for n, name in enumerate(of_variant)]
    kept = sorted(range(len(found)), key=lambda n: 0.5 if turn[n] and n == last[of_variant[n]] else turn[n])[:most]
    metrics, places = [effect.metric for effect in found], list(info.points)
    order = lambda e: (metrics.index(e.metric), of_variant.index(e.cell[0]), places.index(e.cell[1]))  # noqa: E731
    return sorted((found[n] for n in kept), key=order)


def is_scheduled(metric: str, point: str, info: RunInfo) -> bool:
    """Whether it is a rate that the schedule of arrivals sets, below saturation, and so says nothing of the engine."""
    return RATE in info.points[point] and info.metrics[metric].unit.endswith("/s")


def is_prediction(effect: Effect, info: RunInfo) -> bool:
    """Whether it tells how near a simulated variant is to the measured one."""
    name = effect.cell[0].removesuffix(PREDICTED)
    return name != effect.cell[0] and name in info.variants


def between(result: Result, metric: str, cell: Cell, reference: Cell | None) -> Effect:
    """What was measured of both; nothing where a gate speaks against one of them."""
    info = result.info
    own = base = paired = None
    if not any(info.fails(*each) for each in (cell, reference) if each):
        own, base = (result.estimate(*each, metric) if each else None for each in (cell, reference))
        paired = result.ratio(cell, reference, metric) if reference else None
        paired = paired if paired and paired.median > 0 else None  # else nothing of it was left: a ratio says nothing
    if not info.is_simulated:
        own, base, paired = map(_without_chance, (own, base, paired))
    beside = info.variants[reference[0]] if reference else ""
    return Effect(metric, cell, reference, info.metrics[metric].better, own, base, paired, beside=beside)


def _without_chance(found: Estimate | None) -> Estimate | None:
    """Repeats of one process that are all the same, as rates of a few are, say nothing of another one."""
    alike = found is not None and found.processes == 1 and found.low == found.high
    return replace(found, low=None, high=None) if found is not None and alike else found


def peers(info: RunInfo) -> list[str]:
    kinds = variant_kinds(info)
    return [name for name in info.variants if kinds.get(name) in PEERS]


def variant_kinds(info: RunInfo) -> dict[str, str]:
    """What measures each variant; of an implementation of a kernel, and where no config says it, its name."""
    variants = info.config.get("experiment", {}).get("variants") or dict.fromkeys(info.variants)
    return {name: v.get("kind", "") if isinstance(v, dict) else name for name, v in variants.items()}


def _reference(claim: Claim, result: Result) -> Cell | None:
    """Of an absolute claim, too: what the baseline does at the same point."""
    if claim.bound.is_ratio:
        return str(claim.reference_variant), str(claim.reference_point)
    baseline = result.info.baseline
    if baseline in (None, claim.variant) or claim.upper is not None:
        return None
    values = result.values(str(baseline), claim.point, claim.metric).values()
    return (str(baseline), claim.point) if values and min(values) > 0 else None


def _over(value: float | None, unit: float | None) -> float | None:
    return None if value is None or not unit else value / unit
