"""One measured number, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ABSENT = "absent: "  # begins the reason of a row whose peer is not there
NOT_SHOWN = "not shown: "  # begins the reason of a row whose sample does not support a value
Turn = tuple[int, int]  # process, repeat


@dataclass(frozen=True)
class Row:
    """`metric` of `variant` at `point` in one repeat of one process. An invalid row is kept with its reason, and never
    counted."""

    variant: str
    point: str
    repeat: int
    process: int = field(default=0, kw_only=True)
    metric: str
    value: float
    unit: str
    valid: bool = True
    reason: str = ""

    @property
    def is_absent(self) -> bool:
        """Nobody tried to measure it, so nothing is wrong with it."""
        return self.reason.startswith(ABSENT)

    @property
    def is_fault(self) -> bool:
        """Something went wrong; else an invalid row tells of what is absent, or of too few samples."""
        return not self.valid and not self.reason.startswith((ABSENT, NOT_SHOWN))


class Table:
    """
    Attributes:
        absent: (variant, point) of what nobody tried to measure.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.absent = {(row.variant, row.point) for row in rows if row.is_absent}
        self._values: dict[tuple[str, str, str], dict[Turn, float]] = {}
        for row in rows:
            if row.valid:
                turns = self._values.setdefault((row.variant, row.point, row.metric), {})
                turns[row.process, row.repeat] = row.value

    def values(self, variant: str, point: str, metric: str) -> dict[Turn, float]:
        """Valid values by process and repeat; stats.absolute and stats.ratio take them."""
        return self._values.get((variant, point, metric), {})
