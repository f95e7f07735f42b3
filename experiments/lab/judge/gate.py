"""What a gate found: a variant's tokens beside those that they must equal, its logits beside a reference's in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

ALONE = "it is answered alone"  # what a request's tokens are compared with


@dataclass(frozen=True)
class Difference:
    """The first token at which a request's output left what it must equal; None stands for a missing token."""

    request: int
    position: int
    expected: int | None
    got: int | None


@dataclass(frozen=True)
class Gate:
    """Tokens of one variant at one point, over all repeats, every one of which must be equal."""

    variant: str
    point: str
    equal_tokens: int  # before each request's first difference: what follows one has another context
    total_tokens: int  # of what they were compared with
    first_difference: Difference | None
    against: str = ""  # what they were compared with, where that was not the baseline

    @property
    def share(self) -> float:
        return self.equal_tokens / self.total_tokens if self.total_tokens else 1.0

    @property
    def passed(self) -> bool:
        return self.first_difference is None

    def covers(self, variant: str, point: str) -> bool:
        return self.variant == variant and self.point in ("", point)  # a gate without a point holds for all

    def joined(self, other: Gate) -> Gate:
        """With what another repeat, or another process, found of the same."""
        return replace(
            self,
            equal_tokens=self.equal_tokens + other.equal_tokens,
            total_tokens=self.total_tokens + other.total_tokens,
            first_difference=self.first_difference or other.first_difference,
        )


@dataclass(frozen=True)
class ErrorGate:
    """How far a variant's numbers are from those of a reference, computed in fp32 from the same inputs."""

    variant: str
    point: str | None  # None where it holds for all of them
    error: float  # the largest ||x - reference|| / ||reference|| of any row
    allowed: float  # what it may be at most
    against: str  # the reference, in words
    equal_rows: int = 0  # of logits, whose largest one, the greedy token, is the reference's
    rows: int = 0  # of logits

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN is above any bound

    def covers(self, variant: str, point: str) -> bool:
        return self.variant == variant and self.point in (None, point)


Tokens = Sequence[Sequence[int]]  # of each request


def compare(variant: str, point: str, right: Tokens, found: Tokens, against: str = "") -> Gate:
    """Compares two outputs request by request. Both must hold the same requests in the same order."""
    if len(right) != len(found):
        raise ValueError(f"{len(found)} outputs cannot be compared with {len(right)}")
    equal = total = 0
    first: Difference | None = None
    for index, (expected, got) in enumerate(zip(right, found, strict=True)):
        position = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, got, strict=False)))
        equal += position
        total += len(expected)
        if first is None and (position < len(expected) or position < len(got)):
            first = Difference(index, position, *(dict(enumerate(each)).get(position) for each in (expected, got)))
    return Gate(variant, point, equal, total, first, against)
