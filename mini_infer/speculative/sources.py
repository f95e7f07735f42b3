"""Where drafts come from: each request's own index of what came before, or a model on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mini_infer.core.plan import Draft
from mini_infer.core.request import Request
from mini_infer.speculative.ngram import NgramIndex
from mini_infer.speculative.suffix import SuffixCorpus, SuffixProposer
from mini_infer.speculative.synthetic import synthetic_drafts

CORPUS_TOKENS = 200_000  # of finished outputs, kept for the suffix proposer: about 100 MB


class Index(Protocol):
    """What a request's tokens suggest."""

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def propose(self, k: int) -> Sequence[int]: ...


class Indexed:
    """An index for each request, which is brought up to date when drafts are asked for.

    Args:
        make: an index of a prompt and output.
        learn: takes in the output of a request that has ended.
    """

    def __init__(self, make: Callable[[Sequence[int]], Index], learn: Callable[[Sequence[int]], None]) -> None:
        self._make, self._learn = make, learn
        self._indexes: dict[Request, tuple[Index, int]] = {}  # with how many tokens it has taken in

    def propose(self, request: Request, length: int) -> Draft:
        known = self._indexes.get(request)
        if known is None:
            index = self._make(request.token_ids)
        else:
            index = known[0]
            index.extend(request.token_ids[known[1] :])
        self._indexes[request] = (index, request.num_tokens)
        token_ids = index.propose(length)
        return Draft(len(token_ids), token_ids)

    def forget(self, request: Request) -> None:
        self._indexes.pop(request, None)
        self._learn(request.output_token_ids)


def ngram_source(smallest: int, largest: int) -> Indexed:
    """Args: tokens that must match, at least, and those that are tried first."""
    return Indexed(lambda token_ids: NgramIndex(token_ids, smallest, largest), lambda output: None)


class _Suffix:
    def __init__(self, token_ids: Sequence[int], corpus: SuffixCorpus) -> None:
        self._proposer = SuffixProposer(token_ids, corpus)
        self.extend = self._proposer.extend

    def propose(self, k: int) -> Sequence[int]:
        return self._proposer.propose(k).token_ids


def suffix_source() -> Indexed:
    corpus = SuffixCorpus(CORPUS_TOKENS)
    return Indexed(lambda token_ids: _Suffix(token_ids, corpus), corpus.add)


class MadeUp:
    """Arbitrary tokens, to be accepted at a stated rate."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, request: Request, length: int) -> Draft:
        return Draft(length, synthetic_drafts(request.seed, request.num_tokens, length, self._vocab_size))

    def forget(self, request: Request) -> None:
        pass


class OnDevice:
    """A draft model writes them there."""

    def propose(self, request: Request, length: int) -> Draft:
        return Draft(length)

    def forget(self, request: Request) -> None:
        pass
