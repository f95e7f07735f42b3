"""Who proposes drafts: the scheduler's view. It counts tokens; where a draft model proposes, on the device, it says no
more than how many there will be.

    Proposer      how many drafts a request gets (DraftLengths), of which tokens (a Source), and when the next step has
                  to wait for the tokens under way
    NoProposer    none, and the scheduler waits for nothing
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import Request
from mini_infer.speculative.adapt import Spent


class Source(Protocol):
    """Of a request's drafts."""

    needs_tokens: bool  # it reads the request's tokens themselves: none may be under way

    def propose(self, request: Request, length: int) -> Draft:
        """At most `length` tokens; exactly so many, unless it needs tokens."""

    def forget(self, request: Request) -> None:
        """It has ended: its tokens are all there will be."""


class Lengths(Protocol):
    """How many drafts each request gets; speculative/adapt.py measures what pays."""

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int], prompts: bool = False) -> list[int]:
        """Drafts for each request of the next step, 0 to its limit."""

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int], spent: Spent) -> None:
        """What became of a step, also of one without drafts."""

    def forget(self, request: Hashable) -> None:
        """The request has ended."""


class AsManyAsThereAre:
    """As many drafts as there can be, whatever they bring."""

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int], prompts: bool = False) -> list[int]:
        return list(limits)

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int], spent: Spent) -> None:
        pass

    def forget(self, request: Hashable) -> None:
        pass


class NoProposer:
    """What a scheduler without speculation has."""

    waits = False
    keeps_up = False
    needs_tokens = False
    most = 0

    def propose(self, requests: Iterable[Request], prompts: bool = False) -> dict[int, Draft]:
        return {}

    def book(
        self, rows: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult, seconds: float | None = None
    ) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


class Proposer:
    """
    Args:
        most: drafts of a request in a step.
        waiting_cost: of a step that waits for the one before it, as a share of a step.
    """

    def __init__(self, source: Source, lengths: Lengths, most: int, waiting_cost: float = 0.0) -> None:
        self._source, self._lengths, self.most = source, lengths, most
        self._waiting_cost = waiting_cost
        self.needs_tokens = source.needs_tokens
        self.keeps_up = False  # drafts are worth making these days: a draft model computes prompts, too
        self.waits = False  # the next step, until the one under way is booked: its tokens are needed for drafts
        self._waited = 0.0  # the step being planned has waited in vain: what that costs
        self._host_s = 0.0  # what its lookups took

    def propose(self, requests: Iterable[Request], prompts: bool = False) -> dict[int, Draft]:
        """Drafts by place in `requests`, which are the running ones of a step. `prompts`: there may be some in it, too.

        A request with a grammar gets none: what may come next depends on the token before. Where drafts are looked up
        from the tokens themselves and some are still under way none gets any, and the step after this one waits if they
        would be worth it.
        """
        started = time.perf_counter()
        requests = list(requests)
        self.keeps_up = self.waits = False
        if not requests:
            return {}
        most = [0 if r.constraint is not None else self.most for r in requests]
        hoped = self._lengths.choose(requests, most, prompts)
        self.keeps_up = any(hoped)
        self.waits = self.keeps_up and self.needs_tokens
        if not self.waits:
            return {i: self._source.propose(r, n) for i, (r, n) in enumerate(zip(requests, hoped, strict=True)) if n}
        if any(r.num_in_flight > 1 for r in requests):
            return {}
        found = [self._source.propose(r, self.most) if n else Draft(0) for r, n in zip(requests, hoped, strict=True)]
        lengths = self._lengths.choose(requests, [draft.length for draft in found], prompts)
        self._waited = 0.0 if any(lengths) else self._waiting_cost
        self._host_s = time.perf_counter() - started
        return {
            place: Draft(length, draft.token_ids[:length])
            for place, (draft, length) in enumerate(zip(found, lengths, strict=True))
            if length
        }

    def book(
        self, rows: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult, seconds: float | None = None
    ) -> None:
        """A step is over. For every step, in order.

        Args:
            rows: the requests of the plan's rows, each with its number of preemptions.
            seconds: between the booking of the step before and this one; None where the engine had nothing to do in
                between, or nobody has measured it.
        """
        booked = [row for row in range(plan.num_decode_rows) if not rows[row][0].finished]
        drafted, accepted = [plan.counts[row] - 1 for row in booked], [len(result.tokens[row]) - 1 for row in booked]
        comparable = 0 < len(booked) == plan.num_rows  # no prompts, and nobody whose tokens are dropped
        spent = Spent(
            seconds if comparable else None,
            result.draft_s,
            self._host_s,
            self._waited,
            speculative=plan.keeps_up or plan.num_drafts > 0,
        )
        self._host_s = self._waited = 0.0
        self._lengths.book([rows[row][0] for row in booked], drafted, accepted, spent)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._source.forget(request)
        self._lengths.forget(request)
