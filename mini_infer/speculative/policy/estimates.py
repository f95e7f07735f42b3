"""Acceptance rates, and the draft lengths that bring most tokens a second by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_infer.core.uniforms import Array
from mini_infer.speculative.policy.costs import StepCosts

MARGIN = 1.04  # estimates err, the best of many errs upwards, and a batch with drafts thins out towards its end
_THRESHOLDS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # chances of being accepted that drafts are tried to be made from


class AcceptanceRate:
    """The chance that a draft is accepted if those before it are, from trials whose weight fades.

    Args:
        fade: what is left of a trial's weight after one more.
        accepted, trials: that are assumed.
    """

    __slots__ = ("_accepted", "_fade", "trials")

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


def expected_accepted(rates: Array, lengths: Array) -> float:
    """Drafts that are accepted on average, of so many for each of R rows [R] int, by their acceptance rates [R]."""
    places = np.arange(1, 1 + int(lengths.max(initial=0)))
    return float((rates[:, None] ** places * (places <= lengths[:, None])).sum())


def best_lengths(rates: Array, limits: Array, costs: StepCosts, relative: Sequence[float]) -> Array:
    """The draft lengths of R rows that bring most tokens a second.

    Tried are the same length for all, and, where a step is not padded, those drafts whose chance of being accepted is
    above some threshold: fewer for a row whose drafts are often wrong.

    Args:
        rates: [R] each row's acceptance rate.
        limits: [R] int: drafts that it may have.
        relative: by the longest draft's length: the factor by which steps are dearer than `costs` says, against steps
            without drafts.

    Returns:
        [R] int64, all zero where drafts do not bring MARGIN times what none bring.
    """
    rows, most = len(rates), int(limits.max())
    chances = rates[:, None] ** np.arange(1, 1 + most)  # that all drafts up to each are accepted
    expected = np.zeros((rows, 1 + most))  # drafts that are accepted on average, of so many
    np.cumsum(chances, axis=1, out=expected[:, 1:])
    candidates = [np.minimum(limits, k) for k in range(1 + most)]
    if costs.shape(rows, 1 + most) is None:
        candidates += [np.minimum(limits, (chances >= least).sum(axis=1)) for least in _THRESHOLDS]
    row = np.arange(rows)
    speeds = [
        (rows + expected[row, lengths].sum()) / (costs.step_seconds(lengths) * relative[int(lengths.max())])
        for lengths in candidates
    ]
    speeds[0] *= MARGIN
    return candidates[int(np.argmax(speeds))].astype(np.int64)
