"""How many drafts each request gets in the next step: what brings most tokens a second, and none where they would lose.

    expected tokens   from each request's rate of acceptance, what is not known yet being the engine's
    seconds           from a table measured at start-up (costs.py), corrected by what steps have taken (step_times.py)

Beside these estimates there is an account of what drafts have really brought, in steps without drafts: a step that
takes 1.5 times as long as one without, and brings 1.2 times its tokens, costs 0.3. Drafts are made while the account is
above zero. It starts at RESERVE, never exceeds it, and is paid `exploring` for every step. It is also what finds out
that things have changed: where the estimates are against drafts, one request gets one whenever the account can pay it,
unless they would not even pay if all were accepted.

What is charged. Of a step with drafts, of one that waited for tokens to draft from, and of the one behind them: the
time between the booking of the step before and its own, over the time of steps without drafts at about as many rows.
That holds whatever came in that time: drafting, catching up, lookups, verification, host work that nothing hides. Where
that time is not known, or is not comparable because prompts are in the step or somebody in it has ended, it is the
table's estimate, as corrected, and what the draft model and the lookups took beyond it. What is done once for many
steps, a draft model's catching up on a context and indexing it, is paid in instalments, up to CREDIT of it.

So, whatever the estimates say: over any n steps drafts lose no more than RESERVE + CREDIT + exploring * n steps, and
the excess of the steps under way. Not covered: what a step takes beyond OUTLIER times as long as expected (an accident
is not the drafts' fault; a cost that stays comes to be expected within a few steps), and what the steps without drafts
have changed by since they were measured (every few hundred steps). Steps with prompts in them have no drafts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from mini_infer.core.uniforms import Array
from mini_infer.speculative.costs import StepCosts
from mini_infer.speculative.step_times import StepTimes

RESERVE = 8.0  # a draft of 7 tokens that is rejected can cost two steps, and a few of them in a row mean little
EXPLORING_FROM = 1.0  # on the account: no single try costs more
CREDIT = 30.0  # 64 prompts of 1,000 tokens that arrive together take a draft of 0.5B about 20 steps of a target of 7B
OUTLIER = 2.0
_INSTALMENT = 0.01  # of what is due, each step
_THRESHOLDS = (0.8, 0.65, 0.5, 0.35, 0.2, 0.1)  # chances of being accepted that drafts are tried to be made from


class Spent(NamedTuple):
    """What is known of a step's time."""

    seconds: float | None = None  # between the booking of the step before and its own; None where that says nothing
    draft_s: float = 0.0  # of it, the draft model's
    host_s: float = 0.0  # of it, the proposer's, while the device had nothing to do
    waited: float = 0.0  # for tokens to draft from, in vain: the table's estimate, as a share of a step
    speculative: bool = True  # drafts were made, or hoped for


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
        self._due = 0.0  # what is paid in instalments
        self._times = StepTimes()
        self._plain_before = True  # the step booked last had nothing of speculation in it
        self._engine = AcceptanceRate(fade=0.999, accepted=8, trials=10)  # hope: what it may cost is bounded
        self._requests: dict[Hashable, AcceptanceRate] = {}
        self._explorer: Hashable | None = None  # the request that explores: a draft model has caught up on it
        self._num_explorers = 0

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int], prompts: bool = False) -> list[int]:
        """Drafts for each request of the next step, from 0 to min(its limit, most).

        Args:
            limits: what there are proposals for, or room.
            prompts: some may be in the step, too. Then there are no drafts: nobody has measured what they cost there,
                the batch is about to grow, and a draft model would catch up on requests for which it may not pay.
        """
        allowed = np.minimum(limits, self.most)
        rows = len(requests)
        if prompts or self.account <= 0 or not allowed.any() or self._times.wants_plain(rows):
            return [0] * rows
        prior = self._prior()
        rates = np.array([self._rate(request, prior) for request in requests])
        relative = self._times.relative(rows, self.most)
        lengths = best_lengths(rates, allowed, self.costs, relative)
        if not lengths.any() and self.account >= EXPLORING_FROM:
            could_pay = best_lengths(np.ones(rows), allowed, self.costs, relative).any()
            if could_pay:
                lengths[self._place_to_explore(requests, allowed)] = 1
        return lengths.tolist()

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int], spent: Spent) -> None:
        """What became of a step: called for every one, also of those without drafts, in order."""
        self._times.next_step()
        self._pay(_INSTALMENT * self._due)
        self.account = min(RESERVE, self.account + self.exploring)
        speculative = spent.speculative or any(drafted)
        if speculative or not self._plain_before:
            gained = sum(accepted) / max(1, len(requests))
            self.account += 1 + gained - self._steps(np.array(drafted, dtype=int), spent)
            self._pay(max(0.0, self._due - CREDIT))
            self.account = min(RESERVE, self.account)
        elif spent.seconds is not None:
            rows = len(requests)
            self._times.learn_plain(rows, spent.seconds / self.costs.verify_seconds(rows))
        self._plain_before = not speculative
        if spent.speculative and not any(drafted):
            self._explorer = None  # there was nothing to propose for it
        for request, tried, stood in zip(requests, drafted, accepted, strict=True):
            if tried:
                self._engine.book(tried, stood)
                self._requests.setdefault(request, AcceptanceRate(fade=0.97)).book(tried, stood)

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
        self._requests.pop(request, None)
        if request is self._explorer:
            self._explorer = None

    def _pay(self, instalment: float) -> None:
        self._due -= instalment
        self.account -= instalment

    def _steps(self, lengths: Array, spent: Spent) -> float:
        """What a step took, in steps without drafts, but for what is paid in instalments."""
        rows, longest = len(lengths), int(lengths.max(initial=0))
        plain = self.costs.verify_seconds(rows)
        by_table = self.costs.step_seconds(lengths) / plain if longest else 1.0
        plain *= self._times.plain(rows)
        factor = self._times.relative(rows, longest)[-1]
        expected = by_table * factor
        usual = factor * self.costs.proposing_seconds(lengths) * (1 if spent.seconds is None else OUTLIER)
        once = (max(0.0, spent.draft_s - usual) + spent.host_s) / plain
        self._due += once
        if spent.seconds is None:
            return expected + spent.waited
        steps = spent.seconds / plain
        if longest:
            self._times.learn_relative(rows, longest, min(steps, OUTLIER * expected) / by_table)
        return min(steps - once, OUTLIER * expected)

    def _prior(self) -> float:
        return self._engine.estimate(0.5, weight=0)

    def _rate(self, request: Hashable, prior: float) -> float:
        known = self._requests.get(request)
        return prior if known is None else known.estimate(prior, weight=4)

    def _place_to_explore(self, requests: Sequence[Hashable], allowed: Array) -> int:
        """The place of the request that explored last: for another one a draft model would have to catch up. Where it
        may not, or has nothing to propose, another has its turn."""
        places = np.flatnonzero(allowed).tolist()
        for place in places:
            if requests[place] is self._explorer:
                return place
        place = places[self._num_explorers % len(places)]
        self._num_explorers += 1
        self._explorer = requests[place]
        return place


def best_lengths(rates: Array, limits: Array, costs: StepCosts, relative: Sequence[float]) -> Array:
    """The number of drafts for each of R rows that brings most tokens a second.

    Tried are the same number for all, and, where a step costs what is in it, those drafts whose chance of being
    accepted is above some threshold: fewer for a row whose drafts are often wrong.

    Args:
        rates: [R] each row's chance that a draft is accepted if those before it are.
        limits: [R] int: drafts that it may have.
        relative: by the longest draft's length: the factor by which steps are dearer than `costs` says, against steps
            without drafts.

    Returns:
        [R] int64, all zero where drafts bring nothing.
    """
    rows, most = len(rates), int(limits.max())
    chances = rates[:, None] ** np.arange(1, most + 1)  # [R, most]: that all drafts up to this one are accepted
    accepted = np.concatenate([np.zeros((rows, 1)), chances.cumsum(axis=1)], axis=1)
    candidates = [np.minimum(limits, k) for k in range(most + 1)]
    if costs.shape(rows, 1 + most) is None:
        candidates += [np.minimum(limits, (chances >= least).sum(axis=1)) for least in _THRESHOLDS]
    row = np.arange(rows)
    speeds = [
        (rows + accepted[row, lengths].sum()) / (costs.step_seconds(lengths) * relative[int(lengths.max())])
        for lengths in candidates
    ]
    return candidates[int(np.argmax(speeds))].astype(np.int64)
