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

    def forget(self, request: Hashable) -> None:
        """The request has ended."""


class AsManyAsThereAre:
    """As many drafts as there can be, whatever they bring."""

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        return list(limits)

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
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
    """

    def __init__(self, source: Source, lengths: Lengths, most: int) -> None:
        self._source, self._lengths, self._most = source, lengths, most
        self.waits = False  # the next step, until the step under way is booked, because there will be drafts in it

    def propose(self, requests: Iterable[Request]) -> dict[int, Draft]:
        """Drafts by place in `requests`, which are the running ones of a step.

        A request with a grammar gets none: what may come next depends on the token before. Where tokens are still under
        way none gets any, and the step after this one waits if they would be worth it.
        """
        requests = list(requests)
        if not requests:
            return {}
        lengths = self._lengths.choose(requests, [0 if r.constraint is not None else self._most for r in requests])
        self.waits = any(lengths)
        if not self.waits or any(r.num_in_flight > 1 for r in requests):
            return {}
        drafts = {}
        for place, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            if length:
                draft = self._source.propose(request, length)
                if draft.length:
                    drafts[place] = draft
        return drafts

    def book(self, rows: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult) -> None:
        """A step is over. `rows` are the requests of the plan's rows, each with its number of preemptions."""
        booked = [row for row in range(plan.num_decode_rows) if not rows[row][0].finished]
        drafted, accepted = [plan.counts[row] - 1 for row in booked], [len(result.tokens[row]) - 1 for row in booked]
        self._lengths.book([rows[row][0] for row in booked], drafted, accepted)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._source.forget(request)
        self._lengths.forget(request)
