"""The answer at the top of a report, made from the rows: it says what the first claim's figures show and no more."""

from __future__ import annotations

from collections import Counter

from experiments.lab.judge import pairs, stats
from experiments.lab.judge.claims import Claim, Judgement, Verdict, judge
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import wording
from experiments.lab.store.result import COMPLETE, Result
from experiments.lab.store.rows import Table


def judgements(result: Result) -> list[Judgement]:
    return [judge(claim, result.rows, result.info.every_gate) for claim in result.info.claims]


def headline(result: Result) -> Judgement | None:
    """The first claim, by which an experiment is known in the index."""
    found = judgements(result)
    return found[0] if found else None


def answer(result: Result) -> str:
    """One or two sentences, and the count of verdicts. What pairs are worth is told pair by pair."""
    first, of_pairs = headline(result), pairs.sentence(result)
    if of_pairs:
        return " ".join(part for part in (of_pairs, tally(result)) if part)
    sentences = [_of_claim(first, result), _across_points(first, result)] if first else [_without_claims(result)]
    return " ".join(part for part in (*sentences, tally(result)) if part)


def tally(result: Result) -> str:
    """`Claims: 2 supported, 1 refuted. Gate: all 3 comparisons passed.`"""
    counts = Counter(j.verdict for j in judgements(result))
    parts = []
    if counts:
        parts.append(f"Claims: {', '.join(f'{counts[v]} {v.value}' for v in Verdict if counts[v])}.")
    failed = sum(1 for gate in result.info.every_gate if not gate.passed)
    if failed:
        parts.append(f"Gate: {failed} of {len(result.info.every_gate)} comparisons FAILED.")
    absent = dict.fromkeys(result.info.variants[row.variant] for row in result.rows if row.is_absent)
    if absent:
        parts.append(f"Absent: {', '.join(absent)}.")
    invalid = sum(1 for row in result.rows if not row.valid and not row.is_absent)
    if invalid:
        parts.append(f"INVALID: {invalid:,} of {len(result.rows):,} values.")
    return " ".join(parts)


def flags(result: Result) -> list[str]:
    """What a reader must know before any number."""
    found = []
    if result.info.status != COMPLETE:
        found.append(f"INCOMPLETE ({result.info.status.removeprefix('incomplete: ')})")
    if any(not gate.passed for gate in result.info.gates):
        found.append("tokens differ from the baseline's")
    if any(not gate.passed for gate in result.info.error_gates):
        found.append("numbers are too far from the reference's")
    return found


def direction(estimate: Estimate, metric: Metric) -> str:
    """What an interval of a ratio shows."""
    if estimate.low is None or estimate.high is None:
        return "one valid repeat, so nothing is shown"
    if estimate.low > 1 or estimate.high < 1:
        return "better" if (estimate.low > 1) == (metric.better is Better.higher) else "worse"
    return "no difference is shown"


def _of_claim(found: Judgement, result: Result) -> str:
    claim, info = found.claim, result.info
    metric = info.metrics[claim.metric]
    if found.estimate is None:
        return f"There is no answer. {_sentence(wording.claim(claim, info))}: {found.reason}."
    at = f"At {claim.point}, " if claim.point else ""
    who = info.variants[claim.variant]
    if not claim.bound.is_ratio:
        unit = f" {metric.unit}" if metric.unit else ""
        alone = " (one valid repeat)" if found.estimate.n == 1 else ""
        return _sentence(f"{at}{metric.label}{_of(who, result)}: {wording.interval(found.estimate)}{unit}{alone}.")
    ours, theirs = _median(claim.variant, claim.point, claim, result), _median(
        str(claim.reference_variant), str(claim.reference_point), claim, result)  # fmt: skip
    figures = f"{ours} against {theirs} {metric.unit}".rstrip()
    times = wording.interval(found.estimate, "x")
    if claim.reference_variant != claim.variant:
        other = info.variants[str(claim.reference_variant)]
        text = f"{at}{who} had {times} the {metric.label} of {other} ({figures}): {direction(found.estimate, metric)}."
    else:
        text = f"{at}{metric.label}{_of(who, result)} was {times} that at {claim.reference_point} ({figures})."
    return _sentence(text)


def _across_points(found: Judgement, result: Result) -> str:
    """From where to where the ratio to the baseline ran, over the points whose figures count."""
    claim, info, table = found.claim, result.info, Table(result.rows)
    if not claim.bound.is_ratio or claim.reference_point != claim.point:
        return ""
    ratios = []
    for point in info.points:
        values = table.values(claim.variant, point, claim.metric)
        at = stats.ratio(values, table.values(str(claim.reference_variant), point, claim.metric))
        if at is not None and not info.fails(claim.variant, point):
            ratios.append((at.median, point))
    if len(ratios) < 2:
        return ""
    (low, low_at), (high, high_at) = min(ratios), max(ratios)
    return (
        f"Over the {len(ratios)} points that count, the ratio ran from {wording.number(low)}x ({low_at}) to "
        f"{wording.number(high)}x ({high_at})."
    )


def _without_claims(result: Result) -> str:
    """The first metric at the last point that has it."""
    info, table = result.info, Table(result.rows)
    for name, metric in info.metrics.items():
        for point in reversed(info.points):
            found = {v: table.values(v, point, name) for v in info.variants}
            shown = [f"{info.variants[v]} {wording.interval(stats.absolute(values))}"
                     for v, values in found.items() if values]  # fmt: skip
            if shown:
                unit = f" ({metric.unit})" if metric.unit else ""
                return _sentence(f"{f'At {point}, ' if point else ''}{metric.label}{unit}: {', '.join(shown)}.")
    return "There is no answer: no valid measurement."


def _median(variant: str, point: str, claim: Claim, result: Result) -> str:
    return wording.number(stats.median(list(Table(result.rows).values(variant, point, claim.metric).values())))


def _of(who: str, result: Result) -> str:
    return f" of {who}" if len(result.info.variants) > 1 else ""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
