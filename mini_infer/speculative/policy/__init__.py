"""How many drafts pay: an optional policy of speculation. docs/speculation.md says what it estimates and bounds.

DraftLengthPolicy  the seam: choose, book, forget; by itself it takes as many drafts as there can be
adaptive.py        as many as bring most tokens a second, within a budget for what they may lose
costs.py           what a step costs by rows and tokens a row, measured at start-up
estimates.py       acceptance rates, what steps have taken since, and the best draft lengths by them
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

Drafted = tuple[Hashable, int, int]  # a request, its drafts in a step (not 0), and how many of them were accepted


class StepTime(NamedTuple):
    """What is known of a step's time."""

    seconds: float | None = None  # between the booking of the step before and its own; None where that says nothing
    draft_s: float = 0.0  # of it, the draft model's
    host_s: float = 0.0  # of it, the proposer's, while the device had nothing to do
    waited: float = 0.0  # for tokens to draft from, in vain: the table's estimate, as a share of a step
    speculative: bool = True  # drafts were made, or hoped for


class DraftLengthPolicy:
    """As many drafts as there can be, whatever they bring."""

    def choose(self, requests: Sequence[Hashable], limits: Sequence[int], prompts: bool = False) -> list[int]:
        """Drafts for each request of the next step, 0 to its limit. `prompts`: the step may have some, too."""
        return list(limits)

    def book(self, rows: int, drafts: Sequence[Drafted], time: StepTime) -> None:
        """A step of so many running requests is over. For every step, also without drafts, in order."""

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
