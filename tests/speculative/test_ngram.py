"""Prompt lookup against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mini_infer.speculative.proposers.lookup import NgramIndex

texts = st.lists(st.integers(0, 3), max_size=40)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def looked_up(text: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                going_on = list(text)
                for i in range(k):
                    going_on.append(going_on[start + n + i])
                return going_on[len(text) :]
    return []


@given(st.lists(texts, min_size=1, max_size=4), sizes, st.integers(0, 8))
def test_finds_what_a_search_finds(pieces: list[list[int]], sizes: list[int], k: int) -> None:
    """After each of several extensions."""
    index = NgramIndex([], *sizes)
    text: list[int] = []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.propose(k) == looked_up(text, *sizes, k)


def test_the_longest_suffix_wins_then_the_latest_place() -> None:
    text = [1, 2, 3, 9, 8, 2, 3, 7, 8, 4, 2, 3, 6, 8, 1, 2, 3]
    assert NgramIndex(text, 2, 3).propose(2) == [9, 8]
    assert NgramIndex(text, 2, 2).propose(2) == [6, 8]
    assert NgramIndex(text, 4, 5).propose(2) == []


def test_a_period_goes_on() -> None:
    assert NgramIndex([5, 1, 2, 1, 2], 1, 3).propose(5) == [1, 2, 1, 2, 1]
    assert NgramIndex([7, 7], 1, 1).propose(3) == [7, 7, 7]


def test_memory_is_what_was_entered() -> None:
    """Each token enters one n-gram of each size, when something follows it."""
    index = NgramIndex(range(1_000), 2, 4)
    assert sum(map(len, index._places.values())) == 998 + 997 + 996
