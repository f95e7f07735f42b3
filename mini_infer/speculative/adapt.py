"""How many drafts each request gets in the next step: what brings most tokens a second, and none where they would lose.

    expected tokens   from each request's rate of acceptance, what is not known yet being the engine's
    seconds           from a table measured at start-up (costs.py), corrected by what steps have taken (step_times.py)

Drafts are made where that promises MARGIN times the speed without. Where it does not, one request gets one draft as
often as `exploring` of all steps pays for it (by the estimates): things change. Unless drafts would not even pay if all
were accepted.

Beside the estimates there is an account of what drafts have really brought, in steps without drafts: a step that takes
1.5 times as long as one without, and brings 1.2 times its tokens, costs 0.3. Drafts are made while it is above zero. It
starts at RESERVE, is paid `exploring` for every step, and keeps what drafts win, up to CREDIT. What was expected of a
step is booked at once. What it cost beyond that is owed, up to CREDIT, and paid in instalments: bad luck, which good
luck makes up for where drafts pay, and what is done once for many steps, as a draft model's catching up on a context.

What is charged. Of a step with drafts, of one that waited for tokens to draft from, and of the one behind them: the
time between the booking of the step before and its own, over the time of steps without drafts at about as many rows.
That holds whatever came in that time: drafting, catching up, lookups, verification, host work that nothing hides. Where
that time is not known, or is not comparable because prompts are in the step or somebody in it has ended, it is the
table's estimate, as corrected, and what the draft model and the lookups took beyond it.

The estimates are asked again when something was booked with drafts in it, when the batch changes, and every _REASK
steps: on a CPU asking takes as long as a tenth of a small model's step.

So, whatever the estimates say: over an engine's first n steps drafts lose no more than RESERVE + CREDIT + exploring * n
steps, over any n steps no more than 2 * CREDIT + exploring * n (of it CREDIT that they had won), and the excess of the
steps under way. That rests on what steps without drafts take, measured every 64 steps: as far as that is wrong, so is
the account. Not covered: what a step takes beyond OUTLIER times as long as expected (an accident is not the drafts'
fault; a cost that stays comes to be expected, twice as much every eight steps). Steps with prompts have no drafts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from mini_infer.core.uniforms import Array
from mini_infer.speculative.costs import StepCosts
from mini_infer.speculative.step_times import StepTimes

MARGIN = 1.04  # estimates err, the best of many errs upwards, and a batch with drafts thins out towards its end
RESERVE = 4.0  # a few steps whose drafts are all rejected
CREDIT = 30.0  # 64 prompts of 1,000 tokens that arrive together take a draft of 0.5B about 20 steps of a target of 7B
OUTLIER = 2.0  # busy machines have steps of twice the usual length, and drafts seldom become so much dearer
CATCHING_UP = 1.5  # times what drafting takes by itself
_REASK = 16  # steps without drafts
_INSTALMENT = 0.01  # of what is owed, each step: luck evens out over a hundred
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
        exploring: steps' share that drafts may lose where they are not worth it.
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
        self._owed = 0.0
        self._to_explore = 0.0  # what exploring has been paid beyond its cost: never above zero
        self._times = StepTimes()
        self._plain_before = True  # the step booked last had nothing of speculation in it
        self._engine = AcceptanceRate(fade=0.997, accepted=7, trials=10)  # hope
        self._requests: dict[Hashable, AcceptanceRate] = {}
        # What was last asked of the estimates, the answer (lengths, whether any could pay) and how often it was given.
        self._question: object = None
        self._answer: tuple[list[int], bool] = ([], False)
        self._answer_age = 0
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
        question = tuple(requests), allowed.tobytes()
        if question != self._question or self._answer_age == _REASK:
            relative = self._times.relative(rows, self.most)
            lengths = best_lengths(self._rates(requests), allowed, self.costs, relative)
            could_pay = bool(lengths.any() or best_lengths(np.ones(rows), allowed, self.costs, relative).any())
            self._question, self._answer, self._answer_age = question, (lengths.tolist(), could_pay), 0
        self._answer_age += 1
        best, could_pay = self._answer
        best = best.copy()
        if not any(best) and could_pay and self._to_explore >= 0:
            best[self._place_to_explore(requests, allowed)] = 1
        return best

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int], spent: Spent) -> None:
        """What became of a step: called for every one, also of those without drafts, in order."""
        self._times.next_step()
        self._to_explore = min(0.0, self._to_explore + self.exploring)
        speculative = spent.speculative or any(drafted)
        if speculative or not self._plain_before:
            self._question = None
            self._charge(requests, np.array(drafted, dtype=int), sum(accepted), spent)
        elif spent.seconds is not None:
            rows = len(requests)
            self._times.learn_plain(rows, spent.seconds / self.costs.verify_seconds(rows))
        owed = min(max(0.0, self._owed), CREDIT) * (1 - _INSTALMENT)  # good luck is paid out at once
        self.account = min(CREDIT, self.account + self.exploring + owed - self._owed)
        self._owed = owed
        self._plain_before = not speculative
        if spent.speculative and not any(drafted):
            self._explorer = None  # there was nothing to propose for it
        for request, tried, stood in zip(requests, drafted, accepted, strict=True):
            if tried:
                self._engine.book(tried, stood)
                self._requests.setdefault(request, AcceptanceRate(fade=0.97)).book(tried, stood)

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
        self._question = None
        self._requests.pop(request, None)
        if request is self._explorer:
            self._explorer = None

    def _charge(self, requests: Sequence[Hashable], lengths: Array, accepted: int, spent: Spent) -> None:
        rows = max(1, len(lengths))
        hoped = _expected(_chances(self._rates(requests), int(lengths.max(initial=0))), lengths) / rows
        expected, took = self._steps(lengths, spent)
        self.account += 1 + hoped - expected
        self._to_explore -= max(0.0, expected - 1 - hoped)
        self._owed += took - expected + hoped - accepted / rows

    def _steps(self, lengths: Array, spent: Spent) -> tuple[float, float]:
        """What a step was expected to take, and what it took, in steps without drafts."""
        rows, longest = len(lengths), int(lengths.max(initial=0))
        plain = self.costs.verify_seconds(rows)
        by_table = self.costs.step_seconds(lengths) / plain if longest else 1.0
        plain *= self._times.plain(rows)
        factor = self._times.relative(rows, longest)[-1]
        proposing = self.costs.proposing_seconds(lengths)
        # After steps without drafts the draft model may have to catch up first: that says nothing about the next steps.
        catches_up = self._plain_before and spent.draft_s > CATCHING_UP * factor * proposing
        if catches_up:
            factor = self._times.catching_up(rows)
        expected = by_table * factor + spent.waited
        usual = factor * proposing * (1 if spent.seconds is None else OUTLIER)
        once = (max(0.0, spent.draft_s - usual) + spent.host_s) / plain
        if spent.seconds is None:
            return expected, expected + once
        steps = spent.seconds / plain
        if longest:
            ratio = min(steps, OUTLIER * expected) / by_table
            if catches_up:
                self._times.learn_catching_up(rows, ratio)
            else:
                self._times.learn_relative(rows, longest, ratio)
        return expected, once + min(steps - once, OUTLIER * expected)

    def _rates(self, requests: Sequence[Hashable]) -> Array:
        """[R] the chance of each request that its next draft is accepted: the engine's, until its own is known."""
        prior = self._engine.estimate(0.5, weight=0)
        known = (self._requests.get(request) for request in requests)
        return np.array([prior if rate is None else rate.estimate(prior, weight=16) for rate in known])

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


def _chances(rates: Array, most: int) -> Array:
    """[R, most] that all drafts up to this one are accepted."""
    return rates[:, None] ** np.arange(1, most + 1)


def _expected(chances: Array, lengths: Array) -> float:
    """Drafts that are accepted on average, of so many for each row."""
    return float(chances[np.arange(chances.shape[1]) < lengths[:, None]].sum())


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
        [R] int64, all zero where drafts do not bring MARGIN times what none bring.
    """
    rows, most = len(rates), int(limits.max())
    chances = _chances(rates, most)
    candidates = [np.minimum(limits, k) for k in range(most + 1)]
    if costs.shape(rows, 1 + most) is None:
        candidates += [np.minimum(limits, (chances >= least).sum(axis=1)) for least in _THRESHOLDS]
    speeds = [
        (rows + _expected(chances, lengths)) / (costs.step_seconds(lengths) * relative[int(lengths.max())])
        for lengths in candidates
    ]
    speeds[0] *= MARGIN
    return candidates[int(np.argmax(speeds))].astype(np.int64)
