"""Suffix decoding: the likeliest continuation of what the text ends with, by counts of what followed it before.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), with suffix automata (automaton.py) in place of trees: one
of a request's own prompt and output, and some of the outputs of finished requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from mini_infer.speculative.proposers.automaton import END, Match, SuffixAutomaton

_NUM_PARTS = 4


class FinishedOutputs:
    """Outputs of finished requests by salt, within one bound for all: only requests of the same salt see each other's.

    An automaton cannot forget a part of what it has read. So a salt's outputs are kept in automata of max_tokens / 4
    tokens each, of which the oldest goes when a fifth would begin; where there are too many tokens in all, the salt
    that was added to longest ago loses its oldest.

    Args:
        max_tokens: kept at most, the end of each output among them. A token takes about 500 bytes.
        max_match: tokens of context that are told apart.
    """

    def __init__(self, max_tokens: int, max_match: int = 32) -> None:
        self.max_match = max_match
        self._max_tokens, self._part_tokens = max_tokens, max_tokens // _NUM_PARTS
        self._parts: dict[str, deque[SuffixAutomaton]] = {}  # in the order in which they were added to
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens kept."""
        return self._num_tokens

    def parts(self, salt: str) -> Sequence[SuffixAutomaton]:
        return self._parts.get(salt, ())

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's output, or the end of one that is longer than a part."""
        if not token_ids:
            return
        kept = [*token_ids[1 - self._part_tokens :], END]
        parts = self._parts[salt] = self._parts.pop(salt, deque())
        if not parts or len(parts[-1]) + len(kept) > self._part_tokens:
            parts.append(SuffixAutomaton(self.max_match))
        parts[-1].extend(kept)
        self._num_tokens += len(kept)
        if len(parts) > _NUM_PARTS:
            self._drop_oldest(salt)
        while self._num_tokens > self._max_tokens:
            self._drop_oldest(next(iter(self._parts)))

    def _drop_oldest(self, salt: str) -> None:
        self._num_tokens -= len(self._parts[salt].popleft())
        if not self._parts[salt]:
            del self._parts[salt]


class SuffixIndex:
    """One request's prompt and output, beside the finished outputs of its salt.

    Args:
        min_probability: a draft ends where the estimated probability that all of it is right falls below this.
    """

    def __init__(
        self, token_ids: Sequence[int], outputs: FinishedOutputs, salt: str = "", min_probability: float = 0.1
    ) -> None:
        self._outputs, self._salt, self._min_probability = outputs, salt, min_probability
        self._own = SuffixAutomaton(outputs.max_match)
        self._recent: deque[int] = deque(maxlen=outputs.max_match)
        self._matches: dict[SuffixAutomaton, Match] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens: of the prompt, or accepted ones."""
        self._own.extend(token_ids)
        self._recent.extend(token_ids)
        for match in self._matches.values():
            match.follow(token_ids)

    def propose(self, k: int) -> list[int]:
        """At most k tokens; none where nothing matches. Of the continuations in the request's own text and in each part
        of the finished outputs, the one that promises most accepted tokens."""
        continuations = (match.continuation(k, self._min_probability) for match in self._all_matches())
        return max(continuations, key=lambda continuation: continuation.expected_accepted).token_ids

    def _all_matches(self) -> Iterable[Match]:
        parts = self._outputs.parts(self._salt)
        if list(self._matches) != list(parts):
            self._matches = {part: self._matches.get(part) or part.match(self._recent) for part in parts}
        return self._own.repeated, *self._matches.values()
