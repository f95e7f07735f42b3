"""Who gets drafts, when the next step waits for them, and what is booked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mini_infer import SamplingParams
from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import Request, RequestStatus
from mini_infer.speculative.adapt import Spent
from mini_infer.speculative.proposer import AsManyAsThereAre, NoProposer, Proposer
from mini_infer.speculative.sources import MadeUp, OnDevice, ngram_source


def request(tokens: Sequence[int] = (1, 2, 3, 1, 2), in_flight: int = 1, constrained: bool = False) -> Request:
    made = Request("r", tokens, SamplingParams(), max_total_tokens=100, seed=5)
    made.num_in_flight = in_flight
    made.constraint = object() if constrained else None  # type: ignore[assignment]
    return made


class Chosen:
    """Lengths that a test has chosen."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.booked: list[tuple[list[int], list[int]]] = []
        self.spent: list[Spent] = []

    def choose(self, requests: Sequence[object], limits: Sequence[int], prompts: bool = False) -> list[int]:
        return [min(length, limit) for length, limit in zip(self.lengths, limits, strict=False)]

    def book(self, requests: Sequence[object], drafted: Sequence[int], accepted: Sequence[int], spent: Spent) -> None:
        self.booked.append((list(drafted), list(accepted)))
        self.spent.append(spent)

    def forget(self, request: object) -> None:
        self.forgotten = request


def test_nobody_proposes_by_default() -> None:
    assert not NoProposer.waits
    assert not NoProposer.keeps_up
    assert not NoProposer.needs_tokens
    assert NoProposer().propose([request()]) == {}


def test_drafts_are_what_came_after_the_last_tokens() -> None:
    proposer = Proposer(ngram_source(2, 3), AsManyAsThereAre(), most=2)
    none, some = request((1, 2, 3)), request()
    assert proposer.propose([none, some]) == {1: Draft(2, [3, 1])}
    some.token_ids += [3, 1, 2]
    some.num_tokens += 3
    assert proposer.propose([some]) == {0: Draft(2, [3, 1])}


def test_a_grammar_gets_no_drafts() -> None:
    proposer = Proposer(ngram_source(2, 3), AsManyAsThereAre(), most=2)
    assert proposer.propose([request(constrained=True)]) == {}
    assert not proposer.waits


def test_with_tokens_under_way_the_next_step_waits_for_those_that_are_looked_up() -> None:
    proposer = Proposer(ngram_source(2, 3), AsManyAsThereAre(), most=2)
    assert proposer.needs_tokens
    assert not proposer.waits
    assert proposer.propose([request(), request(in_flight=2)]) == {}
    assert proposer.waits
    assert proposer.propose([request()]) == {0: Draft(2, [3, 1])}


@pytest.mark.parametrize("source", [OnDevice(), MadeUp(vocab_size=50)])
def test_who_needs_no_tokens_waits_for_none(source: OnDevice | MadeUp) -> None:
    proposer = Proposer(source, AsManyAsThereAre(), most=3)
    assert not proposer.needs_tokens
    drafts = proposer.propose([request(), request(in_flight=5)])
    assert [draft.length for draft in drafts.values()] == [3, 3]
    assert proposer.keeps_up
    assert not proposer.waits


@pytest.mark.parametrize("source", [OnDevice(), ngram_source(2, 3)])
def test_a_batch_that_is_gone_decides_nothing(source: OnDevice) -> None:
    proposer = Proposer(source, AsManyAsThereAre(), most=3)
    assert proposer.propose([request()])
    assert proposer.propose([]) == {}
    assert not proposer.waits
    assert not proposer.keeps_up


def test_where_drafts_do_not_pay_nothing_waits() -> None:
    lengths = Chosen(0, 0)
    proposer = Proposer(OnDevice(), lengths, most=3)
    assert proposer.propose([request(), request()]) == {}
    assert not proposer.waits
    assert not proposer.keeps_up
    lengths.lengths = (0, 2)
    assert proposer.propose([request(), request()]) == {1: Draft(2)}


def plan(counts: Sequence[int] = (1,), prompts: int = 0, keeps_up: bool = False) -> StepPlan:
    rows = len(counts)
    return StepPlan(
        0,
        list(range(rows)),
        [4] * rows,
        list(counts),
        [True] * rows,
        num_decode_rows=rows - prompts,
        num_drafts=sum(counts[: rows - prompts]) - (rows - prompts),
        keeps_up=keeps_up,
    )


def test_lookups_and_waiting_in_vain_are_booked_with_their_step() -> None:
    lengths = Chosen(2)
    proposer = Proposer(ngram_source(2, 3), lengths, most=3, waiting_cost=0.25)
    assert proposer.propose([request((1, 2, 3))]) == {}
    proposer.book([(request(), 0)], plan(keeps_up=True), StepResult([[1]]))
    assert proposer.propose([request()]) == {0: Draft(2, [3, 1])}
    proposer.book([(request(), 0)], plan([3]), StepResult([[1]]))
    proposer.book([(request(), 0)], plan(), StepResult([[1]]))
    assert [spent.waited for spent in lengths.spent] == [0.25, 0, 0]
    assert [spent.host_s > 0 for spent in lengths.spent] == [True, True, False]
    assert [spent.speculative for spent in lengths.spent] == [True, True, False]


def test_what_nobody_waits_for_costs_no_time() -> None:
    lengths = Chosen(2)
    proposer = Proposer(OnDevice(), lengths, most=3, waiting_cost=0.25)
    proposer.propose([request()])
    proposer.book([(request(), 0)], plan([3]), StepResult([[1]], draft_s=0.5), seconds=2.0)
    assert lengths.spent == [Spent(2.0, draft_s=0.5)]


def test_steps_with_prompts_or_with_somebody_who_has_ended_compare_with_none() -> None:
    lengths = Chosen()
    proposer = Proposer(OnDevice(), lengths, most=3)
    gone = request()
    gone.status = RequestStatus.finished
    rows = [(request(), 0), (request(), 0)]
    proposer.book(rows, plan([1, 1]), StepResult([[1], [1]]), seconds=2.0)
    proposer.book(rows, plan([1, 9], prompts=1), StepResult([[1], [1]]), seconds=2.0)
    proposer.book(rows[:1], plan([9], prompts=1), StepResult([[1]]), seconds=2.0)
    proposer.book([(request(), 0), (gone, 0)], plan([1, 1]), StepResult([[1], [1]]), seconds=2.0)
    assert [spent.seconds for spent in lengths.spent] == [2.0, None, None, None]


def test_running_requests_that_are_left_are_booked() -> None:
    lengths = Chosen()
    proposer = Proposer(OnDevice(), lengths, most=3)
    gone, left, new = request(), request(), request()
    gone.status = RequestStatus.finished
    proposer.book([(gone, 0), (left, 0), (new, 0)], plan([1, 4, 5], prompts=1), StepResult([[1], [1, 2, 3], [4]]))
    assert lengths.booked == [([3], [2])]
    proposer.forget(left)
    assert lengths.forgotten is left
