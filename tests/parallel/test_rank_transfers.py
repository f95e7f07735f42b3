"""Copies of blocks on ranks other than 0, which end in an order of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.runtime.executor.plan_ring import Call
from mini_infer.runtime.executor.rank_process import follow


class Rank:
    """A runner whose transfers end when they are asked about, or waited for, and a ring with what rank 0 says."""

    def __init__(self, records: list[Any], asked: dict[bool, list[int]], collected: list[int]) -> None:
        self._records: Iterator[Any] = iter(records)
        self._asked, self._collected = asked, collected
        self.said: list[Any] = []

    def receive(self) -> tuple[int, Any]:
        try:
            return len(self.said), next(self._records)
        except StopIteration:
            raise EOFError from None

    def report(self, number: int, value: int) -> None:
        pass

    def end_transfers(self, wait: bool) -> tuple[int, ...]:
        ended = self._asked[wait][: 1 if wait else None]
        del self._asked[wait][: len(ended)]
        self.said.append(("waits" if wait else "looks", *ended))
        return tuple(ended)

    def launch(self, plan: StepPlan) -> StepPlan:
        self.said.append(plan.step)
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        ended, self._collected = self._collected, []
        return StepResult([], transfers_done=tuple(ended))

    def abort(self) -> None:
        self.said.append("called")


def plan(number: int) -> StepPlan:
    return StepPlan(number)


def said(records: list[Any], asked: dict[bool, list[int]], collected: list[int] | None = None) -> list[Any]:
    rank = Rank(records, asked, collected or [])
    with pytest.raises(EOFError):
        follow(rank, rank, stages=1)  # type: ignore[arg-type]
    return rank.said


def test_a_plan_waits_for_the_transfers_that_have_ended_on_rank_0_and_for_no_others() -> None:
    asked = {False: [1], True: [3, 2]}  # rank 0 says that 2 has ended: here 1 is the first, and 3 the second
    assert said([(plan(0), ()), (plan(1), (2,)), (plan(2), (1,))], asked) == [
        0,
        ("looks", 1),
        ("waits", 3),
        ("waits", 2),
        1,
        2,  # 1 has ended long ago
    ]


def test_what_ended_with_a_step_is_not_waited_for_again() -> None:
    records = [(plan(0), ()), (plan(1), ()), Call("abort", ()), (plan(2), (7,)), (plan(3), (9,))]
    assert said(records, {False: [9], True: []}, [7, 8]) == [0, 1, "called", 2, ("looks", 9), 3]
