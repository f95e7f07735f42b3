"""The seam between scheduler and speculation: `plan` before a step, `book` after it, `forget` at a request's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import Request, RequestStatus
from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.speculative.policy import Drafted, DraftLengthPolicy, StepTime
from mini_infer.speculative.policy.adaptive import AdaptiveDraftLength
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.proposers import Proposer
from mini_infer.speculative.proposers.lookup import ngram_proposer, suffix_proposer
from mini_infer.speculative.proposers.synthetic import SyntheticProposer

_FINISHED = RequestStatus.finished


class NoSpeculation:
    """Nobody proposes, and the scheduler waits for nothing."""

    most = 0  # drafts of a request in a step
    needs_tokens = False  # drafts are looked up in the request's tokens: none may be in flight
    keeps_up = False  # drafts are worth making these days: a draft model computes prompts, too
    waits = False  # the next step, until the one in flight is booked: its tokens are needed for drafts

    def plan(self, requests: Sequence[Request], prompts: bool = False) -> dict[int, Draft]:
        """Drafts by place in `requests`, which are the running ones of a step. `prompts`: it may have some, too."""
        return {}

    def book(
        self, requests: Sequence[Request], plan: StepPlan, result: StepResult, seconds: float | None = None
    ) -> None:
        """A step of these requests is over: for every step, in order. `seconds` lie between the booking of the step
        before and this one; None where the engine had nothing to do in between, or nobody has measured it."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class Speculator(NoSpeculation):
    """A proposer, and a policy of how many drafts a request gets. `waiting_cost` is that of a step which waits for the
    one before it, as a share of a step."""

    def __init__(self, proposer: Proposer, policy: DraftLengthPolicy, most: int, waiting_cost: float = 0.0) -> None:
        self.policy, self.most = policy, most
        self.needs_tokens = proposer.needs_tokens
        self._proposer, self._waiting_cost = proposer, waiting_cost
        self._waited = 0.0  # what the step being planned has waited for drafts that it does not have
        self._host_s = 0.0  # what its lookups took

    def plan(self, requests: Sequence[Request], prompts: bool = False) -> dict[int, Draft]:
        """A request with a grammar gets none: what may come next depends on the token before. Where drafts are looked
        up and tokens are in flight nobody gets any, and the step after this one waits if they would be worth it."""
        self.keeps_up = self.waits = False
        if not requests:
            return {}
        started = time.perf_counter()
        limits = [self.most if request.constraint is None else 0 for request in requests]
        lengths = self.policy.choose(requests, limits, prompts)
        if not any(lengths):
            return {}
        self.keeps_up = True
        propose = self._proposer.propose
        if not self.needs_tokens:
            return {row: propose(requests[row], length) for row, length in enumerate(lengths) if length}
        self.waits = True
        if any(request.num_in_flight > 1 for request in requests):
            return {}
        found = {row: propose(requests[row], self.most) for row, length in enumerate(lengths) if length}
        limits = [found[row].length if row in found else 0 for row in range(len(requests))]
        lengths = self.policy.choose(requests, limits, prompts)
        self._waited = 0.0 if any(lengths) else self._waiting_cost
        self._host_s = time.perf_counter() - started
        return {row: Draft(n, found[row].token_ids[:n]) for row, n in enumerate(lengths) if n}

    def book(
        self, requests: Sequence[Request], plan: StepPlan, result: StepResult, seconds: float | None = None
    ) -> None:
        running = [row for row in range(plan.num_decode_rows) if requests[row].status is not _FINISHED]
        drafts: list[Drafted] = []
        if plan.num_drafts:
            counts, tokens = plan.counts, result.tokens
            drafts = [(requests[row], counts[row] - 1, len(tokens[row]) - 1) for row in running if counts[row] > 1]
        comparable = 0 < len(running) == plan.num_rows  # no prompts, and nobody whose tokens are dropped
        step_time = StepTime(
            seconds if comparable else None,
            result.draft_s,
            self._host_s,
            self._waited,
            speculative=plan.keeps_up or plan.num_drafts > 0,
        )
        self._host_s = self._waited = 0.0
        self.policy.book(len(running), drafts, step_time)

    def forget(self, request: Request) -> None:
        self._proposer.forget(request)
        self.policy.forget(request)


def make_speculator(config: SpeculationConfig, vocab_size: int, step_costs: Callable[[], StepCosts]) -> NoSpeculation:
    """Of the settings. `step_costs` decide how many drafts a request gets, unless it is as many as there are."""
    if not config.most:
        return NoSpeculation()
    proposer = Proposer() if config.has_draft_model else SyntheticProposer(vocab_size)
    if config.method is SpeculationMethod.ngram:
        proposer = ngram_proposer(config.ngram_min, config.ngram_max)
    if config.method is SpeculationMethod.suffix:
        proposer = suffix_proposer()
    if not config.adaptive:
        return Speculator(proposer, DraftLengthPolicy(), config.most)
    costs = step_costs()
    return Speculator(proposer, AdaptiveDraftLength(costs, config.most), config.most, waiting_cost=costs.waiting)
