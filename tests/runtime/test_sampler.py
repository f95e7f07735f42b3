"""Exact against transformers' logits processors, exact in distribution, and blind to the batch around a row."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_infer.core.request import SamplingParams
from mini_infer.runtime.draw import Draw, draw_tokens, hash_seeds, truncate, uniforms
from mini_infer.runtime.sampler import SamplingBatch, SamplingState, sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
GREEDY = SamplingParams(temperature=0)


def build(params, vocab_size, *, seeds=None, positions=None, prompts=None, outputs=None, stop_ids=(), device="cpu"):
    """A state with one request a slot, and the batch of all of them in order."""
    n = len(params)
    prompts, outputs = prompts or [[0]] * n, outputs or [[]] * n
    token_ids = np.zeros((n, 512), np.int32)
    state = SamplingState(n, vocab_size, device)
    for slot, (p, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
        token_ids[slot, : len(prompt) + len(output)] = [*prompt, *output]
        state.admit(slot, p, seeds[slot] if seeds else slot, len(prompt), stop_ids)
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    return state, token_ids, state.batch(range(n), positions or lengths, token_ids)


def pick(logits, params, **kwargs):
    return sample(logits, build(params, logits.shape[1], **kwargs)[2]).token_ids.tolist()


def random_logits(rows, vocab_size, seed=0, scale=3.0, ties=False):
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16().float() if ties else logits


def random_params(rng):
    """Each feature in about half of the rows."""
    return SamplingParams(
        temperature=rng.choice([0, 0.3, 1.0, 2.5]),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 5000])),
        top_p=float(rng.choice([1, 1, 0.9, 0.3, 1e-6])),
        min_p=float(rng.choice([0, 0, 0.02, 0.3, 1])),
        repetition_penalty=float(rng.choice([1, 1, 1.3, 0.7])),
        presence_penalty=float(rng.choice([0, 0, 0.5, -1.5])),
        frequency_penalty=float(rng.choice([0, 0, 0.25, 2])),
        min_tokens=int(rng.choice([0, 0, 3, 60])),
        logprobs=[None, None, 0, 4][rng.integers(4)],
    )


class TestTruncationAgainstTransformers:
    @pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
    @pytest.mark.parametrize("temperature", [1e-5, 0.6, 1.0, 100.0])
    @pytest.mark.parametrize("top_k", [0, 1, 7, 50, 9999])
    @pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-9])
    def test_same_scores_bit_for_bit(self, temperature, top_k, top_p, ties):
        logits = random_logits(16, 700, seed=top_k, ties=ties)
        for min_p in (0.0, 0.05, 0.5, 1.0):
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            got = truncate(logits, build([params] * 16, 700)[2].draw)
            expected = self.reference(logits, params)
            if ties:  # which of equal tokens top-p cuts is up to the sort, and transformers' is not stable
                got, expected = got.sort(dim=1).values, expected.sort(dim=1).values
            assert torch.equal(got, expected), params

    def reference(self, logits, params):
        processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            processors.append(MinPLogitsWarper(params.min_p))
        return processors(None, logits.clone())

    @pytest.mark.parametrize("top_p", [0.9, 0.8, 0.75, 0.5, 0.25, 0.1])
    @pytest.mark.parametrize("vocab_size", [4, 10, 64])
    def test_equal_logits(self, vocab_size, top_p):
        logits = torch.zeros(1, vocab_size)
        params = SamplingParams(top_p=top_p)
        kept = truncate(logits, build([params], vocab_size)[2].draw).isfinite().sum()
        assert kept == self.reference(logits, params).isfinite().sum()

    def test_top_k_keeps_all_that_tie_with_the_last(self):
        draw = build([SamplingParams(top_k=2)], 5)[2].draw
        assert truncate(torch.tensor([[1.0, 3, 2, 2, 0]]), draw).isfinite().tolist() == [
            [False, True, True, True, False]
        ]

    def test_rows_keep_their_own_parameters(self):
        rng = np.random.default_rng(3)
        params = [random_params(rng) for _ in range(64)]
        params = [p for p in params if not p.greedy]
        logits = random_logits(len(params), 300)
        together = truncate(logits, build(params, 300)[2].draw)
        for row, p in enumerate(params):
            assert torch.equal(together[row : row + 1], self.reference(logits[row : row + 1], p)), p


class TestPenalties:
    def test_repetition_as_transformers(self):
        rng = np.random.default_rng(0)
        logits = random_logits(8, 100)
        prompts = [rng.integers(0, 100, n + 1).tolist() for n in range(8)]
        outputs = [rng.integers(0, 100, 3 * n).tolist() for n in range(8)]
        penalties = [1.0, 1.1, 1.5, 0.5, 3.0, 10.0, 0.9, 1.01]
        params = [SamplingParams(temperature=0, repetition_penalty=p) for p in penalties]
        got = pick(logits, params, prompts=prompts, outputs=outputs)
        for row, penalty in enumerate(penalties):
            ids = torch.tensor([prompts[row] + outputs[row]])
            expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1].clone())
            assert got[row] == expected.argmax()

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_all_three_against_the_formula(self, data):
        tokens = st.lists(st.integers(0, 7), min_size=1, max_size=12)
        prompt, output = data.draw(tokens), data.draw(tokens)
        params = SamplingParams(
            temperature=0,
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 2.0])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0, -2.0])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5, -1.0])),
        )
        logits = random_logits(1, 8, seed=data.draw(st.integers(0, 9)), scale=1)
        expected = logits[0].tolist()
        for token in set(prompt + output):
            value = expected[token]
            expected[token] = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        for token, count in Counter(output).items():
            expected[token] -= params.presence_penalty + count * params.frequency_penalty
        assert pick(logits, [params], prompts=[prompt], outputs=[output]) == [int(np.argmax(expected))]

    def test_presence_and_frequency_ignore_the_prompt(self):
        params = SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2)
        assert pick(torch.tensor([[1.0, 0.5]]), [params], prompts=[[0, 0]]) == [0]
        assert pick(torch.tensor([[1.0, 0.5]]), [params], prompts=[[1]], outputs=[[0]]) == [1]

    def test_tokens_past_the_position_do_not_count(self):
        """What an earlier owner left in the slot."""
        params = SamplingParams(temperature=0, frequency_penalty=2)
        state, token_ids, _ = build([params], 2, prompts=[[1]])
        token_ids[0, 1:] = 0
        assert sample(torch.tensor([[1.0, 0.5]]), state.batch([0], [1], token_ids)).token_ids.tolist() == [0]

    def test_logits_are_left_as_they_are(self):
        logits = random_logits(4, 50)
        before = logits.clone()
        params = [SamplingParams(min_tokens=5, repetition_penalty=1.3, presence_penalty=1, top_k=3, top_p=0.5)] * 4
        pick(logits, params, stop_ids=(1, 2))
        assert torch.equal(logits, before)


class TestMinTokens:
    def test_stop_tokens_wait_for_their_time(self):
        logits = torch.tensor([[0.0, 5.0, 9.0, 8.0]]).expand(3, 4)
        params = [SamplingParams(temperature=0, min_tokens=2)] * 3
        outputs = [[], [0], [0, 0]]
        assert pick(logits, params, outputs=outputs, stop_ids={2, 3, 77}) == [1, 1, 2]

    def test_a_sampled_row_never_gives_a_banned_token(self):
        logits = torch.tensor([[0.0, 0.0, 20.0]]).expand(50, 3)
        assert 2 not in pick(logits, [SamplingParams(min_tokens=1)] * 50, stop_ids=[2])


class TestRandomness:
    def test_uniforms_pass_chi_square_over_positions_and_over_seeds(self):
        n = 100_000
        over_positions = uniforms(hash_seeds(np.full(n, 7, np.uint64)), np.arange(n))
        over_seeds = uniforms(hash_seeds(np.arange(n, dtype=np.uint64)), np.full(n, 7))
        for u in (over_positions, over_seeds):
            assert u.min() >= 0
            assert u.max() < 1
            assert abs(chi_square_z(np.bincount((u * 256).astype(int), minlength=256), np.full(256, 1 / 256))) < 4
            pairs = (u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int)  # neighbours are independent
            assert abs(chi_square_z(np.bincount(pairs, minlength=256), np.full(256, 1 / 256))) < 4

    def test_no_stream_is_a_shifted_copy_of_another(self):
        """As raw SplitMix64 streams are, whose seeds differ by the golden ratio."""
        seeds = [*range(20), 0x9E3779B97F4A7C15, 2 * 0x9E3779B97F4A7C15 % 2**64]
        positions = np.arange(1000)
        streams = [uniforms(hash_seeds(np.full(1000, seed, np.uint64)), positions) for seed in seeds]
        assert len(set(np.concatenate(streams).tolist())) == 22_000

    def test_chi_square_notices_a_bad_generator(self):
        u = np.random.default_rng(0).random(100_000) ** 1.1
        assert chi_square_z(np.bincount((u * 256).astype(int), minlength=256), np.full(256, 1 / 256)) > 10

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(),
            SamplingParams(temperature=0.5),
            SamplingParams(temperature=1.7, top_k=12),
            SamplingParams(top_p=0.8),
            SamplingParams(min_p=0.1),
            SamplingParams(top_k=15, top_p=0.9, min_p=0.02),
        ],
        ids=["plain", "cold", "top_k", "top_p", "min_p", "all"],
    )
    def test_tokens_follow_the_exact_distribution(self, params, device):
        tokens, exact = self.draw_many(params, device)
        assert not set(tokens.tolist()) - set(np.flatnonzero(exact).tolist())
        assert abs(chi_square_z(np.bincount(tokens, minlength=20), exact)) < 4

    def test_chi_square_notices_a_wrong_sampler(self):
        tokens, _ = self.draw_many(SamplingParams(temperature=1.1), "cpu")
        _, exact = self.draw_many(SamplingParams(), "cpu")
        assert chi_square_z(np.bincount(tokens, minlength=20), exact) > 10
        shifted = (tokens + (np.arange(len(tokens)) % 40 == 0)) % 20  # one in forty is its neighbour
        _, exact = self.draw_many(SamplingParams(temperature=1.1), "cpu")
        assert chi_square_z(np.bincount(shifted, minlength=20), exact) > 10

    def draw_many(self, params, device, n=40_000):
        logits = random_logits(1, 20, seed=11, scale=1.5)
        state, token_ids, _ = build([params], 20, seeds=[123], device=device)
        batch = state.batch([0] * n, range(1, n + 1), token_ids)
        kept = truncate(logits, build([params], 20)[2].draw)
        tokens = sample(logits.to(device).expand(n, 20), batch).token_ids
        return tokens.cpu().numpy(), kept.double().softmax(1)[0].numpy()

    @pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
    def test_a_token_without_probability_is_never_drawn(self, u):
        """Dead tokens at both ends and in between, where an inverse CDF goes wrong first."""
        dead = -torch.inf
        for scores in ([dead, 0, dead], [dead, dead, 0, dead, 1, dead], [0, dead], [dead, 0], [0.0, -200.0, -300.0]):
            logits = torch.tensor([scores])
            alive = {i for i, s in enumerate(scores) if s > -100}
            draw = self.draw_at(u)
            assert int(draw_tokens(logits, draw)) in alive

    def test_the_ends_of_the_cdf(self):
        logits = torch.zeros(1, 1000)
        assert int(draw_tokens(logits, self.draw_at(0.0))) == 0
        assert int(draw_tokens(logits, self.draw_at(1 - 2.0**-53))) == 999

    def draw_at(self, u):
        return Draw(None, torch.tensor([[u]], dtype=torch.float64), torch.ones(1, 1), None, 0, None, None)


def chi_square_z(counts, probabilities):
    """Standard deviations between the chi-square statistic and its mean under `probabilities`."""
    expected = probabilities * counts.sum()
    likely = expected > 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    df = likely.sum() - 1
    return (statistic - df) / math.sqrt(2 * df)


@pytest.mark.parametrize("device", DEVICES)
class TestIndependenceOfTheBatch:
    @pytest.mark.parametrize("vocab_size", [97, 1024])
    def test_a_mixed_batch_equals_its_rows_alone(self, vocab_size, device):
        rng = np.random.default_rng(vocab_size)
        n = 96
        params = [random_params(rng) for _ in range(n)]
        logits = random_logits(n, vocab_size, seed=1, ties=True).to(device)
        seeds = rng.integers(0, 2**62, n).tolist()
        prompts = [rng.integers(0, vocab_size, rng.integers(1, 30)).tolist() for _ in range(n)]
        outputs = [rng.integers(0, vocab_size, rng.integers(0, 30)).tolist() for _ in range(n)]
        arguments = {"seeds": seeds, "prompts": prompts, "outputs": outputs, "stop_ids": (3, 4), "device": device}
        state, token_ids, batch = build(params, vocab_size, **arguments)
        together = sample(logits, batch)
        lengths = np.array([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
        for row in range(n):
            alone = sample(logits[row : row + 1], state.batch([row], lengths[row : row + 1], token_ids))
            assert alone.token_ids[0] == together.token_ids[row], params[row]
            assert (0 in alone.logprobs) == (row in together.logprobs)
            if row in together.logprobs:
                assert alone.logprobs[0].token_id == together.logprobs[row].token_id
                assert alone.logprobs[0].rank == together.logprobs[row].rank

        order = rng.permutation(n)
        shuffled = sample(logits[order.tolist()], state.batch(order, lengths[order], token_ids))
        assert shuffled.token_ids.tolist() == together.token_ids[order.tolist()].tolist()

    def test_another_slot_gives_the_same_token(self, device):
        logits = random_logits(1, 500).to(device).expand(8, 500)
        tokens = pick(logits, [SamplingParams(top_p=0.95)] * 8, seeds=[42] * 8, device=device)
        assert len(set(tokens)) == 1

    def test_seed_and_position_change_the_token(self, device):
        logits = torch.zeros(64, 5000, device=device)
        params = [SamplingParams()] * 64
        assert len(set(pick(logits, params, seeds=range(64), device=device))) > 60
        assert len(set(pick(logits, params, seeds=[1] * 64, positions=range(1, 65), device=device))) > 60

    def test_a_broken_row_breaks_no_other(self, device):
        nan, inf = torch.nan, torch.inf
        good = random_logits(1, 6).to(device)
        broken = [
            [nan] * 6,
            [0, nan, 0, 9, 9, 9],
            [inf] * 6,
            [-inf] * 6,
            [0, 1, inf, 2, 3, 4],
            [-inf, 0, nan, inf, 0, 0],
        ]
        for params in (
            GREEDY,
            SamplingParams(),
            SamplingParams(temperature=1e-5, top_k=3, top_p=0.9, min_p=0.1),
            SamplingParams(repetition_penalty=1.2, presence_penalty=1, logprobs=3),
        ):
            logits = torch.cat([good, torch.tensor(broken, device=device), good])
            tokens = pick(logits, [params] * 8, seeds=[5] * 8, device=device)
            assert tokens[0] == tokens[-1] == pick(good, [params], seeds=[5], device=device)[0]
            assert all(0 <= token < 6 for token in tokens)
            assert tokens[2] == 1  # a NaN counts as the largest
            assert tokens[5] == 2


class TestCost:
    def test_a_greedy_batch_carries_nothing(self):
        assert build([GREEDY] * 3, 10)[2] == SamplingBatch() or vars(build([GREEDY] * 3, 10)[2]) == vars(
            SamplingBatch()
        )

    def test_a_batch_of_temperatures_carries_no_cuts(self):
        draw = build([SamplingParams(temperature=0.7)] * 3, 10)[2].draw
        assert (draw.rows, draw.top_k, draw.top_p, draw.min_p) == (None, None, None, None)

    def test_cuts_concern_only_the_rows_that_use_them(self):
        params = [
            SamplingParams(),
            GREEDY,
            SamplingParams(top_k=3),
            SamplingParams(top_p=0.5),
            SamplingParams(top_k=99),
        ]
        draw = build(params, 10)[2].draw
        assert draw.rows.tolist() == [0, 2, 3, 4]
        assert (draw.top_k.rows.tolist(), draw.top_k.values.tolist(), draw.max_top_k) == ([1], [[3]], 3)
        assert draw.top_p.rows.tolist() == [2]

    def test_a_slot_forgets_its_former_owner(self):
        state, token_ids, _ = build([SamplingParams(top_k=3, min_tokens=9, logprobs=2, presence_penalty=1)], 10)
        state.admit(0, GREEDY, 0, 1, ())
        assert vars(state.batch([0], [1], token_ids)) == vars(SamplingBatch())

    def test_no_rows(self):
        assert pick(torch.empty(0, 10), []) == []


class TestLogprobs:
    def test_of_the_models_own_distribution(self):
        logits = random_logits(3, 40)
        params = [
            SamplingParams(temperature=0.2, top_k=2, repetition_penalty=2, logprobs=5),
            SamplingParams(),
            SamplingParams(temperature=0, logprobs=0),
        ]
        _, _, batch = build(params, 40)
        sampled = sample(logits, batch)
        assert set(sampled.logprobs) == {0, 2}
        reference = logits.double().log_softmax(1)
        for row, entry in sampled.logprobs.items():
            assert entry.token_id == sampled.token_ids[row]
            assert entry.logprob == pytest.approx(float(reference[row, entry.token_id]), abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, entry.token_id]).sum())
            values, ids = reference[row].topk(params[row].logprobs)
            assert [token for token, _ in entry.top] == ids.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert sampled.logprobs[2].rank == 1

    def test_more_than_the_vocabulary(self):
        entry = sample(random_logits(1, 4), build([SamplingParams(logprobs=20)], 4)[2]).logprobs[0]
        assert len(entry.top) == 4
        assert math.fsum(math.exp(value) for _, value in entry.top) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 100])
def test_extreme_temperatures(temperature):
    logits = random_logits(200, 50, scale=30)
    tokens = pick(logits, [SamplingParams(temperature=temperature)] * 200)
    if temperature < 1:
        assert tokens == logits.argmax(1).tolist()
    else:
        assert len(set(tokens)) > 40
