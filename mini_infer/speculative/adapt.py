"""How many drafts each request gets in the next step: what brings most tokens a second, and none where they would lose.

Interface only, so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from mini_infer.speculative.costs import StepCosts

RequestKey = TypeVar("RequestKey", bound=Hashable)


class DraftLengths:
    """
    Args:
        most: drafts a row.
        exploring: the share of the time that drafts may lose.
    """

    def __init__(self, costs: StepCosts, most: int, exploring: float = 0.01) -> None:
        raise NotImplementedError

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int]) -> list[int]:
        """Drafts for each request of the next step, 0 to min(its limit, most).

        Args:
            limits: what there are proposals for, or room.
        """
        raise NotImplementedError

    def book(self, requests: Sequence[Hashable], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of a step. Called for every step, also without drafts."""

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
