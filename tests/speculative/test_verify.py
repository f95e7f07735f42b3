"""What verification draws: the target's distribution, to the sampling noise; wrong samplers do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from markov import FIRST_TOKEN, Run, parameters, probabilities, speculate, table, z_of_next, z_of_pairs
from torch import Tensor

from mini_infer.core.request import SamplingParams
from mini_infer.core.uniforms import ACCEPT, DRAFT, SYNTHETIC, hash_seeds, uniforms
from mini_infer.kernels.sampling.draw import invert
from mini_infer.runtime.worker.model_runner import keep_accepted
from mini_infer.speculative import verify
from mini_infer.speculative.verify import NO_DRAFT, verify_tokens

VOCAB = 8
TARGET, DRAFTER = table(VOCAB, 1), table(VOCAB, 1) + table(VOCAB, 2, 0.8)
GUESS = DRAFTER.argmax(1)
PLAIN, GREEDY = SamplingParams(), SamplingParams(temperature=0)
PARAMS = {
    "plain": PLAIN,
    "cold": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.3, top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.15),
    "all": SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
class TestDistribution:
    def test_drafts_from_a_model(self, params: SamplingParams) -> None:
        check(speculate(TARGET, params, verify_tokens, draft=DRAFTER), params)

    def test_drafts_that_are_certain(self, params: SamplingParams) -> None:
        check(speculate(TARGET, params, verify_tokens, guess=GUESS), params)

    def test_drafts_by_the_same_uniforms(self, params: SamplingParams) -> None:
        check(speculate(TARGET, params, verify_tokens, draft=DRAFTER, same_uniform=True), params)


def check(run: Run, params: SamplingParams) -> None:
    exact = probabilities(TARGET, params)
    assert 0 < run.accepted < run.drafted
    assert abs(z_of_next(run.tokens, exact)) < 4
    assert abs(z_of_pairs(run.tokens, exact)) < 4


@pytest.mark.parametrize("width", [5, 11])
def test_a_draft_with_another_vocabulary(width: int) -> None:
    """Narrower, and wider: then some of what it proposes does not exist."""
    draft = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(4))
    check(speculate(TARGET, PLAIN, verify_tokens, draft=draft), PLAIN)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    run = speculate(TARGET, PLAIN, verify_tokens, draft=TARGET)
    assert run.accepted == run.drafted
    assert abs(z_of_pairs(run.tokens, probabilities(TARGET, PLAIN))) < 4


def test_no_sampler_accepts_more() -> None:
    """The first draft with probability sum(min(p, q)), as much as any exact sampler can."""
    run = speculate(TARGET, PLAIN, verify_tokens, draft=DRAFTER)
    p, q = (probabilities(logits, PLAIN)[FIRST_TOKEN] for logits in (TARGET, DRAFTER))
    assert run.first_accepted == pytest.approx(np.minimum(p, q).sum(), abs=0.014)  # 4 standard deviations
    certain = speculate(TARGET, PLAIN, verify_tokens, guess=GUESS)
    assert certain.first_accepted == pytest.approx(p[GUESS[FIRST_TOKEN]], abs=0.014)


# --------------------------------------------------------------------------------------------------- wrong samplers

Judge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
judge: Judge = verify._judge


def stands(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor) -> Tensor:
    return (accepting * q.gather(1, drafts[:, None]) < p.gather(1, drafts[:, None])).squeeze(1)


def without_residual(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    return torch.where(stands(p, q, drafts, accepting), drafts, invert(p.long(), u))


def residual_not_renormalised(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    cdf = (p - q).clamp(min=0).cumsum(1)
    token = torch.searchsorted(cdf, u * p.sum(1, keepdim=True), right=True).squeeze(1).clamp(max=p.shape[1] - 1)
    return torch.where(stands(p, q, drafts, accepting), drafts, token)


def residual_of_absolute_differences(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    return torch.where(stands(p, q, drafts, accepting), drafts, invert((p - q).abs().long(), u))


def q_of_the_next_position(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    return judge(p, q.roll(-1, 0), drafts, accepting, u)


def p_of_the_position_before(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    accepted = stands(p.roll(1, 0), q, drafts, accepting)
    return torch.where(accepted, drafts, invert((p - q).clamp(min=0).long(), u))


def one_uniform_for_both(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    return judge(p, q, drafts, accepting, accepting)


def everything_accepted(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    return drafts


def a_little_generous(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
    return judge(p, q, drafts, accepting * 0.9, u)


@pytest.mark.parametrize(
    "wrong",
    [
        without_residual,
        residual_not_renormalised,
        residual_of_absolute_differences,
        q_of_the_next_position,
        p_of_the_position_before,
        one_uniform_for_both,
        everything_accepted,
        a_little_generous,
    ],
)
def test_chi_square_notices_a_wrong_sampler(wrong: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_judge", wrong)
    tokens = speculate(TARGET, PLAIN, verify_tokens, draft=DRAFTER).tokens
    exact = probabilities(TARGET, PLAIN)
    assert z_of_next(tokens, exact) > 6
    assert z_of_pairs(tokens, exact) > 6


def test_pairs_notice_what_the_next_token_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that is right at every first draft and wrong at every second."""

    def later_wrong(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, u: Tensor) -> Tensor:
        return torch.where(torch.arange(len(drafts)) % 2 == 1, drafts, judge(p, q, drafts, accepting, u))

    monkeypatch.setattr(verify, "_judge", later_wrong)
    tokens = speculate(TARGET, PLAIN, verify_tokens, draft=DRAFTER).tokens
    exact = probabilities(TARGET, PLAIN)
    assert abs(z_of_next(tokens, exact)) < 4
    assert z_of_pairs(tokens, exact) > 6


def test_chi_square_notices_a_shared_stream() -> None:
    """Drafts drawn by the tokens' own uniforms must not be judged by their distribution."""
    shifted = speculate(TARGET, PLAIN, without_offset, draft=DRAFTER).tokens
    assert z_of_next(shifted, probabilities(TARGET, PLAIN)) > 6


def without_offset(logits: Tensor, params: Tensor, positions: Tensor, *drafts: Tensor) -> Tensor:
    return verify_tokens(logits, params, positions + DRAFT, *drafts)


# ----------------------------------------------------------------------------------------------------- what reproduces


@pytest.mark.parametrize("params", [PLAIN, PARAMS["all"], GREEDY], ids=["plain", "all", "greedy"])
@pytest.mark.parametrize("k", [1, 3])
def test_tokens_are_those_without_speculation(params: SamplingParams, k: int) -> None:
    """But for drafts that are judged by their distribution, at a temperature."""
    seeds = np.arange(300)
    alone = speculate(TARGET, params, verify_tokens, guess=GUESS, k=0, length=12, seeds=seeds).tokens
    certain = speculate(TARGET, params, verify_tokens, guess=GUESS, k=k, length=12, seeds=seeds)
    coupled = speculate(TARGET, params, verify_tokens, draft=DRAFTER, same_uniform=True, k=k, length=12, seeds=seeds)
    judged = speculate(TARGET, params, verify_tokens, draft=DRAFTER, k=k, length=12, seeds=seeds).tokens
    assert torch.equal(certain.tokens, alone)
    assert torch.equal(coupled.tokens, alone)
    assert torch.equal(judged, alone) == params.greedy


def test_a_request_reproduces_in_any_batch() -> None:
    together = speculate(TARGET, PLAIN, verify_tokens, draft=DRAFTER, length=9, seeds=np.arange(50)).tokens
    order = np.random.default_rng(0).permutation(50)[:20]
    assert torch.equal(
        speculate(TARGET, PLAIN, verify_tokens, draft=DRAFTER, length=9, seeds=order).tokens, together[order]
    )


def test_a_mixed_batch_is_judged_row_by_row() -> None:
    """Greedy rows, certain drafts, drawn drafts and positions without one, as each would be alone."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 30, generator=generator)
    draft_logits = torch.randn(4, 30, generator=generator)
    params = torch.cat([parameters(p, np.array([i]), 30) for i, p in enumerate([PLAIN, GREEDY, PARAMS["all"]] * 4)])
    positions, drafts = torch.arange(12) + 3, torch.arange(12) % 5
    drafts[::4] = NO_DRAFT
    sources = torch.tensor([-1, 3, 1, -1, -1, 0, -1, 2, -1, -1, -1, -1])
    together = verify_tokens(logits, params, positions, drafts, draft_logits, sources)
    for n in range(12):
        row = slice(n, n + 1)
        q = draft_logits[sources[row]] if sources[n] >= 0 else None
        source = torch.zeros(1, dtype=torch.int64) if sources[n] >= 0 else None
        alone = verify_tokens(logits[row], params[row], positions[row], drafts[row], q, source)
        assert alone == together[n]


def test_streams_do_not_meet() -> None:
    keys = hash_seeds(np.arange(20, dtype=np.uint64))[:, None]
    streams = [uniforms(keys, np.arange(500) + offset).flatten() for offset in (0, DRAFT, ACCEPT, SYNTHETIC)]
    assert len(set(np.concatenate(streams).tolist())) == 4 * 20 * 500
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.04


# ------------------------------------------------------------------------------------------------------------ rows


def test_a_row_ends_at_the_first_that_is_not_its_draft() -> None:
    picked = [5, 6, 7, 8, 1, 2, 9]
    drafts = [5, 6, 0, NO_DRAFT, 3, NO_DRAFT, NO_DRAFT]
    tokens: list[list[int]] = [[] for _ in range(4)]
    keep_accepted(tokens, [0, 0, 0, 0, 1, 1, 3], picked, drafts)
    assert tokens == [[5, 6, 7], [1], [], [9]]


def test_a_token_behind_a_rejected_draft_does_not_count() -> None:
    tokens: list[list[int]] = [[]]
    keep_accepted(tokens, [0, 0, 0], [1, 2, 3], [0, 2, NO_DRAFT])
    assert tokens == [[1]]
