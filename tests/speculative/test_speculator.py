"""Who gets drafts, when the next step waits for them, and what is booked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mini_infer import SamplingParams
from mini_infer.core.plan import Draft, StepPlan, StepResult
from mini_infer.core.request import Request, RequestStatus
from mini_infer.speculative.policy import Drafted, DraftLengthPolicy, StepTime
from mini_infer.speculative.proposers import Proposer
from mini_infer.speculative.proposers.lookup import ngram_proposer
from mini_infer.speculative.proposers.synthetic import SyntheticProposer
from mini_infer.speculative.speculator import NoSpeculation, Speculator


def request(tokens: Sequence[int] = (1, 2, 3, 1, 2), in_flight: int = 1, constrained: bool = False) -> Request:
    made = Request("r", tokens, SamplingParams(), max_total_tokens=100, seed=5)
    made.num_in_flight = in_flight
    made.constraint = object() if constrained else None  # type: ignore[assignment]
    return made


class Chosen(DraftLengthPolicy):
    """Lengths that a test has chosen."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.booked: list[tuple[int, list[Drafted]]] = []
        self.times: list[StepTime] = []

    def choose(self, requests: Sequence[object], limits: Sequence[int], prompts: bool = False) -> list[int]:
        return [min(length, limit) for length, limit in zip(self.lengths, limits, strict=False)]

    def book(self, rows: int, drafts: Sequence[Drafted], time: StepTime) -> None:
        self.booked.append((rows, list(drafts)))
        self.times.append(time)

    def forget(self, request: object) -> None:
        self.forgotten = request


def test_nobody_proposes_by_default() -> None:
    assert not NoSpeculation.waits
    assert not NoSpeculation.keeps_up
    assert not NoSpeculation.needs_tokens
    assert NoSpeculation().plan([request()]) == {}


def test_drafts_are_what_came_after_the_last_tokens() -> None:
    speculator = Speculator(ngram_proposer(2, 3), DraftLengthPolicy(), most=2)
    none, some = request((1, 2, 3)), request()
    assert speculator.plan([none, some]) == {1: Draft(2, [3, 1])}
    some.token_ids += [3, 1, 2]
    some.num_tokens += 3
    assert speculator.plan([some]) == {0: Draft(2, [3, 1])}


def test_a_grammar_gets_no_drafts() -> None:
    speculator = Speculator(ngram_proposer(2, 3), DraftLengthPolicy(), most=2)
    assert speculator.plan([request(constrained=True)]) == {}
    assert not speculator.waits


def test_with_tokens_under_way_the_next_step_waits_for_those_that_are_looked_up() -> None:
    speculator = Speculator(ngram_proposer(2, 3), DraftLengthPolicy(), most=2)
    assert speculator.needs_tokens
    assert not speculator.waits
    assert speculator.plan([request(), request(in_flight=2)]) == {}
    assert speculator.waits
    assert speculator.plan([request()]) == {0: Draft(2, [3, 1])}


@pytest.mark.parametrize("proposer", [Proposer(), SyntheticProposer(vocab_size=50)])
def test_who_needs_no_tokens_waits_for_none(proposer: Proposer | SyntheticProposer) -> None:
    speculator = Speculator(proposer, DraftLengthPolicy(), most=3)
    assert not speculator.needs_tokens
    drafts = speculator.plan([request(), request(in_flight=5)])
    assert [draft.length for draft in drafts.values()] == [3, 3]
    assert speculator.keeps_up
    assert not speculator.waits


@pytest.mark.parametrize("proposer", [Proposer(), ngram_proposer(2, 3)])
def test_a_batch_that_is_gone_decides_nothing(proposer: Proposer) -> None:
    speculator = Speculator(proposer, DraftLengthPolicy(), most=3)
    assert speculator.plan([request()])
    assert speculator.plan([]) == {}
    assert not speculator.waits
    assert not speculator.keeps_up


def test_where_drafts_do_not_pay_nothing_waits() -> None:
    policy = Chosen(0, 0)
    speculator = Speculator(Proposer(), policy, most=3)
    assert speculator.plan([request(), request()]) == {}
    assert not speculator.waits
    assert not speculator.keeps_up
    policy.lengths = (0, 2)
    assert speculator.plan([request(), request()]) == {1: Draft(2)}


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
    policy = Chosen(2)
    speculator = Speculator(ngram_proposer(2, 3), policy, most=3, waiting_cost=0.25)
    assert speculator.plan([request((1, 2, 3))]) == {}
    speculator.book([request()], plan(keeps_up=True), StepResult([[1]]))
    assert speculator.plan([request()]) == {0: Draft(2, [3, 1])}
    speculator.book([request()], plan([3]), StepResult([[1]]))
    speculator.book([request()], plan(), StepResult([[1]]))
    assert [time.waited for time in policy.times] == [0.25, 0, 0]
    assert [time.host_s > 0 for time in policy.times] == [True, True, False]
    assert [time.speculative for time in policy.times] == [True, True, False]


def test_what_nobody_waits_for_costs_no_time() -> None:
    policy = Chosen(2)
    speculator = Speculator(Proposer(), policy, most=3, waiting_cost=0.25)
    speculator.plan([request()])
    speculator.book([request()], plan([3]), StepResult([[1]], draft_s=0.5), seconds=2.0)
    assert policy.times == [StepTime(2.0, draft_s=0.5)]


def test_steps_with_prompts_or_with_somebody_who_has_ended_compare_with_none() -> None:
    policy = Chosen()
    speculator = Speculator(Proposer(), policy, most=3)
    gone = request()
    gone.status = RequestStatus.finished
    rows = [request(), request()]
    speculator.book(rows, plan([1, 1]), StepResult([[1], [1]]), seconds=2.0)
    speculator.book(rows, plan([1, 9], prompts=1), StepResult([[1], [1]]), seconds=2.0)
    speculator.book(rows[:1], plan([9], prompts=1), StepResult([[1]]), seconds=2.0)
    speculator.book([request(), gone], plan([1, 1]), StepResult([[1], [1]]), seconds=2.0)
    assert [time.seconds for time in policy.times] == [2.0, None, None, None]


def test_running_requests_that_are_left_are_booked() -> None:
    policy = Chosen()
    speculator = Speculator(Proposer(), policy, most=3)
    gone, left, new = request(), request(), request()
    gone.status = RequestStatus.finished
    speculator.book([gone, left, new], plan([1, 4, 5], prompts=1), StepResult([[1], [1, 2, 3], [4]]))
    assert policy.booked == [(1, [(left, 3, 2)])]
    speculator.forget(left)
    assert policy.forgotten is left
