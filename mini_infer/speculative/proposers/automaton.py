"""A suffix automaton with counts: all substrings of a text, and what followed each of them how often.

A state stands for substrings that end at the same places. Its transitions lead on by one token, its link to the longest
of its suffixes that also ends elsewhere (Blumer et al. 1985). It is built in amortised constant time a token, at most
two states each; counting adds a walk along the links from the last `max_match` tokens up, a handful in most texts. On a
CPU, a token takes about 5 microseconds and 500 bytes.

    text  a b c a b          longest suffix that came before: "a b"; it was followed once, by c
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

END = -1  # stands between texts that do not belong together; it is never proposed
_ROOT = 0
_DOUBT = 3.0


class SuffixAutomaton:
    """
    Args:
        max_match: counts are kept for contexts of up to so many tokens.
    """

    def __init__(self, max_match: int = 32) -> None:
        self.max_match = max_match
        # By state, in flat lists: objects would be work for the garbage collector, and refer to each other in circles.
        self.lengths: list[int] = [0]  # of the longest substring that it stands for
        self.links: list[int] = [_ROOT]
        self.transitions: list[dict[int, int]] = [{}]
        self.counts: list[int] = [0]  # places where its substrings end
        self.followed: list[int] = [0]  # those behind which a token stands
        self.likeliest: list[int | None] = [None]  # that token, mostly; of equally frequent ones the latest
        self.repeated = Match(self)  # the longest suffix of the text, within max_match, that came before
        self._last = _ROOT
        self._tail = _ROOT  # the state of the last max_match tokens
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens in the text."""
        return self._num_tokens

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in token_ids:
            self.repeated.follow((token,))
            self._append(token)
            self.repeated.settle()
            self._count(token)
            self._tail = self.repeated.state if self.repeated.length == self.max_match else self._last
            self._num_tokens += 1

    def match(self, token_ids: Iterable[int]) -> Match:
        """The longest suffix of another text that this one holds."""
        match = Match(self)
        match.follow(token_ids)
        return match

    def _append(self, token: int) -> None:
        lengths, links, transitions = self.lengths, self.links, self.transitions
        state = self._last
        new = self._last = self._add(lengths[state] + 1, _ROOT, {}, _ROOT)
        while token not in transitions[state]:
            transitions[state][token] = new
            if state == _ROOT:
                return
            state = links[state]
        target = transitions[state][token]
        if lengths[target] == lengths[state] + 1:
            links[new] = target
            return
        # Of what `target` stands for, only the shorter substrings also end here: they become a state of their own.
        clone = self._add(lengths[state] + 1, links[target], dict(transitions[target]), target)
        links[new] = links[target] = clone
        while transitions[state].get(token) == target:
            transitions[state][token] = clone
            if state == _ROOT:
                return
            state = links[state]

    def _add(self, length: int, link: int, transitions: dict[int, int], like: int) -> int:
        """A state with the counts of another; the root's do not matter here, and are not taken."""
        self.lengths.append(length)
        self.links.append(link)
        self.transitions.append(transitions)
        self.counts.append(self.counts[like] if like else 0)
        self.followed.append(self.followed[like] if like else 0)
        self.likeliest.append(self.likeliest[like] if like else None)
        return len(self.lengths) - 1

    def _count(self, token: int) -> None:
        """`token` has followed all suffixes of the text that was."""
        transitions, counts, likeliest = self.transitions, self.counts, self.likeliest
        state, counted = self._tail, _ROOT
        while True:
            target = transitions[state][token]
            if target != counted:  # several suffixes may lead to one state
                counts[target] += 1
                counted = target
            self.followed[state] += 1
            best = likeliest[state]
            if best != token and (best is None or counts[target] >= counts[transitions[state][best]]):
                likeliest[state] = token
            if state == _ROOT:
                return
            state = self.links[state]


class Continuation(NamedTuple):
    token_ids: list[int]
    expected_accepted: float  # by the estimates of their probabilities


class Match:
    """A substring of an automaton's text, at most max_match tokens long."""

    __slots__ = ("automaton", "length", "state")

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state = _ROOT
        self.length = 0

    def follow(self, token_ids: Iterable[int]) -> None:
        """Goes on to the longest suffix of (substring + tokens) that the text holds, in amortised constant time. What
        the text has gained since the last call counts from here on: a match may be up to max_match tokens late."""
        lengths, links, transitions = self.automaton.lengths, self.automaton.links, self.automaton.transitions
        self.settle()
        state, length = self.state, self.length
        for token in token_ids:
            while state != _ROOT and token not in transitions[state]:
                state = links[state]
                length = lengths[state]
            if token not in transitions[state]:
                continue  # at the root
            state = transitions[state][token]
            length += 1
            if length > self.automaton.max_match:
                length -= 1
                while lengths[links[state]] >= length:
                    state = links[state]
        self.state, self.length = state, length

    def settle(self) -> None:
        """The text may have grown: the state may stand for longer substrings alone by now."""
        lengths, links = self.automaton.lengths, self.automaton.links
        while self.state != _ROOT and lengths[links[self.state]] >= self.length:
            self.state = links[self.state]

    def continuation(self, k: int, min_probability: float) -> Continuation:
        """At most k tokens, each the likeliest behind those before it.

        Where n tokens have followed the context, c of them this one, its probability is estimated as c / (n + 3 /
        length): a context of length l that was seen once is right with l / (l + 3), which holds within 0.1 on Python
        source. The draft ends where the product falls below `min_probability`, or where texts mostly end.
        """
        a = self.automaton
        self.settle()
        state, length = self.state, self.length
        tokens: list[int] = []
        product, expected = 1.0, 0.0
        while len(tokens) < k:
            while state != _ROOT and not a.followed[state]:  # nothing stands behind it: it is the text's end
                state = a.links[state]
                length = a.lengths[state]
            token = a.likeliest[state]
            if state == _ROOT or token is None or token == END:
                break
            target = a.transitions[state][token]
            product *= a.counts[target] / (a.followed[state] + _DOUBT / length)
            if product < min_probability:
                break
            tokens.append(token)
            expected += product
            state, length = target, min(length + 1, a.max_match)
            while a.lengths[a.links[state]] >= length:
                state = a.links[state]
        return Continuation(tokens, expected)
