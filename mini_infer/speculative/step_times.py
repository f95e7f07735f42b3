"""What steps really take, over what the table says of them.

    plain         of steps without drafts: measured seconds over the table's
    relative      of steps with drafts, in steps without: measured over the table's. So what slows all steps down, as
                  long contexts do, cancels out
    catching up   likewise of those in which the draft model catches up first, with whatever number of drafts

Each is the median of the last ones, apart for each number of drafts and for rows between one power of two and the next.
What is not known of a number of drafts is taken from what it was last with other rows (where the table is wrong about
drafts it mostly is so at all rows), else from the next smaller number, in the end from the table.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_LAST = 15  # steps of a busy CPU scatter by 15 % and more: the median of so many, by 5 %
_FIRST = 3  # until so many are known: one may be an accident (a garbage collection, another process)
_CATCHING_UP = -1  # where others have a number of drafts
_FORGET = 1_000  # steps after which a number of drafts that was too dear is worth another try
_REMEASURE = 64  # steps after which it is measured again what one without drafts takes
_PLAIN_STEPS = 3  # that are made for it: the first may still wait for one with drafts, and the last is not booked yet


class StepTimes:
    def __init__(self) -> None:
        self._step = 0
        self._timed = False  # somebody measures steps
        self._ratios: dict[tuple[int, int], deque[float]] = {}  # by drafts and rows
        self._known_at: dict[tuple[int, int], int] = {}  # the step when that was last heard of
        self._last_rows: dict[int, int] = {}  # by drafts: where that was learned last

    def next_step(self) -> None:
        self._step += 1

    def plain(self, rows: int) -> float:
        """Seconds of a step without drafts, over the table's."""
        return self._estimate((0, rows.bit_length()), 1.0)

    def relative(self, rows: int, most: int) -> list[float]:
        """Of the longest draft's length, 0 to `most`: the step's length in steps without drafts, over the table's."""
        factors = [1.0]
        for length in range(1, most + 1):
            elsewhere = self._estimate((length, self._last_rows.get(length, 0)), factors[-1])
            factors.append(self._estimate((length, rows.bit_length()), elsewhere))
        return factors

    def catching_up(self, rows: int) -> float:
        """As `relative`, of a step in which the draft model catches up."""
        return self._estimate((_CATCHING_UP, rows.bit_length()), 1.0)

    def learn_catching_up(self, rows: int, ratio: float) -> None:
        self.learn_relative(rows, _CATCHING_UP, ratio)

    def learn_plain(self, rows: int, ratio: float) -> None:
        self._timed = True
        key = (0, rows.bit_length())
        if self._age(key) < _REMEASURE:
            self._known_at[key] = self._step
        self._ratios.setdefault(key, deque(maxlen=_LAST)).append(ratio)

    def learn_relative(self, rows: int, longest: int, ratio: float) -> None:
        self._timed = True
        key = (longest, rows.bit_length())
        if self._age(key) >= _FORGET:
            self._ratios.pop(key, None)
        self._known_at[key] = self._step
        self._ratios.setdefault(key, deque(maxlen=_LAST)).append(ratio)
        self._last_rows[longest] = rows.bit_length()

    def wants_plain(self, rows: int) -> bool:
        """Whether the next step should have no drafts, so that one without is measured: first of all, and from time to
        time. Where that fails, because prompts come in every step, it gives up until the next time."""
        key = (0, rows.bit_length())
        if not self._timed:
            return False
        if self._age(key) >= _REMEASURE + _PLAIN_STEPS:
            self._known_at[key] = self._step
        return self._age(key) >= _REMEASURE

    def _age(self, key: tuple[int, int]) -> int:
        return self._step - self._known_at.setdefault(key, self._step - _REMEASURE)

    def _estimate(self, key: tuple[int, int], otherwise: float) -> float:
        known = self._ratios.get(key, ())
        if key[0] and known and self._age(key) >= _FORGET:
            known = ()
        return median([*known, *[otherwise] * (_FIRST - len(known))])
