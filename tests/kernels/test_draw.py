"""The rules of a draw: exact against transformers' logits processors, and exact in distribution."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_infer.core.request import SamplingParams
from mini_infer.core.uniforms import hash_seeds, uniforms
from mini_infer.kernels.sampling.draw import (
    NUM_PARAMS,
    PARAM_COLUMNS,
    Draw,
    draw_tokens,
    encode,
    pick_rows,
    pick_tokens,
    truncate,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = SamplingParams(temperature=0)


def param_rows(params, vocab_size, seeds=None):
    return np.stack([encode(p, seeds[i] if seeds else i, vocab_size) for i, p in enumerate(params)])


def draw_of(params, vocab_size, positions=None):
    columns = param_rows(params, vocab_size).view(PARAM_COLUMNS)[:, 0]
    return Draw.of(columns, np.arange(len(params)) if positions is None else positions, vocab_size, torch.tensor)


def random_logits(rows, vocab_size, seed=0, scale=3.0, ties=False):
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16().float() if ties else logits


class TestTruncationAgainstTransformers:
    @pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
    @pytest.mark.parametrize("temperature", [1e-5, 0.6, 1.0, 100.0])
    @pytest.mark.parametrize("top_k", [0, 1, 7, 50, 9999])
    @pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-9])
    def test_same_scores_bit_for_bit(self, temperature, top_k, top_p, ties):
        logits = random_logits(16, 700, seed=top_k, ties=ties)
        for min_p in (0.0, 0.05, 0.5, 1.0):
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            got = truncate(logits, draw_of([params] * 16, 700))
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
        kept = truncate(logits, draw_of([params], vocab_size)).isfinite().sum()
        assert kept == self.reference(logits, params).isfinite().sum()

    def test_top_k_keeps_all_that_tie_with_the_last(self):
        draw = draw_of([SamplingParams(top_k=2)], 5)
        assert truncate(torch.tensor([[1.0, 3, 2, 2, 0]]), draw).isfinite().tolist() == [
            [False, True, True, True, False]
        ]

    def test_rows_keep_their_own_parameters(self):
        rng = np.random.default_rng(3)
        params = [
            SamplingParams(
                temperature=rng.choice([0.3, 1.0, 2.5]),
                top_k=int(rng.choice([0, 0, 1, 5, 40, 5000])),
                top_p=float(rng.choice([1, 1, 0.9, 0.3, 1e-6])),
                min_p=float(rng.choice([0, 0, 0.02, 0.3, 1])),
            )
            for _ in range(48)
        ]
        logits = random_logits(len(params), 300)
        together = truncate(logits, draw_of(params, 300))
        for row, p in enumerate(params):
            assert torch.equal(together[row : row + 1], self.reference(logits[row : row + 1], p)), p


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
        tokens, exact = self.draw_many(SamplingParams(temperature=1.1), "cpu")
        _, other = self.draw_many(SamplingParams(), "cpu", n=1)
        assert chi_square_z(np.bincount(tokens, minlength=20), other) > 10
        shifted = (tokens + (np.arange(len(tokens)) % 40 == 0)) % 20  # one in forty is its neighbour
        assert chi_square_z(np.bincount(shifted, minlength=20), exact) > 10

    def draw_many(self, params, device, n=40_000):
        """At so many positions of one request. Returns the tokens, and the distribution that they should have."""
        logits = random_logits(1, 20, seed=11, scale=1.5)
        columns = param_rows([params], 20, seeds=[123]).repeat(n, axis=0).view(PARAM_COLUMNS)[:, 0]
        draw = Draw.of(columns, np.arange(1, n + 1), 20, lambda array: torch.tensor(array, device=device))
        kept = truncate(logits, draw_of([params], 20))
        tokens = draw_tokens(logits.to(device).expand(n, 20), draw)
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


class TestCost:
    def test_a_greedy_batch_draws_nothing(self):
        assert draw_of([GREEDY] * 3, 10) is None

    def test_a_batch_of_temperatures_carries_no_cuts(self):
        draw = draw_of([SamplingParams(temperature=0.7)] * 3, 10)
        assert (draw.rows, draw.top_k, draw.top_p, draw.min_p) == (None, None, None, None)

    def test_cuts_concern_only_the_rows_that_use_them(self):
        params = [
            SamplingParams(),
            GREEDY,
            SamplingParams(top_k=3),
            SamplingParams(top_p=0.5),
            SamplingParams(top_k=99),
        ]
        draw = draw_of(params, 10)
        assert draw.rows.tolist() == [0, 2, 3, 4]
        assert (draw.top_k.rows.tolist(), draw.top_k.values.tolist(), draw.max_top_k) == ([1], [[3]], 3)
        assert draw.top_p.rows.tolist() == [2]


class TestEncoding:
    def test_a_row_of_parameters_as_bits(self):
        row = encode(SamplingParams(temperature=0.7, top_k=9, top_p=0.75, min_p=0.1), seed=2**63 - 1, vocab_size=50)
        assert (row.shape, row.dtype) == ((NUM_PARAMS,), np.int32)
        assert row[[0, 1, 3]].view(np.float32).tolist() == pytest.approx([0.7, 0.25, 0.1])
        assert row[2] == 9
        assert row[6] == 0, "the request has not chosen its seed"
        assert row[4:6].view(np.uint64) == hash_seeds(np.array([2**63 - 1], np.uint64))

    def test_what_cuts_nothing(self):
        for top_k in (0, 50, 51, 10**9):
            row = encode(SamplingParams(temperature=1e-300, top_k=top_k), seed=0, vocab_size=50)
            assert row[[1, 2, 3]].tolist() == [0, 50, 0]
            assert row[:1].view(np.float32) == pytest.approx(1e-5)
        assert not encode(GREEDY, seed=0, vocab_size=50)[0]

    def test_zeros_are_greedy(self):
        """As rows are that pad a CUDA graph."""
        logits = random_logits(2, 30)
        assert torch.equal(
            pick_rows(logits, torch.zeros(2, NUM_PARAMS, dtype=torch.int32), torch.zeros(2)), logits.argmax(1)
        )

    def test_rows_pick_as_their_draw(self):
        params = [SamplingParams(), GREEDY, SamplingParams(top_k=3, top_p=0.8), SamplingParams(min_p=0.1)] * 5
        logits, positions = random_logits(20, 300), np.arange(20) + 7
        rows = torch.from_numpy(param_rows(params, 300))
        expected = pick_tokens(logits, draw_of(params, 300, positions))
        assert torch.equal(pick_rows(logits, rows, torch.from_numpy(positions)), expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 100])
def test_extreme_temperatures(temperature):
    logits = random_logits(200, 50, scale=30)
    tokens = pick_tokens(logits, draw_of([SamplingParams(temperature=temperature)] * 200, 50)).tolist()
    if temperature < 1:
        assert tokens == logits.argmax(1).tolist()
    else:
        assert len(set(tokens)) > 40
