"""One measured number, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ABSENT = "absent: "  # begins the reason of a row whose peer is not there


@dataclass(frozen=True)
class Row:
    """`metric` of `variant` at `point` in one repeat. An invalid row is kept with its reason, and never counted."""

    variant: str
    point: str
    repeat: int
    metric: str
    value: float
    unit: str
    valid: bool = True
    reason: str = ""

    @property
    def is_absent(self) -> bool:
        """Nobody tried to measure it, so nothing is wrong with it."""
        return self.reason.startswith(ABSENT)


class Table:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._values: dict[tuple[str, str, str], dict[int, float]] = {}
        for row in rows:
            if row.valid:
                self._values.setdefault((row.variant, row.point, row.metric), {})[row.repeat] = row.value

    def values(self, variant: str, point: str, metric: str) -> dict[int, float]:
        """Valid values by repeat."""
        return self._values.get((variant, point, metric), {})
