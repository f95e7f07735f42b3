"""Where drafts come from: what a request sees, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mini_infer import SamplingParams
from mini_infer.core.request import Request
from mini_infer.speculative.proposers import lookup
from mini_infer.speculative.proposers.lookup import LookupProposer, ngram_proposer, suffix_proposer
from mini_infer.speculative.proposers.synthetic import SyntheticProposer


def request(prompt: Sequence[int], output: Sequence[int] = (), salt: str = "") -> Request:
    made = Request("r", prompt, SamplingParams(), max_total_tokens=100, seed=5, cache_salt=salt)
    made.token_ids += output
    made.num_tokens = len(made.token_ids)
    return made


ENDED = ([9, 8], [11, 12, 13, 14, 11, 12, 13])


@pytest.mark.parametrize(("salts", "helps"), [(("", ""), True), (("a", "a"), True), (("a", "b"), False)])
@pytest.mark.parametrize("before", [False, True])
def test_a_finished_output_helps_those_with_its_salt(salts: tuple[str, str], helps: bool, before: bool) -> None:
    """Whether they have asked before it ended, or not."""
    proposer = suffix_proposer()
    second = request([7, 8, 11, 12], salt=salts[1])
    if before:
        assert proposer.propose(second, 2).length == 0
    proposer.forget(request(*ENDED, salt=salts[0]))
    assert list(proposer.propose(second, 2).token_ids)[:1] == [13] * helps


@pytest.mark.parametrize("proposer", [ngram_proposer(2, 3), suffix_proposer()])
def test_of_a_long_prompt_the_end_is_indexed(proposer: LookupProposer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "INDEXED_TOKENS", 8)
    text = [1, 2, 3, *range(10, 15), 1, 2]
    assert proposer.propose(request(text), 1).length == 0
    known = request([1, 2, 3, 4, 1, 2])
    assert list(proposer.propose(known, 1).token_ids) == [3]
    known.token_ids += [5, 6, 7, 8, 9, 3, 4]
    known.num_tokens += 7
    assert list(proposer.propose(known, 1).token_ids) == [1], "what is accepted since is all kept"


@pytest.mark.parametrize("length", [1, 4])
def test_made_up_drafts_are_the_same_each_time(length: int) -> None:
    proposer = SyntheticProposer(vocab_size=50)
    draft = proposer.propose(request([1, 2, 3]), length)
    assert draft == proposer.propose(request([1, 2, 3]), length)
    assert draft.length == len(draft.token_ids) == length
    assert all(0 <= token < 50 for token in draft.token_ids)
