"""Where drafts come from: each request's own index of what came before, or a model on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request
from mini_infer.speculative.ngram import NgramIndex
from mini_infer.speculative.suffix import SuffixCorpora, SuffixProposer
from mini_infer.speculative.synthetic import synthetic_drafts

CORPUS_TOKENS = 200_000  # of finished outputs, kept for the suffix proposer: about 100 MB
INDEXED_TOKENS = 8_192  # of a prompt, its last ones: indexing takes up to 5 us and 500 bytes a token, as others wait


class Index(Protocol):
    """What a request's tokens suggest."""

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def propose(self, k: int) -> Sequence[int]: ...


class Indexed:
    """An index for each request, which is brought up to date when drafts are asked for. Of what there is when they
    are first asked for it holds the last INDEXED_TOKENS.

    Args:
        make: an index of some tokens of a request.
        learn: takes in a request that has ended.
    """

    needs_tokens = True

    def __init__(
        self, make: Callable[[Request, Sequence[int]], Index], learn: Callable[[Request], None] = lambda request: None
    ) -> None:
        self._make, self._learn = make, learn
        self._indexes: dict[Request, tuple[Index, int]] = {}  # with how many tokens it has taken in

    def propose(self, request: Request, length: int) -> Draft:
        known = self._indexes.get(request)
        if known is None:
            index = self._make(request, request.token_ids[-INDEXED_TOKENS:])
        else:
            index = known[0]
            index.extend(request.token_ids[known[1] :])
        self._indexes[request] = (index, request.num_tokens)
        token_ids = index.propose(length)
        return Draft(len(token_ids), token_ids)

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)
        self._learn(request)


def ngram_source(smallest: int, largest: int) -> Indexed:
    """Args: tokens that must match, at least, and those that are tried first."""
    return Indexed(lambda request, token_ids: NgramIndex(token_ids, smallest, largest))


class _Suffix:
    def __init__(self, token_ids: Sequence[int], corpora: SuffixCorpora, salt: str) -> None:
        self._proposer = SuffixProposer(token_ids)
        self._corpora, self._salt = corpora, salt
        self.extend = self._proposer.extend

    def propose(self, k: int) -> Sequence[int]:
        self._proposer.corpus = self._corpora.of(self._salt)
        return self._proposer.propose(k).token_ids


def suffix_source(corpus_tokens: int = CORPUS_TOKENS) -> Indexed:
    """Requests of one `cache_salt` share the outputs of those that have finished, and none with another: how fast
    tokens come would tell what others were answered."""
    corpora = SuffixCorpora(corpus_tokens)
    return Indexed(
        lambda request, token_ids: _Suffix(token_ids, corpora, request.cache_salt),
        lambda request: corpora.add(request.cache_salt, request.output_token_ids),
    )


class MadeUp:
    """Arbitrary tokens, to be accepted at a stated rate."""

    needs_tokens = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, request: Request, length: int) -> Draft:
        return Draft(length, synthetic_drafts(request.seed, request.num_tokens, length, self._vocab_size))

    def forget(self, request: Request) -> None:
        pass


class OnDevice:
    """A draft model writes them there."""

    needs_tokens = False

    def propose(self, request: Request, length: int) -> Draft:
        return Draft(length)

    def forget(self, request: Request) -> None:
        pass
