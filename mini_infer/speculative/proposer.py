"""Who proposes drafts: the scheduler's view. It counts tokens; where a draft model proposes, it says no more than how
many there will be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request


class Proposer(Protocol):
    """Drafts for running requests, and what became of them."""

    def waits(self, running: Sequence[Request]) -> bool:
        """Whether the next step waits until the step under way is booked, because there will be drafts in it."""

    def propose(self, requests: Iterable[Request]) -> dict[int, Draft]:
        """Drafts by place in `requests`, which are the running ones of a step. None for a request with a grammar, or
        with a token in flight beside this step's own."""

    def book(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step has verified the request's drafts."""

    def forget(self, request: Request) -> None:
        """It has ended: its tokens are all there will be."""


class NoProposer:
    def waits(self, running: Sequence[Request]) -> bool:
        return False

    def propose(self, requests: Iterable[Request]) -> dict[int, Draft]:
        return {}

    def book(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


def may_have_drafts(request: Request) -> bool:
    """With a grammar, what may come next depends on the token before. With a token in flight, so does the draft."""
    return request.constraint is None and request.num_in_flight == 1
