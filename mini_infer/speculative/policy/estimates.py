"""Acceptance rates, what steps take, and the draft lengths that bring most tokens a second by them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from mini_infer.core.uniforms import Array
from mini_infer.speculative.policy.costs import StepCosts

MARGIN = 1.04  # estimates err, the best of many errs upwards, and a batch with drafts thins out towards its end
_THRESHOLDS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # chances of being accepted that drafts are tried to be made from
_LAST = 15  # steps of a busy CPU scatter by 15 % and more: the median of so many, by 5 %
_FIRST = 3  # until so many are known: one may be an accident (a garbage collection, another process)
_FORGET = 1_000  # steps after which a number of drafts that was too dear is worth another try
_PERIOD = 67  # steps, of which the first few have no drafts, so that it is measured what such a step takes:
_PLAIN_STEPS = 3  # the first may still wait for one with drafts, and the last is not booked yet


class AcceptanceRate:
    """The chance that a draft is accepted if those before it are, from trials (some of them assumed) of whose weight
    `fade` is left after one more."""

    def __init__(self, fade: float, accepted: float = 0.0, trials: float = 0.0) -> None:
        self._fade, self._accepted, self.trials = fade, accepted, trials

    def book(self, drafted: int, accepted: int) -> None:
        """A step's drafts of a request. Those behind the first rejected one were never tried."""
        self.add(min(accepted + 1, drafted), accepted)

    def add(self, tried: int, accepted: int) -> None:
        left = self._fade**tried
        self._accepted = self._accepted * left + accepted
        self.trials = self.trials * left + tried

    def estimate(self, prior: float, weight: float) -> float:
        """With a prior that counts as so many trials."""
        return (self._accepted + weight * prior) / (self.trials + weight)


class StepTimes:
    """What steps really take: medians of recent ratios, by drafts and by powers of two of rows.

        plain     of steps without drafts: measured seconds over the table's
        relative  of steps with drafts, in steps without: so what slows all steps down, as long contexts do, cancels out

    What is not known of a number of drafts is taken from what it was last with other rows, else from the next smaller
    number, in the end from the table.
    """

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


def expected_accepted(rates: Array, lengths: Array) -> float:
    """Drafts that are accepted on average, of so many for each of R rows [R] int, by their acceptance rates [R]."""
    places = np.arange(1, 1 + int(lengths.max(initial=0)))
    return float((rates[:, None] ** places * (places <= lengths[:, None])).sum())


def best_lengths(rates: Array, limits: Array, costs: StepCosts, relative: Sequence[float]) -> Array:
    """The draft lengths of R rows [R] int64 that bring most tokens a second, all zero where they do not bring MARGIN
    times what none bring.

    Tried are the same length for all, and, where a step is not padded, those drafts whose chance of being accepted is
    above some threshold: fewer for a row whose drafts are often wrong.

    Args:
        rates, limits: [R]: of each row the acceptance rate, and how many drafts it may have.
        relative: as StepTimes.relative.
    """
    rows, most = len(rates), int(limits.max())
    chances = rates[:, None] ** np.arange(1, 1 + most)  # that all drafts up to each are accepted
    expected = np.zeros((rows, 1 + most))  # drafts that are accepted on average, of so many
    np.cumsum(chances, axis=1, out=expected[:, 1:])
    candidates = np.minimum(limits, np.arange(1 + most)[:, None])
    if rows > 1 and costs.shape(rows, 1 + most) is None:
        likely = (chances >= np.array(_THRESHOLDS)[:, None, None]).sum(axis=2)
        candidates = np.concatenate((candidates, np.minimum(limits, likely)))
    tokens = rows + expected[np.arange(rows), candidates].sum(axis=1)
    seconds = np.array(costs.steps_seconds(candidates)) * np.array(relative)[candidates.max(axis=1)]
    speeds = tokens / seconds
    speeds[0] *= MARGIN
    return candidates[int(np.argmax(speeds))].astype(np.int64)
