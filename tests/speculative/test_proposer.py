"""Who gets drafts, when the next step waits for them, and what is booked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mini_infer import SamplingParams
from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import Request, RequestStatus
from mini_infer.speculative.proposer import AsManyAsThereAre, NoProposer, Proposer
from mini_infer.speculative.sources import MadeUp, OnDevice, ngram_source, suffix_source


def request(tokens: Sequence[int] = (1, 2, 3, 1, 2), in_flight: int = 1, constrained: bool = False) -> Request:
    made = Request("r", tokens, SamplingParams(), max_total_tokens=100, seed=5)
    made.num_in_flight = in_flight
    made.constraint = object() if constrained else None  # type: ignore[assignment]
    return made


class Chosen:
    """Lengths that a test has chosen."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.paid = 0.0
        self.booked: list[tuple[list[int], list[int]]] = []

    def choose(self, requests: Sequence[object], limits: Sequence[int]) -> list[int]:
        return [min(length, limit) for length, limit in zip(self.lengths, limits, strict=False)]

    def book(self, requests: Sequence[object], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.booked.append((list(drafted), list(accepted)))

    def pay(self, steps: float) -> None:
        self.paid += steps

    def forget(self, request: object) -> None:
        self.forgotten = request


def test_nobody_proposes_by_default() -> None:
    assert not NoProposer.waits
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


def test_with_tokens_under_way_the_next_step_waits() -> None:
    proposer = Proposer(OnDevice(), AsManyAsThereAre(), most=3)
    assert not proposer.waits
    assert proposer.propose([request(), request(in_flight=2)]) == {}
    assert proposer.waits
    assert proposer.propose([request(), request()]) == {0: Draft(3), 1: Draft(3)}
    assert proposer.propose([]) == {}
    assert proposer.waits, "nobody runs: nothing is known"


def test_where_drafts_do_not_pay_nothing_waits() -> None:
    lengths = Chosen(0, 0)
    proposer = Proposer(OnDevice(), lengths, most=3)
    assert proposer.propose([request(), request()]) == {}
    assert not proposer.waits
    lengths.lengths = (0, 2)
    assert proposer.propose([request(), request()]) == {1: Draft(2)}


def test_waiting_in_vain_is_paid_for() -> None:
    lengths = Chosen(2)
    proposer = Proposer(ngram_source(2, 3), lengths, most=3, waiting_cost=0.25)
    assert proposer.propose([request((1, 2, 3))]) == {}
    assert lengths.paid == 0.25
    assert proposer.propose([request()]) == {0: Draft(2, [3, 1])}
    assert lengths.paid == 0.25


def test_running_requests_that_are_left_are_booked() -> None:
    lengths = Chosen()
    proposer = Proposer(OnDevice(), lengths, most=3)
    gone, left, new = request(), request(), request()
    gone.status = RequestStatus.finished
    plan = StepPlan(0, [0, 1, 2], [4, 4, 0], [1, 4, 5], [True] * 3, num_decode_rows=2, num_drafts=3)
    proposer.book([(gone, 0), (left, 0), (new, 0)], plan, StepResult([[1], [1, 2, 3], [4]]))
    assert lengths.booked == [([3], [2])]
    proposer.forget(left)
    assert lengths.forgotten is left


def test_a_finished_output_helps_the_next() -> None:
    source = suffix_source()
    first, second = request([9, 8]), request([7, 8])
    first.token_ids += [11, 12, 13, 14, 11, 12, 13]
    first.num_tokens = len(first.token_ids)
    source.forget(first)
    second.token_ids += [11, 12]
    second.num_tokens = 4
    assert list(source.propose(second, 2).token_ids)[:1] == [13]


@pytest.mark.parametrize("length", [1, 4])
def test_made_up_drafts_are_the_same_each_time(length: int) -> None:
    source = MadeUp(vocab_size=50)
    draft = source.propose(request(), length)
    assert draft == source.propose(request(), length)
    assert draft.length == len(draft.token_ids) == length
    assert all(0 <= token < 50 for token in draft.token_ids)
