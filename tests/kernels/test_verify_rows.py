"""The verification kernels against their torch reference, speculative/verify.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.core.request import SamplingParams
from mini_infer.core.uniforms import ACCEPT, DRAFT, uniforms
from mini_infer.kernels.sampling.draw import PARAM_COLUMNS, encode, pick_rows
from mini_infer.kernels.sampling.sample import sample_rows
from mini_infer.kernels.sampling.verify import verify_rows
from mini_infer.speculative import verify
from mini_infer.speculative.verify import NO_DRAFT, verify_tokens

GREEDY, PLAIN = SamplingParams(temperature=0), SamplingParams()
MIXED = [
    PLAIN,
    GREEDY,
    SamplingParams(temperature=0.6, top_k=50, top_p=0.95),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=0.3, min_p=0.05),
    SamplingParams(temperature=2.5, top_k=700, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=100, top_k=5, top_p=0.999),
]


def inputs(
    params: list[SamplingParams],
    vocab: int,
    draft_vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    noise: float = 1.5,
) -> tuple[Tensor, ...]:
    """One position a set of parameters; every third is without a draft. Drafts are drawn from noisy target logits,
    which lie in another order."""
    generator = torch.Generator().manual_seed(seed)
    n = len(params)
    logits = torch.randn(n, vocab, generator=generator) * 3
    wide = torch.nn.functional.pad(logits, (0, draft_vocab - vocab))
    draft_logits = (wide + torch.randn(n, draft_vocab, generator=generator) * noise).to(dtype)
    rows = torch.from_numpy(np.stack([encode(p, 7 * i + seed, vocab) for i, p in enumerate(params)]))
    positions = torch.arange(n) * 3 + 1
    drafts = pick_rows(draft_logits, rows, positions + DRAFT)
    sources = torch.randperm(n, generator=generator)
    draft_logits = torch.empty_like(draft_logits).index_copy_(0, sources, draft_logits)
    without = torch.arange(n) % 3 == 2
    drafts[without], sources[without] = NO_DRAFT, NO_DRAFT
    everything = (logits.to(dtype), rows, positions, drafts, draft_logits, sources)
    return tuple(tensor.to(device) for tensor in everything)


def check(*batch: Tensor, capacity: int = 16384) -> Tensor:
    """Equal to the reference, but where a uniform lies within 1e-5 of a border: the two round exp differently."""
    got, expected = verify_rows(*batch, capacity=capacity), verify_tokens(*batch)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    different = (got != expected).nonzero().flatten().tolist()
    assert len(different) <= len(got) // 100
    for n in different:
        assert int(got[n]) in nearly(*(tensor[n : n + 1].cpu() for tensor in batch[:4]), batch[4].cpu(), batch[5][n])
    return got


def nearly(
    logits: Tensor, params: Tensor, positions: Tensor, drafts: Tensor, draft_logits: Tensor, source: Tensor
) -> set[int]:
    """What the reference draws with uniforms that are slightly smaller or larger."""
    columns, places = params.numpy().view(PARAM_COLUMNS)[:, 0], positions.numpy()
    p, draw = verify._probabilities(logits, columns, places)
    q = verify._probabilities(draft_logits[source][None], columns, places)[0]
    q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
    accepting = torch.from_numpy(uniforms(columns["key"], places + ACCEPT)[:, None])
    near = (-1e-5, 1e-5)
    return {
        int(verify._judge(p, q, drafts, accepting + a, (draw.uniforms + b).clamp(0, 1 - 1e-9)))
        for a in near
        for b in near
    }


# In the interpreter a position takes up to half a second.
@pytest.mark.parametrize(
    ("vocab", "draft_vocab", "dtype", "capacity"),
    [
        (5, 5, torch.float32, 16384),
        (1000, 1000, torch.bfloat16, 16384),
        (301, 700, torch.float16, 200),
        (4999, 4101, torch.float32, 1000),
    ],
    ids=str,
)
def test_equals_the_reference(
    vocab: int, draft_vocab: int, dtype: torch.dtype, capacity: int, device: torch.device
) -> None:
    check(*inputs(MIXED, vocab, draft_vocab, dtype, device), capacity=capacity)


def test_many_drafts(device: torch.device) -> None:
    """A third is accepted, a third rejected, a third has none."""
    params = [SamplingParams(temperature=t) for t in (0.7, 1.0, 1.5)] * 16
    batch = inputs(params, 70, 70, torch.float32, device, seed=3)
    accepted = check(*batch) == batch[3]
    assert 8 <= int(accepted.sum()) <= 24


@pytest.mark.slow
def test_hundreds_of_drafts(device: torch.device) -> None:
    check(*inputs(MIXED * (15 if device.type == "cuda" else 6), 61, 70, torch.float32, device, seed=1))


def test_a_draft_from_the_target_itself_is_accepted(device: torch.device) -> None:
    params = [p for p in MIXED if not p.greedy]
    logits, rows, positions, *_ = inputs(params, 130, 130, torch.bfloat16, device)
    drafts = sample_rows(logits, rows, positions + DRAFT)
    sources = torch.arange(len(params), device=device)
    assert torch.equal(verify_rows(logits, rows, positions, drafts, logits, sources), drafts)


def test_without_a_distribution_it_samples(device: torch.device) -> None:
    logits, rows, positions, drafts, draft_logits, sources = inputs(MIXED, 130, 130, torch.float32, device)
    expected = sample_rows(logits, rows, positions)
    assert torch.equal(verify_rows(logits, rows, positions, drafts), expected)
    none = torch.full_like(sources, NO_DRAFT)
    assert torch.equal(verify_rows(logits, rows, positions.int(), drafts, draft_logits, none), expected)


def test_positions_do_not_see_each_other(device: torch.device) -> None:
    *batch, draft_logits, sources = inputs(MIXED, 130, 130, torch.float32, device, seed=2)
    together = verify_rows(*batch, draft_logits, sources)
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(0)).to(device)[:4]
    some = (tensor[order] for tensor in batch)
    assert torch.equal(verify_rows(*some, draft_logits, sources[order]), together[order])


# ------------------------------------------------------------------------------------------------------- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab", "draft_vocab", "dtype"),
    [(5, 152064, 151936, torch.bfloat16), (320, 32000, 32000, torch.float16), (33, 128256, 128256, torch.float32)],
    ids=str,
)
def test_equals_the_reference_at_size(
    rows: int, vocab: int, draft_vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    batch = inputs([MIXED[i % len(MIXED)] for i in range(rows)], vocab, draft_vocab, dtype, device, seed=rows)
    assert torch.equal(check(*batch), verify_rows(*batch))


@pytest.mark.gpu
def test_a_captured_graph_equals_the_eager_call(device: torch.device) -> None:
    """With other logits, parameters, positions and drafts in each replay."""
    batch = inputs(MIXED * 3, 151936, 151936, torch.bfloat16, device)
    verify_rows(*batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = verify_rows(*batch)
    for seed in range(1, 6):
        fresh = inputs((MIXED[seed:] + MIXED[:seed]) * 3, 151936, 151936, torch.bfloat16, device, seed)
        for static, new in zip(batch, fresh, strict=True):
            static.copy_(new)
        graph.replay()
        assert torch.equal(tokens, verify_rows(*fresh))
