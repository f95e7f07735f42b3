"""Suffix decoding: the likeliest continuation of what the text ends with, by counts of what followed it before.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975). There, suffix trees; here, suffix automata
(automaton.py): one of a request's own prompt and output, and some that requests share, of the outputs of those that
have finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from mini_infer.speculative.automaton import END, Match, SuffixAutomaton


class Proposal(NamedTuple):
    token_ids: list[int]
    probabilities: list[float]  # estimated: of each token, if those before it are right

    @property
    def expected(self) -> float:
        """Tokens that are accepted, on average."""
        return sum(accumulate(self.probabilities, mul))


NOTHING = Proposal([], [])


class SuffixCorpus:
    """Outputs of finished requests, within bounded memory.

    They are kept in automata of max_tokens / 4 tokens each, and the oldest of them goes, with all that is in it, when a
    fifth would begin: an automaton cannot forget a part of what it has read. So the latest outputs are kept, up to
    max_tokens and, unless they are nearly as long as a part, no fewer than about three quarters of it. Nothing is ever
    built anew.

    Args:
        max_tokens: kept at most. A token takes about 500 bytes.
        max_match: tokens of context that are told apart.
    """

    NUM_PARTS = 4

    def __init__(self, max_tokens: int, max_match: int = 32) -> None:
        if max_tokens < self.NUM_PARTS:
            raise ValueError(f"a corpus holds at least {self.NUM_PARTS} tokens, got max_tokens={max_tokens}")
        self.max_match = max_match
        self._part_tokens = max_tokens // self.NUM_PARTS
        self.parts: deque[SuffixAutomaton] = deque(maxlen=self.NUM_PARTS)

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's output, or the end of one that is longer than a part."""
        kept = [*token_ids[-(self._part_tokens - 1) :], END] if self._part_tokens > 1 else [END]
        if not self.parts or len(self.parts[-1]) + len(kept) > self._part_tokens:
            self.parts.append(SuffixAutomaton(self.max_match))
        self.parts[-1].extend(kept)

    def __len__(self) -> int:
        """Tokens kept, the end of each output among them."""
        return sum(map(len, self.parts))


class SuffixCorpora:
    """A corpus for each of those who may not see each other's outputs, within one bound for all of them.

    Whose corpus was added to longest ago loses its oldest part first, and is gone with its last.

    Args:
        max_tokens, max_match: as of SuffixCorpus.
    """

    def __init__(self, max_tokens: int, max_match: int = 32) -> None:
        self._max_tokens, self._max_match = max_tokens, max_match
        self._corpora: dict[str, SuffixCorpus] = {}  # in the order in which they were added to
        self._num_tokens = 0

    def of(self, salt: str) -> SuffixCorpus | None:
        return self._corpora.get(salt)

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's output."""
        if not token_ids:
            return
        corpus = self._corpora.pop(salt, None) or SuffixCorpus(self._max_tokens, self._max_match)
        self._num_tokens -= len(corpus)
        corpus.add(token_ids)
        self._num_tokens += len(corpus)
        self._corpora[salt] = corpus
        while self._num_tokens > self._max_tokens:
            oldest = next(iter(self._corpora))
            self._num_tokens -= len(self._corpora[oldest].parts.popleft())
            if not self._corpora[oldest].parts:
                del self._corpora[oldest]

    def __len__(self) -> int:
        """Tokens kept, the end of each output among them."""
        return self._num_tokens


class SuffixProposer:
    """One request's prompt and output, beside a corpus that requests share, and that may be exchanged.

    Args:
        min_probability: a draft ends where the estimated probability that all of it is right falls below this.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        corpus: SuffixCorpus | None = None,
        min_probability: float = 0.1,
        max_match: int = 32,
    ) -> None:
        self.min_probability = min_probability
        self._own = SuffixAutomaton(max_match)
        self.corpus = corpus
        self._recent: deque[int] = deque(maxlen=max_match)
        self._matches: dict[SuffixAutomaton, Match] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens: of the prompt, or accepted ones."""
        self._own.extend(token_ids)
        self._recent.extend(token_ids)
        for match in self._matches.values():
            match.follow(token_ids)

    def propose(self, k: int) -> Proposal:
        """At most k tokens; none where nothing matches. Of the continuations in the request's own text and in each part
        of the corpus, the one that promises most accepted tokens."""
        proposals = (match.continuation(k, self.min_probability) for match in self._all_matches())
        return max((Proposal(*proposal) for proposal in proposals), key=lambda p: p.expected, default=NOTHING)

    def _all_matches(self) -> Iterable[Match]:
        parts = [] if self.corpus is None else self.corpus.parts
        if list(self._matches) != list(parts):
            self._matches = {part: self._matches.get(part) or part.match(self._recent) for part in parts}
        return self._own.repeated, *self._matches.values()
