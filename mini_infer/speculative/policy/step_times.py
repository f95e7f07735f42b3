"""What steps really take: medians of recent ratios, by drafts and by powers of two of rows.

    plain     of steps without drafts: measured seconds over the table's
    relative  of steps with drafts, in steps without: measured over the table's, so that what slows all steps down, as
              long contexts do, cancels out

What is not known of a number of drafts is taken from what it was last with other rows, else from the next smaller
number, in the end from the table.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_LAST = 15  # steps of a busy CPU scatter by 15 % and more: the median of so many, by 5 %
_FIRST = 3  # until so many are known: one may be an accident (a garbage collection, another process)
_FORGET = 1_000  # steps after which a number of drafts that was too dear is worth another try
_PERIOD = 67  # steps, of which the first few have no drafts, so that it is measured what such a step takes:
_PLAIN_STEPS = 3  # the first may still wait for one with drafts, and the last is not booked yet


class StepTimes:
    def __init__(self) -> None:
        self.step = 0  # that is booked next
        self._timed = False  # somebody measures steps
        self._ratios: dict[tuple[int, int], deque[tuple[int, float]]] = {}  # by drafts and rows, with the step
        self._last_rows: dict[int, int] = {}  # by drafts: where that was learned last

    def next_step(self, timed: bool) -> None:
        self.step += 1
        self._timed |= timed

    def plain(self, rows: int) -> float:
        """Seconds of a step without drafts, over the table's."""
        return self._estimate(0, rows, 1.0)

    def relative(self, rows: int, most: int) -> list[float]:
        """Of the longest draft's length, 0 to `most`: the step's length in steps without drafts, over the table's."""
        factors = [1.0]
        for length in range(1, most + 1):
            factors.append(self._estimate(length, rows, factors[-1]))
        return factors

    def learn(self, longest: int, rows: int, ratio: float) -> None:
        """Of a step whose longest draft has so many tokens: `plain` of 0, or `relative`."""
        bits = self._last_rows[longest] = rows.bit_length()
        self._ratios.setdefault((longest, bits), deque(maxlen=_LAST)).append((self.step, ratio))

    def wants_plain(self) -> bool:
        """Whether the next step should have no drafts, so that one without is measured."""
        return self._timed and (self.step - 1) % _PERIOD < _PLAIN_STEPS

    def _estimate(self, longest: int, rows: int, otherwise: float) -> float:
        for bits in (self._last_rows.get(longest, 0), rows.bit_length()):
            of_all = self._ratios.get((longest, bits), ())
            known = [ratio for step, ratio in of_all if self.step - step < _FORGET]
            otherwise = median([*known, *[otherwise] * (_FIRST - len(known))])
        return otherwise
