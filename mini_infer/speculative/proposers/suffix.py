"""Suffix decoding: the likeliest continuation of what the text ends with, by counts of what followed it before.

After SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), with tables of contexts of a few lengths in place of suffix
trees: one of a request's own prompt and output, and some of the outputs of finished requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

END = -1  # follows an output's last token; it is never proposed
_LENGTHS = (5, 3, 2, 1)  # of contexts: a longer one predicts hardly better
_LATEST = 4  # tokens that are kept of those that followed a context
_DOUBT = 3.0


class Followers:
    """What followed each context, the latest last: some 2 microseconds and 400 bytes a token."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, ...], tuple[int, ...]] = {}  # tuples, which are no work for the garbage collector

    def count(self, text: Sequence[int], first: int = 0) -> None:
        """Takes in the tokens of a text from `first` on, each behind those before it."""
        start = max(0, first - _LENGTHS[0])
        recent, known = tuple(text[start:]), self._tokens
        for place in range(first - start, len(recent)):
            for length in _LENGTHS:
                if length <= place:
                    context = recent[place - length : place]
                    known[context] = (*known.get(context, ())[1 - _LATEST :], recent[place])

    def continuation(self, text: Sequence[int], k: int, min_probability: float) -> tuple[list[int], float]:
        """At most k tokens, each the likeliest behind those before it, and how many are expected to be accepted.

        Where c of the latest n tokens behind the longest known context were this one, its probability is estimated as
        c / (n + 3 / length): a context of length l that was seen once is right with l / (l + 3), which holds within 0.1
        on Python source. The draft ends where the product falls below `min_probability`, or where texts mostly end.
        """
        context = tuple(text[-_LENGTHS[0] :])
        drafts: list[int] = []
        product, expected = 1.0, 0.0
        while len(drafts) < k:
            for length in _LENGTHS:
                tokens = self._tokens.get(context[-length:], ())
                if tokens and length <= len(context):
                    break
            else:
                break
            token = max(reversed(tokens), key=tokens.count)  # of equally frequent ones the latest
            product *= tokens.count(token) / (len(tokens) + _DOUBT / length)
            if token == END or product < min_probability:
                break
            drafts.append(token)
            expected += product
            context = (*context[1 - _LENGTHS[0] :], token)
        return drafts, expected


class FinishedOutputs:
    """The latest outputs of finished requests by salt: only requests of the same salt see each other's.

    A table cannot forget a part of what it has counted. So there are two generations of them, of max_tokens / 2 tokens
    each, and the older one goes when a third would begin.
    """

    def __init__(self, max_tokens: int) -> None:
        self._capacity = max_tokens // 2
        self._generations: deque[dict[str, Followers]] = deque([{}], maxlen=2)
        self._num_tokens = 0  # of the latest generation

    def tables(self, salt: str) -> Iterable[Followers]:
        return [tables[salt] for tables in self._generations if salt in tables]

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's output, or the end of one that is longer than a generation."""
        kept = [*token_ids[1 - self._capacity :], END]
        if self._num_tokens + len(kept) > self._capacity:
            self._generations.append({})
            self._num_tokens = 0
        self._num_tokens += len(kept)
        self._generations[-1].setdefault(salt, Followers()).count(kept)


class SuffixIndex:
    """One request's prompt and output, beside the finished outputs of its salt.

    Args:
        min_probability: a draft ends where the estimated probability that all of it is right falls below this.
    """

    def __init__(
        self, token_ids: Sequence[int], outputs: FinishedOutputs, salt: str = "", min_probability: float = 0.1
    ) -> None:
        self._outputs, self._salt, self._min_probability = outputs, salt, min_probability
        self._text: list[int] = []
        self._own = Followers()
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens: of the prompt, or accepted ones."""
        self._text += token_ids
        self._own.count(self._text, len(self._text) - len(token_ids))

    def propose(self, k: int) -> list[int]:
        """At most k tokens; none where nothing matches. Of the continuations in the request's own text and in the
        finished outputs, the one that promises most accepted tokens."""
        tables = self._own, *self._outputs.tables(self._salt)
        found = [table.continuation(self._text, k, self._min_probability) for table in tables]
        return max(found, key=lambda continuation: continuation[1])[0]
