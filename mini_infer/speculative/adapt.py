"""How many drafts each request gets in the next step: what brings most tokens a second, and none where they would lose.

    expected tokens   from each request's rate of acceptance, what is not known yet being the engine's
    seconds           from a table measured at start-up (costs.py)

Beside these estimates there is an account of what drafts have really brought, in steps without drafts: a step that
takes 1.5 times as long as one without, and brings 1.2 times its tokens, costs 0.3. Drafts are made while the account is
above zero. It starts at RESERVE, never exceeds it, and is paid `exploring` for every step. So, by the measured costs
and whatever the estimates say: over any n steps drafts lose no more than RESERVE + exploring * n steps, and the excess
of one step. It is also what finds out that things have changed: where the estimates are against drafts, one request
gets one whenever the account is full.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from mini_infer.core.uniforms import Array
from mini_infer.speculative.costs import StepCosts

RESERVE = 3.0
_THRESHOLDS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # chances of being accepted that drafts are tried to be made from


class AcceptanceRate:
    """The chance that a draft is accepted if those before it are, from trials whose weight fades."""

    __slots__ = ("_accepted", "_fade", "trials")

    def __init__(self, fade: float, accepted: float = 0.0, trials: float = 0.0) -> None:
        """`fade`: what is left of a trial's weight after one more. `accepted` of `trials` are assumed."""
        self._fade = fade
        self._accepted = accepted
        self.trials = trials

    def book(self, drafted: int, accepted: int) -> None:
        """A step's drafts of a request. Those behind the first rejected one were never tried."""
        tried = min(accepted + 1, drafted)
        left = self._fade**tried
        self._accepted = self._accepted * left + accepted
        self.trials = self.trials * left + tried

    def estimate(self, prior: float, weight: float) -> float:
        """With a prior that counts as so many trials."""
        return (self._accepted + weight * prior) / (self.trials + weight)


class DraftLengths:
    """
    Args:
        most: drafts a row.
        exploring: steps' share that drafts may lose.
    """

    def __init__(self, costs: StepCosts, most: int, exploring: float = 0.005) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1 draft, got {most}")
        if not 0 <= exploring < 1:
            raise ValueError(f"exploring must be from 0 to below 1 of the steps, got {exploring}")
        self.costs = costs
        self.most = most
        self.exploring = exploring
        self.account = RESERVE
        self._engine = AcceptanceRate(fade=0.999, accepted=8, trials=10)  # hope: what it may cost is bounded
        self._requests: dict[Hashable, AcceptanceRate] = {}

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        """Drafts for each request of the next step, from 0 to min(its limit, most).

        Args:
            limits: what there are proposals for, or room.
        """
        allowed = np.minimum(limits, self.most)
        if self.account <= 0 or not allowed.any():
            return [0] * len(requests)
        prior = self._prior()
        rates = np.array([self._rate(request, prior) for request in requests])
        lengths = best_lengths(rates, allowed, self.costs)
        if not lengths.any() and self.account >= RESERVE:
            lengths[self._least_known(requests, allowed)] = 1
        return lengths.tolist()

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of a step: called for every one, also of those without drafts."""
        self.account = min(RESERVE, self.account + self.exploring)
        if not any(drafted):
            return
        steps = self.costs.step_seconds(np.array(drafted)) / self.costs.verify_seconds(len(requests))
        self.account = min(RESERVE, self.account + 1 + sum(accepted) / len(requests) - steps)
        for request, tried, stood in zip(requests, drafted, accepted, strict=True):
            if tried:
                self._engine.book(tried, stood)
                self._requests.setdefault(request, AcceptanceRate(fade=0.97)).book(tried, stood)

    def pay(self, steps: float) -> None:
        """What it cost to find out that there was nothing to propose."""
        self.account -= steps

    def rate(self, request: Hashable) -> float:
        """The estimated chance that a draft of the request is accepted if those before it are."""
        return self._rate(request, self._prior())

    def _prior(self) -> float:
        return self._engine.estimate(0.5, weight=0)

    def _rate(self, request: Hashable, prior: float) -> float:
        known = self._requests.get(request)
        return prior if known is None else known.estimate(prior, weight=4)

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
        self._requests.pop(request, None)

    def _least_known(self, requests: Sequence[Hashable], allowed: Array) -> int:
        """The place of the request with a proposal whose drafts were tried least."""

        def trials(place: int) -> float:
            known = self._requests.get(requests[place])
            return 0.0 if known is None else known.trials

        return min(np.flatnonzero(allowed).tolist(), key=trials)


def best_lengths(rates: Array, limits: Array, costs: StepCosts) -> Array:
    """The number of drafts for each of R rows that brings most tokens a second.

    Tried are the same number for all, and, where a step costs what is in it, those drafts whose chance of being
    accepted is above some threshold: fewer for a row whose drafts are often wrong.

    Args:
        rates: [R] each row's chance that a draft is accepted if those before it are.
        limits: [R] int: drafts that it may have.

    Returns:
        [R] int64, all zero where drafts bring nothing.
    """
    most = int(limits.max())
    chances = rates[:, None] ** np.arange(1, most + 1)  # [R, most]: that all drafts up to this one are accepted
    accepted = np.concatenate([np.zeros((len(rates), 1)), chances.cumsum(axis=1)], axis=1)
    candidates = [np.minimum(limits, k) for k in range(most + 1)]
    if not costs.padded:
        candidates += [np.minimum(limits, (chances >= least).sum(axis=1)) for least in _THRESHOLDS]
    row = np.arange(len(rates))
    speeds = [(len(rates) + accepted[row, lengths].sum()) / costs.step_seconds(lengths) for lengths in candidates]
    return candidates[int(np.argmax(speeds))].astype(np.int64)
