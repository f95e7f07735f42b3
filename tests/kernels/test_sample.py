"""The fused sampler against the torch reference, kernels/sampling/draw.py's pick_rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from mini_infer.core.request import SamplingParams
from mini_infer.core.uniforms import hash_seeds, uniforms
from mini_infer.kernels.sampling import shared
from mini_infer.kernels.sampling.draw import NUM_PARAMS, PARAM_COLUMNS, Draw, encode, pick_rows, truncate
from mini_infer.kernels.sampling.sample import sample_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GREEDY, PLAIN = SamplingParams(temperature=0), SamplingParams()
MIXED = [
    GREEDY,
    PLAIN,
    SamplingParams(temperature=0.6, top_k=50, top_p=0.95),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=0.3, min_p=0.05),
    SamplingParams(top_k=1),
    SamplingParams(temperature=2.5, top_k=700, top_p=0.5, min_p=0.01),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=10**6, min_p=1.0),
    SamplingParams(temperature=1e-5, top_p=0.3),
    SamplingParams(temperature=100, top_k=5, top_p=0.999),
]


def inputs(
    params: list[SamplingParams], vocab: int, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, rows of parameters and positions: another seed and position in every row."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = (torch.randn(len(params), vocab, generator=generator, device=device) * scale).to(dtype)
    rows = torch.from_numpy(np.stack([encode(p, 7 * i + seed, vocab) for i, p in enumerate(params)]))
    return logits, rows.to(device), torch.arange(len(params), device=device) * 3 + 1


def check(logits: Tensor, rows: Tensor, positions: Tensor, capacity: int = 16384) -> Tensor:
    """Equal to the reference, but where the uniform lies within 1e-5 of the border between two tokens: the two paths
    round exp differently."""
    before = logits.clone()
    got = sample_rows(logits, rows, positions, capacity=capacity)
    assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before))
    expected = pick_rows(logits, rows, positions)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    different = (got != expected).nonzero().flatten().tolist()
    assert len(different) <= len(got) // 100
    for row in different:
        assert distance(logits[row], rows[row], int(positions[row]), int(got[row])) < 1e-5
    return got


def distance(logits: Tensor, row: Tensor, position: int, token: int) -> float:
    """From the uniform to the stretch of the CDF that is `token`'s."""
    params = row.cpu().numpy().view(PARAM_COLUMNS)
    draw = Draw.of(params, np.array([position]), len(logits), torch.tensor)
    assert draw is not None, "greedy rows are equal"
    cdf = truncate(logits[None].float().cpu(), draw).double().softmax(1).cumsum(1)[0]
    u, start = float(draw.uniforms), float(cdf[token - 1]) if token else 0.0
    return max(start - u, u - float(cdf[token]), 0.0)


# In the interpreter a row takes up to a quarter of a second, on a GPU each vocabulary and dtype some to compile.
@pytest.mark.parametrize(
    ("vocab", "dtype", "capacity"),
    [
        (5, torch.float32, 16384),
        (1000, torch.float32, 16384),
        (1000, torch.bfloat16, 16384),
        (1000, torch.float16, 300),
        (4999, torch.bfloat16, 1000),
    ],
    ids=str,
)
def test_equals_the_reference(vocab: int, dtype: torch.dtype, capacity: int, device: torch.device) -> None:
    check(*inputs(MIXED, vocab, dtype, device), capacity)


@pytest.mark.parametrize("scale", [0.3, 8.0], ids=["flat", "peaked"])
def test_when_the_guess_is_wrong(scale: float, device: torch.device) -> None:
    """Two tokens can be set apart: the cut is found in the whole row."""
    params = [SamplingParams(top_k=20), SamplingParams(top_p=0.7), SamplingParams(top_k=40, top_p=0.6)]
    check(*inputs(params, 1500, torch.bfloat16, device, scale=scale), capacity=2)


@pytest.mark.parametrize("capacity", [16384, 1200])
def test_many_ties(capacity: int, device: torch.device) -> None:
    """All equal, and a few values: of equal tokens top-p cuts the first."""
    params = [SamplingParams(top_p=0.3), SamplingParams(top_k=3, top_p=0.3), SamplingParams(top_p=1e-9)]
    logits, rows, positions = inputs(params * 2, 3000, torch.float32, device, seed=5)
    logits[:3] = 1.5
    logits[3:] = logits[3:].round().clamp(min=3)
    check(logits, rows, positions, capacity)


def test_many_draws(device: torch.device) -> None:
    check(*inputs([SamplingParams(temperature=t) for t in (0.5, 1.0, 1.5)] * 16, 600, torch.float32, device, seed=9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_draws(seed: int, device: torch.device) -> None:
    vocab, scale, capacity = [(800, 2.0, 16384), (5000, 0.5, 1500), (30, 1.0, 16384), (9000, 4.0, 4000)][seed]
    params = [PLAIN] * 500 + MIXED * 20 if device.type == "cuda" else [PLAIN] * 30 + MIXED
    check(*inputs(params, vocab, torch.float32, device, seed, scale), capacity)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [*((1000, dtype) for dtype in DTYPES), (2, torch.float32), (64, torch.bfloat16), (9001, torch.float16)],
    ids=str,
)
def test_greedy_takes_the_first_of_the_highest(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, rows, positions = inputs([GREEDY] * 4, vocab, dtype, device)
    logits[1] = logits[1].clamp(max=0.5)
    logits[2] = -0.0
    logits[2, vocab // 2 :] = 0.0
    logits[3] = -torch.inf
    assert torch.equal(sample_rows(logits, rows, positions), logits.argmax(1))


def test_broken_rows(device: torch.device) -> None:
    nan, inf = torch.nan, torch.inf
    broken = [[nan] * 6, [0, nan, 0, 9, inf, 9], [inf, nan, nan, 9, 9, 0], [inf] * 6, [-inf] * 6, [0, 1, inf, 2, 3, 4]]
    broken += [[-inf, 0, nan, inf, 0, 0], [-inf, -inf, 3, -inf, -inf, -inf], [1.0, 2, 3, 4, 5, 6]]
    all_kinds = SamplingParams(temperature=1e-5, top_k=3, top_p=0.9, min_p=0.1)
    for params in (GREEDY, PLAIN, all_kinds):
        logits = torch.tensor(broken, device=device).repeat(1, 20)[:, :101]
        _, rows, positions = inputs([params] * len(broken), 101, torch.float32, device)
        got = sample_rows(logits, rows, positions)
        assert torch.equal(got, pick_rows(logits, rows, positions))
        assert torch.equal(got[-1:], sample_rows(logits[-1:], rows[-1:], positions[-1:]))


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    logits, rows, positions = inputs(MIXED, 1300, torch.bfloat16, device, seed=2)
    together = sample_rows(logits, rows, positions, capacity=400)
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(sample_rows(logits[order], rows[order], positions[order], capacity=400), together[order])
    assert torch.equal(sample_rows(logits[2:4], rows[2:4], positions[2:4].int()), together[2:4])


def test_rows_may_lie_apart(device: torch.device) -> None:
    logits, rows, positions = inputs(MIXED[:4], 500, torch.bfloat16, device)
    wide = torch.full((4, 517), 99.0, dtype=logits.dtype, device=device)
    wide[:, :500] = logits
    arena = torch.full((4, 40), -1, dtype=torch.int32, device=device)
    arena[:, -NUM_PARAMS:] = rows
    apart = arena[:, -NUM_PARAMS:]
    assert torch.equal(sample_rows(wide[:, :500], apart, positions), sample_rows(logits, rows, positions))


def test_no_rows(device: torch.device) -> None:
    logits, rows, positions = inputs([GREEDY], 9, torch.float32, device)
    assert sample_rows(logits[:0], rows[:0], positions[:0]).shape == (0,)


@triton.jit
def _uniform_kernel(param_rows, positions, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, shared.uniform(param_rows + row * WIDTH, tl.load(positions + row)))


def test_the_uniform_is_draws_uniform(device: torch.device) -> None:
    """To the bit: 64-bit products wrap around, shifts bring in zeros."""
    assert NUM_PARAMS == shared.NUM_PARAMS == 7
    seeds = [0, 1, 2, 2**31, 2**32 - 1, 2**63 - 1, 0x9E3779B97F4A7C15 % 2**63, 12345678901234567]
    positions = np.array([0, 1, 2**31 - 1, 7, 5, 131072, 3, 4])
    rows = torch.from_numpy(np.stack([encode(PLAIN, seed, 10) for seed in seeds])).to(device)
    out = torch.full((len(seeds),), torch.nan, dtype=torch.float64, device=device)
    _uniform_kernel[(len(seeds),)](rows, torch.from_numpy(positions).to(device), out, NUM_PARAMS)
    assert out.tolist() == uniforms(hash_seeds(np.array(seeds, np.uint64)), positions).tolist()


DISTRIBUTIONS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(SamplingParams(temperature=0.5, top_p=0.8), id="top_p"),
    pytest.param(SamplingParams(top_k=12, top_p=0.9, min_p=0.02), id="all"),
]


# Where it takes long, one: each row is the reference's, whose distribution is tested with all kinds (test_draw.py).
@pytest.mark.slow
@pytest.mark.parametrize("params", DISTRIBUTIONS if torch.cuda.is_available() else DISTRIBUTIONS[-1:])
def test_tokens_follow_the_exact_distribution(params: SamplingParams, device: torch.device) -> None:
    n = 40_000 if device.type == "cuda" else 250
    logits, rows, _ = inputs([params], 20, torch.float32, device, seed=11, scale=1.5)
    positions = torch.arange(n, device=device)
    tokens = sample_rows(logits.expand(n, 20), rows.expand(n, NUM_PARAMS), positions).cpu()
    draw = Draw.of(rows.cpu().numpy().view(PARAM_COLUMNS)[0], np.zeros(1, np.int64), 20, torch.tensor)
    assert draw is not None
    exact = truncate(logits.cpu(), draw).double().softmax(1)[0].numpy()
    counts = np.bincount(tokens.numpy(), minlength=20)
    assert not counts[exact == 0].any()
    likely = exact * n > 5
    statistic = ((counts - exact * n)[likely] ** 2 / (exact * n)[likely]).sum()
    degrees = likely.sum() - 1
    assert abs(statistic - degrees) / math.sqrt(2 * degrees) < 4


# ------------------------------------------------------------------------------------------------------- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.2, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [
        (1, 151936, torch.bfloat16),
        (256, 151936, torch.bfloat16),
        (7, 151936, torch.float32),
        (33, 32000, torch.float16),
        (300, 50257, torch.float32),
        (64, 128256, torch.bfloat16),
    ],
    ids=str,
)
def test_equals_the_reference_at_size(
    rows: int, vocab: int, dtype: torch.dtype, scale: float, device: torch.device
) -> None:
    params = [MIXED[i % len(MIXED)] for i in range(rows + 2)][2:]
    batch = inputs(params, vocab, dtype, device, seed=rows, scale=scale)
    assert torch.equal(check(*batch), sample_rows(*batch))


@pytest.mark.gpu
def test_a_captured_graph_equals_the_eager_call(device: torch.device) -> None:
    """With other logits, parameters and positions in each replay."""
    logits, rows, positions = inputs(MIXED, 151936, torch.bfloat16, device)
    sample_rows(logits, rows, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_rows(logits, rows, positions)
    for seed in range(1, 6):
        fresh = inputs(MIXED[seed:] + MIXED[:seed], 151936, torch.bfloat16, device, seed, scale=seed)
        for static, new in zip((logits, rows, positions), fresh, strict=True):
            static.copy_(new)
        tokens.fill_(-1)
        graph.replay()
        assert torch.equal(tokens, sample_rows(*fresh))
