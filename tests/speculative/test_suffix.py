"""Suffix decoding against brute force: substrings are looked for in the whole text, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.speculative.proposers.automaton import END, Continuation, SuffixAutomaton
from mini_infer.speculative.proposers.suffix import FinishedOutputs, SuffixIndex

texts = st.lists(st.integers(0, 3), max_size=40)


def places(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Behind each occurrence of `part`."""
    n = len(part)
    return [i + n for i in range(len(text) - n + 1) if list(text[i : i + n]) == list(part)]


def longest(text: Sequence[int], context: Sequence[int], max_match: int, followed: bool = False) -> list[int]:
    """Suffix of the context that the text holds; with `followed`, not at its end alone."""
    for n in range(min(max_match, len(context)), 0, -1):
        suffix = list(context[len(context) - n :])
        found = places(text, suffix)
        if any(place < len(text) for place in found) if followed else found:
            return suffix
    return []


def continuation(text: Sequence[int], context: list[int], k: int, bound: float, max_match: int) -> Continuation:
    tokens: list[int] = []
    products: list[float] = []
    while len(tokens) < k:
        context = longest(text, context, max_match, followed=True)
        if not context:
            break
        nexts = [text[place] for place in places(text, context) if place < len(text)]
        # Of equally frequent tokens the latest.
        token = max(set(nexts), key=lambda t: (nexts.count(t), max(i for i, x in enumerate(nexts) if x == t)))
        probability = nexts.count(token) / (len(nexts) + 3 / len(context))
        product = probability * (products[-1] if products else 1)
        if token == END or product < bound:
            break
        tokens.append(token)
        products.append(product)
        context = [*context, token]
    return Continuation(tokens, sum(products))


def close(got: Continuation, expected: Continuation) -> bool:
    return got.token_ids == expected.token_ids and got.expected_accepted == pytest.approx(expected.expected_accepted)


def index_of(text: Sequence[int], outputs: Sequence[Sequence[int]] = (), **options: float) -> SuffixIndex:
    """Of a request whose salt has these finished outputs."""
    return SuffixIndex(text, kept(outputs), **options)


def kept(outputs: Sequence[Sequence[int]], max_tokens: int = 4_000, max_match: int = 32) -> FinishedOutputs:
    finished = FinishedOutputs(max_tokens, max_match)
    for output in outputs:
        finished.add("", output)
    return finished


@given(texts, st.integers(1, 5))
def test_counts_are_those_of_substrings(text: list[int], max_match: int) -> None:
    automaton = SuffixAutomaton(max_match)
    automaton.extend(text)
    for start in range(len(text)):
        for end in range(start + 1, min(len(text), start + max_match) + 1):
            match = automaton.match(text[start:end])
            assert match.length == end - start
            found = places(text, text[start:end])
            assert automaton.counts[match.state] == len(found)
            assert automaton.followed[match.state] == sum(place < len(text) for place in found)


@given(texts, texts, st.integers(1, 5))
def test_a_match_is_the_longest(text: list[int], other: list[int], max_match: int) -> None:
    automaton = SuffixAutomaton(max_match)
    automaton.extend(text)
    match = automaton.match([])
    for n, token in enumerate(other):
        match.follow([token])
        assert match.length == len(longest(text, other[: n + 1], max_match))


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.4]), st.integers(1, 6))
def test_a_request_continues_its_own_text(pieces: list[list[int]], k: int, bound: float, max_match: int) -> None:
    """After each of several extensions."""
    index = SuffixIndex([], kept([], max_match=max_match), min_probability=bound)
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece
        context = longest(text[:-1], text, max_match) if text else []
        expected = continuation(text, context, k, bound, max_match)
        assert close(index._own.repeated.continuation(k, bound), expected)
        assert index.propose(k) == expected.token_ids


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(1, 6), st.integers(1, 6))
def test_a_corpus_continues_what_a_request_ends_with(
    outputs: list[list[int]], prompt: list[int], k: int, max_match: int
) -> None:
    outputs = [output for output in outputs if output]  # of an empty one nothing is kept
    text = [token for output in outputs for token in [*output, END]]
    context = longest(text, prompt, max_match)
    for part in kept(outputs, max_match=max_match).parts(""):
        assert close(part.match(prompt).continuation(k, 0.1), continuation(text, context, k, 0.1, max_match))


@given(st.lists(texts, min_size=2, max_size=4), texts)
def test_a_match_is_late_at_most_by_its_length(outputs: list[list[int]], text: list[int]) -> None:
    """Outputs come while the request goes on; when it has gone on for max_match tokens, it has noticed."""
    finished = kept(outputs[:1], max_match=3)
    index = SuffixIndex([0, 1], finished)
    for output in outputs[1:]:
        index.propose(4)
        index.extend([2])
        finished.add("", output)
    index.extend([*text, 3, 1, 0])
    fresh = SuffixIndex([*text, 3, 1, 0], finished)
    assert [m.length for m in list(index._all_matches())[1:]] == [m.length for m in list(fresh._all_matches())[1:]]


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
    assert index_of(text, min_probability=0.2).propose(3) == [1, 2]
    assert index_of(text, min_probability=0.05).propose(3) == [1, 2, 5]


def test_an_output_that_ended_is_not_gone_on_with() -> None:
    assert index_of([9, 1, 2], [[1, 2, 3], [4, 5, 6]]).propose(4) == [3]


def test_expected_tokens() -> None:
    """Each context was seen once: probabilities are l / (l + 3)."""
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3])
    assert automaton.match([1]).continuation(2, 0.0).expected_accepted == pytest.approx(1 / 4 + 1 / 4 * 2 / 5)


class TestFinishedOutputs:
    def test_the_oldest_go(self) -> None:
        finished = FinishedOutputs(40)
        for output in range(100):
            finished.add("", [output, 200, 201, 202])
            assert len(finished) <= 40
        assert [n for n in range(100) if SuffixIndex([n], finished).propose(1)] == list(range(92, 100))

    def test_there_are_few_parts_of_a_salt(self) -> None:
        finished = FinishedOutputs(40)
        for _ in range(10):
            for length in (1, 9):  # two of which fill no part
                finished.add("", [1] * length)
            assert len(finished.parts("")) <= 4
            assert len(finished) == sum(map(len, finished.parts("")))

    def test_an_output_longer_than_a_part_loses_its_beginning(self) -> None:
        finished = kept([list(range(30))], 40)
        assert len(finished) == 10
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
            parts = [finished.parts(str(salt)) for salt in range(30)]
            assert sum(len(part) for of_salt in parts for part in of_salt) == len(finished) <= 40
        assert [salt for salt, of_salt in enumerate(parts) if of_salt] == list(range(2, 10))

    def test_who_is_served_all_the_time_leaves_others_their_latest(self) -> None:
        finished = FinishedOutputs(40)
        finished.add("rare", [1, 2, 3])
        finished.add("often", [1] * 9)
        assert finished.parts("rare")
        for _ in range(10):
            finished.add("often", [1] * 9)
        assert not finished.parts("rare")
        assert len(finished) == 40

    def test_nothing_is_kept_of_nothing(self) -> None:
        finished = kept([[]], 40)
        assert not finished.parts("")
        assert len(finished) == 0


def test_time_and_states_are_linear() -> None:
    """Whatever the text: one token over and over has the deepest chain of links."""
    for text in ([1] * 5_000, [1, 2] * 2_500, [i * i % 97 for i in range(5_000)]):
        automaton = SuffixAutomaton(max_match=8)
        automaton.extend(text)
        assert len(automaton.lengths) <= 2 * len(text)
        assert sum(map(len, automaton.transitions)) <= 3 * len(text)
