"""How far simulated variants are from those that were measured with the same settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.lab.judge import stats
from experiments.lab.judge.formulas import describe
from experiments.lab.store.rows import Row

MISSED = 0.10  # of the measured value: one of the two has a bug
# Metrics of what is simulated; memory, energy, processes of a server and floors are not.
PREDICTED = (
    *("ttft", "itl", "tpot", "e2e", "output_tokens", "input_tokens", "requests", "goodput", "slo_share", "total"),
    *("step_ms", "prefix_hit_rate", "preemptions"),
)
Cell = tuple[str, str, str]  # variant, point, metric


class Miss(NamedTuple):
    """`share` of the measured value by which the predicted one is off; infinite where 0 was measured and
    something else predicted."""

    share: float
    metric: str
    point: str
    variant: str  # simulated
    predicted: float

    def __abs__(self) -> float:
        return abs(self.share)

    @property
    def by(self) -> str:
        return f"{self.share:+.1%}" if math.isfinite(self.share) else f"{self.predicted:+.3g} from 0"

    def words(self, labels: Mapping[str, str]) -> str:
        return f"{_named(self.metric, self.variant, self.point, labels)} by {self.by}"


def remarks(rows: Sequence[Row], predictions: Mapping[str, str], labels: Mapping[str, str]) -> list[str]:
    """The worst, those off by more than MISSED, and those without a partner. `predictions`: simulated -> real."""
    found, lines = sorted(misses(rows, predictions), key=abs, reverse=True), []
    if found:
        near = sum(abs(miss) <= MISSED for miss in found)
        lines.append(f"Of {len(found)} predictions {near} lie within {MISSED:.0%} of what was measured; the worst "
                     f"misses the {found[0].words(labels)}.")  # fmt: skip
    far = [miss.words(labels) for miss in found[1:] if abs(miss) > MISSED]
    if far:
        lines.append(f"Predictions that missed by more than {MISSED:.0%}, too: {'; '.join(far)}.")
    alone = [
        f"{_named(metric, variant, point, labels)} ({'the prediction' if measured else 'the measurement'} has none)"
        for (variant, point, metric), predicted, measured in _pairs(rows, predictions)
        if bool(measured) != bool(predicted)
    ]
    if alone:
        lines.append(f"{len(alone)} more could not be compared, since one side alone has a value that counts: "
                     f"{'; '.join(alone)}.")  # fmt: skip
    return lines


def misses(rows: Sequence[Row], predictions: Mapping[str, str]) -> Iterator[Miss]:
    for (variant, point, metric), predicted, measured in _pairs(rows, predictions):
        if measured and predicted:
            left, right = stats.median(predicted), stats.median(measured)
            share = left / right - 1 if right else math.inf if left else 0.0
            yield Miss(share, metric, point, variant, left)


def _pairs(
    rows: Sequence[Row], predictions: Mapping[str, str]
) -> Iterator[tuple[Cell, Sequence[float], Sequence[float]]]:
    """Of what was tried on both sides the values that count: predicted ones, and measured ones."""
    values: dict[Cell, list[float]] = {}
    for row in rows:
        if row.metric.startswith(PREDICTED):
            values.setdefault((row.variant, row.point, row.metric), []).extend([row.value] if row.valid else [])
    for (variant, point, metric), predicted in values.items():
        measured = values.get((predictions.get(variant, ""), point, metric))
        if measured is not None:
            yield (variant, point, metric), predicted, measured


def _named(metric: str, variant: str, point: str, labels: Mapping[str, str]) -> str:
    at = f" at {point}" if point else ""
    return f"{describe(metric).label} of {labels[variant]}{at}"
