"""Suffix decoding against brute force: substrings are looked for in the whole text, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.speculative.automaton import END, SuffixAutomaton
from mini_infer.speculative.suffix import NOTHING, Proposal, SuffixCorpus, SuffixProposer

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


def continuation(text: Sequence[int], context: list[int], k: int, bound: float, max_match: int) -> Proposal:
    tokens: list[int] = []
    probabilities: list[float] = []
    while len(tokens) < k:
        context = longest(text, context, max_match, followed=True)
        if not context:
            break
        nexts = [text[place] for place in places(text, context) if place < len(text)]
        # Of equally frequent tokens the latest.
        token = max(set(nexts), key=lambda t: (nexts.count(t), max(i for i, x in enumerate(nexts) if x == t)))
        probability = nexts.count(token) / (len(nexts) + 3 / len(context))
        product = list(accumulate([*probabilities, probability], mul))[-1]
        if token == END or product < bound:
            break
        tokens.append(token)
        probabilities.append(probability)
        context = [*context, token]
    return Proposal(tokens, probabilities)


def close(got: Proposal, expected: Proposal) -> bool:
    return got.token_ids == expected.token_ids and got.probabilities == pytest.approx(expected.probabilities)


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
    proposer = SuffixProposer([], None, bound, max_match)
    text: list[int] = []
    for piece in pieces:
        proposer.extend(piece)
        text += piece
        context = longest(text[:-1], text, max_match) if text else []
        assert close(proposer.propose(k), continuation(text, context, k, bound, max_match))


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(1, 6), st.integers(1, 6))
def test_a_corpus_continues_what_a_request_ends_with(
    outputs: list[list[int]], prompt: list[int], k: int, max_match: int
) -> None:
    corpus = SuffixCorpus(4_000, max_match)
    for output in outputs:
        corpus.add(output)
    text = [token for output in outputs for token in [*output, END]]
    context = longest(text, prompt, max_match)
    match = corpus.parts[0].match(prompt)
    assert close(Proposal(*match.continuation(k, 0.1)), continuation(text, context, k, 0.1, max_match))


@given(st.lists(texts, min_size=2, max_size=4), texts)
def test_a_match_is_late_at_most_by_its_length(outputs: list[list[int]], text: list[int]) -> None:
    """Outputs come while the request goes on; when it has gone on for max_match tokens, it has noticed."""
    corpus = SuffixCorpus(4_000, max_match=3)
    corpus.add(outputs[0])
    proposer = SuffixProposer([0, 1], corpus, max_match=3)
    for output in outputs[1:]:
        proposer.propose(4)
        proposer.extend([2])
        corpus.add(output)
    proposer.extend([*text, 3, 1, 0])
    fresh = SuffixProposer([*text, 3, 1, 0], corpus, max_match=3)
    assert [m.length for m in list(proposer._all_matches())[1:]] == [m.length for m in list(fresh._all_matches())[1:]]


def test_the_better_promise_wins() -> None:
    corpus = SuffixCorpus(1_000)
    proposer = SuffixProposer([5, 6, 7, 8, 5, 6], corpus)
    assert proposer.propose(2).token_ids == [7, 8]
    for _ in range(3):
        corpus.add([1, 2, 5, 6, 9, 9, 9])
    assert proposer.propose(3).token_ids == [9, 9, 9]
    assert SuffixProposer([5, 6, 7, 8, 5, 6]).propose(2).token_ids == [7, 8]


def test_nothing_matches() -> None:
    assert SuffixProposer([]).propose(4) == NOTHING
    assert SuffixProposer([1, 2, 3], SuffixCorpus(100)).propose(4) == NOTHING


def test_a_period_goes_on() -> None:
    assert SuffixProposer([1, 2] * 10).propose(5).token_ids == [1, 2, 1, 2, 1]


def test_a_draft_ends_where_it_is_probably_wrong() -> None:
    text = [7, 1, 2, 3, 7, 1, 2, 4, 7, 1, 2, 5, 7]
    assert SuffixProposer(text, min_probability=0.2).propose(3).token_ids == [1, 2]
    assert SuffixProposer(text, min_probability=0.05).propose(3).token_ids == [1, 2, 5]


def test_an_output_that_ended_is_not_gone_on_with() -> None:
    corpus = SuffixCorpus(1_000)
    corpus.add([1, 2, 3])
    corpus.add([4, 5, 6])
    assert SuffixProposer([9, 1, 2], corpus).propose(4).token_ids == [3]


def test_expected_tokens() -> None:
    assert Proposal([1, 2], [0.5, 0.4]).expected == pytest.approx(0.5 + 0.2)


class TestEviction:
    def test_the_oldest_go(self) -> None:
        corpus = SuffixCorpus(40)
        for output in range(100):
            corpus.add([output, 200, 201, 202])
            assert len(corpus) <= 40
        kept = [n for n in range(100) if SuffixProposer([n], corpus).propose(1).token_ids]
        assert kept == list(range(92, 100))

    def test_an_output_longer_than_a_part_loses_its_beginning(self) -> None:
        corpus = SuffixCorpus(40)
        corpus.add(list(range(30)))
        assert len(corpus) == 10
        assert SuffixProposer([5], corpus).propose(1) == NOTHING
        assert SuffixProposer([25], corpus).propose(2).token_ids == [26, 27]

    def test_requests_let_go_of_what_is_gone(self) -> None:
        corpus = SuffixCorpus(40)
        corpus.add([1, 2, 3])
        proposer = SuffixProposer([1], corpus)
        assert proposer.propose(1).token_ids == [2]
        for _ in range(10):
            corpus.add([7] * 9)
        assert proposer.propose(1) == NOTHING


def test_time_and_states_are_linear() -> None:
    """Whatever the text: one token over and over has the deepest chain of links."""
    for text in ([1] * 5_000, [1, 2] * 2_500, [i * i % 97 for i in range(5_000)]):
        automaton = SuffixAutomaton(max_match=8)
        automaton.extend(text)
        assert len(automaton.lengths) <= 2 * len(text)
        assert sum(map(len, automaton.transitions)) <= 3 * len(text)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_match must be at least 1"):
        SuffixAutomaton(0)
    with pytest.raises(ValueError, match="max_tokens=3"):
        SuffixCorpus(3)
