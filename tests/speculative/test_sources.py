"""Where drafts come from: what a request sees, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mini_infer import SamplingParams
from mini_infer.core.request import Request
from mini_infer.speculative import sources
from mini_infer.speculative.sources import Indexed, MadeUp, ngram_source, suffix_source
from mini_infer.speculative.suffix import SuffixCorpora


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
    source = suffix_source()
    second = request([7, 8, 11, 12], salt=salts[1])
    if before:
        assert source.propose(second, 2).length == 0
    source.forget(request(*ENDED, salt=salts[0]))
    assert list(source.propose(second, 2).token_ids)[:1] == [13] * helps


class TestSuffixCorpora:
    def test_one_bound_holds_for_all(self) -> None:
        corpora = SuffixCorpora(40)
        for output in range(100):
            corpora.add(str(output % 30), [output, 200, 201, 202])
            kept = [corpora.of(str(salt)) for salt in range(30)]
            assert sum(len(corpus) for corpus in kept if corpus) == len(corpora) <= 40
        assert [salt for salt, corpus in enumerate(kept) if corpus] == list(range(2, 10))

    def test_who_is_served_all_the_time_leaves_others_their_latest(self) -> None:
        corpora = SuffixCorpora(40)
        corpora.add("rare", [1, 2, 3])
        corpora.add("often", [1] * 9)
        assert corpora.of("rare")
        for _ in range(10):
            corpora.add("often", [1] * 9)
        assert corpora.of("rare") is None
        assert len(corpora) == 40

    def test_nothing_is_kept_of_nothing(self) -> None:
        corpora = SuffixCorpora(40)
        corpora.add("aborted", [])
        assert corpora.of("aborted") is None
        assert len(corpora) == 0


@pytest.mark.parametrize("source", [ngram_source(2, 3), suffix_source()])
def test_of_a_long_prompt_the_end_is_indexed(source: Indexed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "INDEXED_TOKENS", 8)
    text = [1, 2, 3, *range(10, 15), 1, 2]
    assert source.propose(request(text), 1).length == 0
    known = request([1, 2, 3, 4, 1, 2])
    assert list(source.propose(known, 1).token_ids) == [3]
    known.token_ids += [5, 6, 7, 8, 9, 3, 4]
    known.num_tokens += 7
    assert list(source.propose(known, 1).token_ids) == [1], "what is accepted since is all kept"


@pytest.mark.parametrize("length", [1, 4])
def test_made_up_drafts_are_the_same_each_time(length: int) -> None:
    source = MadeUp(vocab_size=50)
    draft = source.propose(request([1, 2, 3]), length)
    assert draft == source.propose(request([1, 2, 3]), length)
    assert draft.length == len(draft.token_ids) == length
    assert all(0 <= token < 50 for token in draft.token_ids)
