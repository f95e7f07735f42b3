"""Drafts that are looked up: an index of each request's tokens, brought up to date when drafts are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request
from mini_infer.speculative.proposers import Proposer
from mini_infer.speculative.proposers.suffix import FinishedOutputs, SuffixIndex

OUTPUT_TOKENS = 200_000  # of finished requests, kept for the suffix proposer: about 80 MB
INDEXED_TOKENS = 8_192  # of a prompt, its last ones: indexing takes some 2 us and 400 bytes a token, as others wait


class NgramIndex:
    """The n-grams of min_n to max_n tokens in one request's prompt and output, and what followed them last (Saxena
    2023, "Prompt Lookup Decoding"). Nothing is searched when proposing."""

    def __init__(self, token_ids: Sequence[int], min_n: int, max_n: int) -> None:
        self._tokens: list[int] = []
        # By size, the longest first: n-gram -> the place behind its latest occurrence that something follows.
        self._places: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(max_n, min_n - 1, -1)}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens: of the prompt, or accepted ones."""
        tokens = self._tokens
        before = len(tokens)
        tokens.extend(token_ids)
        for n, places in self._places.items():
            for place in range(max(before, n), len(tokens)):
                places[tuple(tokens[place - n : place])] = place

    def propose(self, k: int) -> list[int]:
        """The k tokens behind the latest earlier occurrence of the longest suffix that has one; none where no suffix of
        min_n tokens came before. Where the end is nearer than that, the draft goes on in itself, as a period does."""
        tokens = self._tokens
        for n, places in self._places.items():
            place = places.get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if place is not None:
                repeated = tokens[place : place + k]
                while len(repeated) < k:
                    repeated += repeated[: k - len(repeated)]
                return repeated
        return []


Index = NgramIndex | SuffixIndex  # of one request; never told of drafts, so that a rejected one leaves nothing


class LookupProposer(Proposer):
    """`make` makes an index of the last tokens of a request; `learn` takes in a request that has ended."""

    needs_tokens = True

    def __init__(
        self, make: Callable[[Request, Sequence[int]], Index], learn: Callable[[Request], None] = lambda request: None
    ) -> None:
        self._make, self._learn = make, learn
        self._indexes: dict[Request, tuple[Index, int]] = {}  # with how many tokens it has taken in

    def propose(self, request: Request, length: int) -> Draft:
        index, known = self._indexes.get(request, (None, 0))
        if index is None:
            index = self._make(request, request.token_ids[-INDEXED_TOKENS:])
        else:
            index.extend(request.token_ids[known:])
        self._indexes[request] = (index, request.num_tokens)
        token_ids = index.propose(length)
        return Draft(len(token_ids), token_ids)

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)
        self._learn(request)


def ngram_proposer(smallest: int, largest: int) -> LookupProposer:
    return LookupProposer(lambda request, token_ids: NgramIndex(token_ids, smallest, largest))


def suffix_proposer() -> LookupProposer:
    """Requests of one `cache_salt` share the outputs of those that have finished, and none with another: how fast
    tokens come would tell what others were answered."""
    outputs = FinishedOutputs(OUTPUT_TOKENS)
    return LookupProposer(
        lambda request, token_ids: SuffixIndex(token_ids, outputs, request.cache_salt),
        lambda request: outputs.add(request.cache_salt, request.output_token_ids),
    )
