"""Who proposes drafts: the scheduler's view. It counts tokens; where a draft model proposes, on the device, it says no
more than how many there will be.

    Proposer      how many drafts a request gets (DraftLengths), of which tokens (a Source), and when the next step has
                  to wait for the tokens under way
    NoProposer    none, and the scheduler waits for nothing
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import Request

_NOTHING = Draft(0)


class Source(Protocol):
    """Of a request's drafts."""

    def propose(self, request: Request, length: int) -> Draft:
        """At most `length` tokens."""

    def forget(self, request: Request) -> None:
        """It has ended: its tokens are all there will be."""


class Lengths(Protocol):
    """How many drafts each request gets; speculative/adapt.py measures what pays."""

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        """Drafts for each request of the next step, 0 to its limit."""

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of a step, also of one without drafts."""

    def pay(self, steps: float) -> None:
        """What it cost, in steps, to find out that there was nothing to propose."""

    def forget(self, request: Hashable) -> None:
        """The request has ended."""


class AsManyAsThereAre:
    """As many drafts as there can be, whatever they bring."""

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        return list(limits)

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass

    def pay(self, steps: float) -> None:
        pass

    def forget(self, request: Hashable) -> None:
        pass


class NoProposer:
    """What a scheduler without speculation has."""

    waits = False

    def propose(self, requests: Iterable[Request]) -> dict[int, Draft]:
        return {}

    def book(self, rows: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult) -> None:
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
        self._source, self._lengths, self._most = source, lengths, most
        self._waiting_cost = waiting_cost
        self.waits = False  # the next step, until the step under way is booked, because there will be drafts in it

    def propose(self, requests: Iterable[Request]) -> dict[int, Draft]:
        """Drafts by place in `requests`, which are the running ones of a step.

        A request with a grammar gets none: what may come next depends on the token before. Where tokens are still under
        way none gets any, and the step after this one waits if they would be worth it.
        """
        requests = list(requests)
        if not requests:
            return {}
        hoped = self._lengths.choose(requests, [0 if r.constraint is not None else self._most for r in requests])
        self.waits = any(hoped)
        if not self.waits or any(r.num_in_flight > 1 for r in requests):
            return {}
        found = [self._source.propose(r, self._most) if n else _NOTHING for r, n in zip(requests, hoped, strict=True)]
        lengths = self._lengths.choose(requests, [draft.length for draft in found])
        if not any(lengths):
            self._lengths.pay(self._waiting_cost)
        return {
            place: Draft(length, draft.token_ids[:length])
            for place, (draft, length) in enumerate(zip(found, lengths, strict=True))
            if length
        }

    def book(self, rows: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult) -> None:
        """A step is over. `rows` are the requests of the plan's rows, each with its number of preemptions."""
        booked = [row for row in range(plan.num_decode_rows) if not rows[row][0].finished]
        drafted, accepted = [plan.counts[row] - 1 for row in booked], [len(result.tokens[row]) - 1 for row in booked]
        self._lengths.book([rows[row][0] for row in booked], drafted, accepted)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._source.forget(request)
        self._lengths.forget(request)
