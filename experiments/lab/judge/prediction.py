"""How far simulated variants are from those that were measured with the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.lab.judge import stats
from experiments.lab.judge.formulas import describe
from experiments.lab.store.rows import Row

MISSED = 0.10  # of the measured value: one of the two has a bug
# Metrics of what is simulated; memory, energy, processes of a server and floors are not.
PREDICTED = ("ttft", "itl", "tpot", "e2e", "output_tokens", "input_tokens", "requests", "goodput", "total", "step_ms")


class Miss(NamedTuple):
    """`share` of the measured value by which the predicted one is above it, or below."""

    share: float
    metric: str
    point: str
    variant: str  # simulated

    def words(self, labels: Mapping[str, str]) -> str:
        at = f" at {self.point}" if self.point else ""
        return f"{describe(self.metric).label} of {labels[self.variant]}{at} by {self.share:+.1%}"


def remarks(rows: Sequence[Row], predictions: Mapping[str, str], labels: Mapping[str, str]) -> list[str]:
    """The worst of all, and those that missed by more than MISSED. `predictions`: simulated variant -> measured one."""
    found = sorted(misses(rows, predictions), key=lambda miss: -abs(miss.share))
    if not found:
        return []
    near = sum(abs(miss.share) <= MISSED for miss in found)
    lines = [f"Of {len(found)} predictions {near} lie within {MISSED:.0%} of what was measured; the worst misses the "
             f"{found[0].words(labels)}."]  # fmt: skip
    far = [miss.words(labels) for miss in found[1:] if abs(miss.share) > MISSED]
    if far:
        lines.append(f"Predictions that missed by more than {MISSED:.0%}, too: {'; '.join(far)}.")
    return lines


def misses(rows: Sequence[Row], predictions: Mapping[str, str]) -> Iterator[Miss]:
    """Of medians over what counts."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.valid and row.metric.startswith(PREDICTED):
            values.setdefault((row.variant, row.point, row.metric), []).append(row.value)
    for (variant, point, metric), predicted in values.items():
        measured = values.get((predictions.get(variant, ""), point, metric))
        if measured and (right := stats.median(measured)):
            yield Miss(stats.median(predicted) / right - 1, metric, point, variant)
