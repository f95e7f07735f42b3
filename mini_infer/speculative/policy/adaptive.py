"""As many drafts as bring most tokens a second, and none where they would lose: estimates, and a budget beside them.

The estimates are acceptance rates and step times; the budget bounds what estimates that are wrong may lose. All costs
are in steps without drafts at about as many rows. docs/speculation.md tells what is charged, and what the bounds are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from mini_infer.core.uniforms import Array
from mini_infer.speculative.policy import Drafted, DraftLengthPolicy, StepTime
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.policy.estimates import AcceptanceRate, StepTimes, best_lengths, expected_accepted

INITIAL_BUDGET = 4.0  # a few steps whose drafts are all rejected
MAX_BUDGET = 30.0  # 64 prompts of 1,000 tokens that arrive together take a draft of 0.5B about 20 steps of a 7B target
MAX_OWED = 1_000.0  # for contexts: those of some 50 such waves of prompts
OUTLIER = 2.0  # busy machines have steps of twice the usual length, and drafts seldom become so much dearer
_CATCHING_UP = 1.5  # times what drafting takes by itself
_AMORTISED = 0.01  # of the deferred loss, each step: chance evens out over a hundred
_REASK = 250  # steps after which the estimates are asked again if nothing was learned: times are forgotten


class AdaptiveDraftLength(DraftLengthPolicy):
    """
    Args:
        most: drafts a row, at least 1.
        exploration: share, below 1, of the steps that drafts may lose where they are not worth it.
    """

    def __init__(self, costs: StepCosts, most: int, exploration: float = 0.005) -> None:
        self.costs, self.most, self._exploration = costs, most, exploration
        self.budget = INITIAL_BUDGET  # drafts are made while it is above zero
        self._deferred = 0.0  # loss that the budget is charged bit by bit
        self._owed = 0.0  # for contexts that the draft model caught up on, until drafts win it
        self._to_explore = 0.0  # what exploration was granted beyond its cost: never above zero
        self._times = StepTimes()
        self._overall = AcceptanceRate(fade=0.997, accepted=7, trials=10)  # an optimistic start
        self._rates: dict[Hashable, AcceptanceRate] = {}
        self._plain_before = True  # the step booked last had nothing of speculation in it
        self._num_empty = 0  # steps that were to have drafts, and for which there was nothing to propose
        self._question: object = None  # what was last asked of the estimates, None where something was learned since
        self._answer: tuple[list[int], bool] = ([], False)  # draft lengths, and whether any could pay

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int], prompts: bool = False) -> list[int]:
        # Beside prompts there are none: nobody has measured what drafts cost there, the batch is about to grow, and a
        # draft model would catch up on requests for which it may not pay.
        rows = len(requests)
        if prompts or self.budget <= 0 or not any(limits) or self._times.wants_plain():
            return [0] * rows
        if self._question != (requests, limits):
            allowed = np.minimum(limits, self.most)
            relative = self._times.relative(rows, self.most)
            lengths = best_lengths(self._acceptance(requests), allowed, self.costs, relative)
            could_pay = bool(lengths.any() or best_lengths(np.ones(rows), allowed, self.costs, relative).any())
            self._question, self._answer = (list(requests), list(limits)), (lengths.tolist(), could_pay)
        best, could_pay = self._answer[0].copy(), self._answer[1]
        if could_pay and self._to_explore >= 0 and not any(best):
            # The same request as last time, unless it had nothing: on another a draft model would have to catch up.
            places = [place for place, limit in enumerate(limits) if limit]
            best[places[self._num_empty % len(places)]] = 1
        return best

    def book(self, rows: int, drafts: Sequence[Drafted], time: StepTime) -> None:
        self._times.next_step(timed=time.seconds is not None)
        self.budget += self._exploration
        self._to_explore = min(0.0, self._to_explore + self._exploration)
        if time.speculative or not self._plain_before:
            self._charge(max(1, rows), drafts, time)
            self._question = None
        elif time.seconds is not None:
            self._times.learn(0, rows, time.seconds / self.costs.verify_seconds(rows))
        if self._times.step % _REASK == 0:
            self._question = None
        kept = min(max(0.0, self._deferred), MAX_BUDGET) * (1 - _AMORTISED)  # a deferred gain counts at once
        self.budget += kept - self._deferred
        self._deferred = kept
        # What drafts win beyond the most they may keep pays for contexts.
        owed = max(0.0, self._owed - max(0.0, self.budget - MAX_BUDGET))
        self._owed = min(owed, MAX_OWED)
        self.budget = min(self.budget, MAX_BUDGET) + self._owed - owed
        self._plain_before = not time.speculative
        self._num_empty += time.speculative and not drafts
        for request, drafted, accepted in drafts:
            if request not in self._rates:
                self._rates[request] = AcceptanceRate(fade=0.97)
            self._rates[request].book(drafted, accepted)
        tried = sum(min(accepted + 1, drafted) for _, drafted, accepted in drafts)
        self._overall.add(tried, sum(accepted for _, _, accepted in drafts))

    def forget(self, request: Hashable) -> None:
        self._question = None
        self._rates.pop(request, None)

    def _charge(self, rows: int, drafts: Sequence[Drafted], time: StepTime) -> None:
        """What was expected of a step counts at once; by how much it was wrong is deferred."""
        lengths = np.zeros(rows, dtype=int)
        lengths[: len(drafts)] = [drafted for _, drafted, _ in drafts]
        rates = self._acceptance([request for request, _, _ in drafts])
        gain = expected_accepted(rates, lengths[: len(drafts)]) / rows
        expected, contexts, lookups, took = self._steps(lengths, time)
        loss = expected - 1 - gain
        self.budget -= loss
        self._owed += contexts
        if loss + lookups > 0:
            self._to_explore -= loss + lookups + contexts
        self._deferred += lookups + took - expected + gain - sum(accepted for _, _, accepted in drafts) / rows

    def _steps(self, lengths: Array, time: StepTime) -> tuple[float, float, float, float]:
        """What a step was expected to take, what the draft model took for contexts, which it computes once for many
        steps, what lookups took, and the step besides, in steps without drafts. Learns from it."""
        rows, longest = len(lengths), int(lengths.max())
        plain = self.costs.verify_seconds(rows)
        by_table = self.costs.step_seconds(lengths) / plain
        plain *= self._times.plain(rows)
        factor = self._times.relative(rows, longest)[-1]
        drafting_s = factor * self.costs.proposing_seconds(lengths)
        expected = by_table * factor + time.waited
        contexts = max(0.0, time.draft_s - drafting_s * (1 if time.seconds is None else OUTLIER)) / plain
        lookups = time.host_s / plain  # which may index a prompt
        if time.seconds is None:
            return expected, contexts, lookups, expected
        steps = time.seconds / plain
        # A draft model that catches up after steps without drafts says nothing about steps with drafts in a row.
        if longest and not (self._plain_before and time.draft_s > _CATCHING_UP * drafting_s):
            self._times.learn(longest, rows, min(steps, OUTLIER * expected) / by_table)
        return expected, contexts, lookups, min(steps - contexts - lookups, OUTLIER * expected)

    def _acceptance(self, requests: Sequence[Hashable]) -> Array:
        """[R] the acceptance rate of each request: the engine's, until its own is known."""
        prior = self._overall.estimate(0.5, weight=0)
        rates = self._rates
        return np.array([rates[r].estimate(prior, 16) if r in rates else prior for r in requests])
