"""Suffix decoding against brute force: contexts are looked for in the whole text, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.speculative.proposers.suffix import END, FinishedOutputs, Followers, SuffixIndex

texts = st.lists(st.integers(0, 3), max_size=40)
Continuation = tuple[list[int], float]


def continuation(all_texts: Sequence[Sequence[int]], context: Sequence[int], k: int, bound: float) -> Continuation:
    tokens: list[int] = []
    products: list[float] = []
    while len(tokens) < k:
        for n in (5, 3, 2, 1):
            end = [*context, *tokens][-n:]
            nexts = [t[i] for t in all_texts for i in range(n, len(t)) if list(t[i - n : i]) == end][-4:]
            if len(end) == n and nexts:
                break
        else:
            break
        # Of equally frequent tokens the latest.
        token = max(set(nexts), key=lambda t: (nexts.count(t), max(i for i, x in enumerate(nexts) if x == t)))
        product = nexts.count(token) / (len(nexts) + 3 / n) * (products[-1] if products else 1)
        if token == END or product < bound:
            break
        tokens.append(token)
        products.append(product)
    return tokens, sum(products)


def close(got: Continuation, expected: Continuation) -> bool:
    return got[0] == expected[0] and got[1] == pytest.approx(expected[1])


def index_of(text: Sequence[int], outputs: Sequence[Sequence[int]] = ()) -> SuffixIndex:
    """Of a request whose salt has these finished outputs."""
    return SuffixIndex(text, kept(outputs))


def kept(outputs: Sequence[Sequence[int]], max_tokens: int = 4_000) -> FinishedOutputs:
    finished = FinishedOutputs(max_tokens)
    for output in outputs:
        finished.add("", output)
    return finished


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.4]))
def test_a_request_continues_its_own_text(pieces: list[list[int]], k: int, bound: float) -> None:
    """After each of several extensions."""
    index = SuffixIndex([], kept([]))
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece
        expected = continuation([text], text, k, bound)
        assert close(index._own.continuation(text, k, bound), expected)
        assert index.propose(k) == continuation([text], text, k, 0.1)[0]


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(1, 6))
def test_finished_outputs_continue_what_a_request_ends_with(
    outputs: list[list[int]], prompt: list[int], k: int
) -> None:
    finished = kept(outputs)
    ended = [[*output, END] for output in outputs]
    for table in finished.tables(""):
        assert close(table.continuation(prompt, k, 0.1), continuation(ended, prompt, k, 0.1))


def test_outputs_that_finish_meanwhile_count_at_once() -> None:
    finished = kept([])
    index = SuffixIndex([1], finished)
    assert index.propose(1) == []
    finished.add("", [1, 2])
    assert index.propose(1) == [2]


def test_the_better_promise_wins() -> None:
    assert index_of([5, 6, 7, 8, 5, 6]).propose(2) == [7, 8]
    assert index_of([5, 6, 7, 8, 5, 6], [[1, 2, 5, 6, 9, 9, 9]] * 3).propose(3) == [9, 9, 9]


def test_nothing_matches() -> None:
    assert index_of([]).propose(4) == []
    assert index_of([1, 2, 3], [[7, 8]]).propose(4) == []


def test_a_period_goes_on() -> None:
    assert index_of([1, 2] * 10).propose(5) == [1, 2, 1, 2, 1]


def test_a_draft_ends_where_it_is_probably_wrong() -> None:
    text = [7, 1, 2, 3, 7, 1, 2, 4, 7, 1, 2, 5, 7]
    followers = Followers()
    followers.count(text)
    assert followers.continuation(text, 3, 0.2)[0] == [1, 2]
    assert followers.continuation(text, 3, 0.05)[0] == [1, 2, 5]


def test_an_output_that_ended_is_not_gone_on_with() -> None:
    assert index_of([9, 1, 2], [[1, 2, 3], [4, 5, 6]]).propose(4) == [3]


def test_expected_tokens() -> None:
    """Each context was seen once: probabilities are l / (l + 3)."""
    followers = Followers()
    followers.count([1, 2, 3])
    assert followers.continuation([1], 2, 0.0)[1] == pytest.approx(1 / 4 + 1 / 4 * 2 / 5)


def test_what_is_kept_of_a_context_has_a_bound() -> None:
    followers = Followers()
    followers.count([1] * 5_000)
    assert sum(map(len, followers._tokens.values())) == 4 * 4


class TestFinishedOutputs:
    def test_the_oldest_go(self) -> None:
        finished = FinishedOutputs(40)
        for output in range(100):
            finished.add("", [output, 200, 201, 202])  # and its end: four of them make a generation
            known = [n for n in range(100) if SuffixIndex([n], finished).propose(1)]
            assert known == list(range(max(0, output // 4 * 4 - 4), output + 1))

    def test_an_output_longer_than_a_generation_loses_its_beginning(self) -> None:
        finished = kept([list(range(30))], 40)
        assert SuffixIndex([5], finished).propose(1) == []
        assert SuffixIndex([25], finished).propose(2) == [26, 27]

    def test_requests_let_go_of_what_is_gone(self) -> None:
        finished = kept([[1, 2, 3]], 40)
        index = SuffixIndex([1], finished)
        assert index.propose(1) == [2]
        for _ in range(10):
            finished.add("", [7] * 9)
        assert index.propose(1) == []

    def test_one_bound_holds_for_all_salts(self) -> None:
        finished = FinishedOutputs(40)
        for output in range(100):
            finished.add(str(output % 30), [output, 200, 201, 202])
        assert [salt for salt in range(30) if finished.tables(str(salt))] == list(range(2, 10))

    def test_salts_do_not_see_each_other(self) -> None:
        finished = FinishedOutputs(40)
        finished.add("one", [1, 2, 3])
        assert SuffixIndex([1], finished, "one").propose(1) == [2]
        assert SuffixIndex([1], finished, "other").propose(1) == []

    def test_nothing_is_kept_of_nothing(self) -> None:
        assert SuffixIndex([], kept([[]], 40)).propose(3) == []
