"""Drafts that are looked up: an index of each request's tokens, brought up to date when drafts are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request
from mini_infer.speculative.proposers import Proposer
from mini_infer.speculative.proposers.ngram import NgramIndex
from mini_infer.speculative.proposers.suffix import FinishedOutputs, SuffixIndex

OUTPUT_TOKENS = 200_000  # of finished requests, kept for the suffix proposer: about 100 MB
INDEXED_TOKENS = 8_192  # of a prompt, its last ones: indexing takes up to 5 us and 500 bytes a token, as others wait


Index = (
    NgramIndex | SuffixIndex
)  # of one request's tokens. It is never told of drafts, so a rejected one leaves nothing


class LookupProposer(Proposer):
    """
    Args:
        make: an index of the last tokens of a request.
        learn: takes in a request that has ended.
    """

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
        elif known < request.num_tokens:
            index.extend(request.token_ids[known:])
        self._indexes[request] = (index, request.num_tokens)
        token_ids = index.propose(length)
        return Draft(len(token_ids), token_ids)

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)
        self._learn(request)


def ngram_proposer(smallest: int, largest: int) -> LookupProposer:
    """Args: tokens that must match, at least, and those that are tried first."""
    return LookupProposer(lambda request, token_ids: NgramIndex(token_ids, smallest, largest))


def suffix_proposer(output_tokens: int = OUTPUT_TOKENS) -> LookupProposer:
    """Requests of one `cache_salt` share the outputs of those that have finished, and none with another: how fast
    tokens come would tell what others were answered."""
    outputs = FinishedOutputs(output_tokens)
    return LookupProposer(
        lambda request, token_ids: SuffixIndex(token_ids, outputs, request.cache_salt),
        lambda request: outputs.add(request.cache_salt, request.output_token_ids),
    )
