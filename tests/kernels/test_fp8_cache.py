"""Keys and values in float8: written as they are defined, and attended to as their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.flash_decode import flash_decode
from mini_infer.kernels.interface import Places
from mini_infer.kernels.invariant_attention import invariant_attention
from mini_infer.kernels.ops import TorchKernels
from mini_infer.kernels.paged_decode import paged_decode, paged_decode_reference, unscaled
from mini_infer.kernels.paged_prefill import paged_prefill, paged_prefill_reference
from mini_infer.kernels.rope_and_store import rope_and_store, rope_and_store_reference
from mini_infer.modeling.rope import RopeSpec, RotaryTable
from mini_infer.quantization.formats import as_stored

# Queries that pad a tile see nothing.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
LENGTHS = [40, 3, 130]


@pytest.fixture(scope="module")
def scales() -> Tensor:
    return torch.tensor([[0.01, 0.5], [0.02, 0.003]])


@pytest.fixture(scope="module")
def cache(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, block tables."""
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(blocks), generator=generator).int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, own in enumerate(order.split(blocks)):
        tables[row, : len(own)] = own
    floating = (torch.randn(sum(blocks) * BLOCK, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    keys, values = as_stored(*floating, torch.float8_e4m3fn, scales)
    shape = (sum(blocks), BLOCK, KV_HEADS, SIZE)
    return keys.view(torch.float8_e4m3fn).view(shape), values.view(torch.float8_e4m3fn).view(shape), tables


@pytest.mark.parametrize("query_len", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(cache, scales, dtype, query_len, device):
    keys, values, tables, lengths = (t.to(device) for t in (*cache, torch.tensor(LENGTHS).int()))
    rows = lengths >= query_len
    tables, lengths = tables[rows], lengths[rows]
    q = torch.randn(len(lengths) * query_len, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    more = {"scale": 0.2, "window": None, "query_len": query_len, "kv_scales": scales.to(device)}
    expected = paged_decode_reference(q.float(), keys, values, tables, lengths, **more)
    for kernel in (paged_decode, flash_decode):
        out = kernel(q, keys, values, tables, lengths, **more).float()
        assert (out - expected).norm() / expected.norm() < (1e-5 if dtype is torch.float32 else 1e-2)


def test_heads_are_read_in_pairs(scales, device):
    """Of which a head may have fewer than a tile has; halves of one there are none."""
    generator = torch.Generator().manual_seed(3)
    tables, lengths = torch.tensor([[1, 0]]).int().to(device), torch.tensor([20]).int().to(device)
    for size in (2, 42, 33):
        q = torch.randn(1, HEADS, size, generator=generator).to(device)
        keys, values = (torch.randn(2, BLOCK, KV_HEADS, size, generator=generator) for _ in range(2))
        keys, values = (t.to(device, torch.float8_e4m3fn) for t in (keys, values))
        more = {"scale": 0.2, "window": None, "query_len": 1, "kv_scales": scales.to(device)}
        if size % 2:
            with pytest.raises(ValueError, match="heads of float8 are of even sizes, not 33 and 33"):
                flash_decode(q, keys, values, tables, lengths, **more)
        else:
            expected = paged_decode_reference(q, keys, values, tables, lengths, **more)
            torch.testing.assert_close(flash_decode(q, keys, values, tables, lengths, **more), expected)


@pytest.mark.parametrize("size", [1e6, 1e-6, 0.0])
def test_queries_out_of_the_range_of_float16(cache, scales, size, device):
    """In which products of bfloat16 queries are computed."""
    keys, values, tables, lengths = (t.to(device) for t in (*cache, torch.tensor(LENGTHS).int()))
    q = size * torch.randn(len(LENGTHS), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    q = q.to(device, torch.bfloat16)
    more = {"scale": 0.2 / (size or 1), "window": None, "query_len": 1, "kv_scales": scales.to(device)}
    expected = paged_decode_reference(q.float(), keys, values, tables, lengths, **more)
    out = flash_decode(q, keys, values, tables, lengths, **more).float()
    assert (out - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts(cache, scales, dtype, device):
    keys, values, tables, lengths = (t.to(device) for t in (*cache, torch.tensor(LENGTHS).int()))
    counts = [40, 2, 70]
    starts = torch.tensor([0, 40, 42, 112], dtype=torch.int32, device=device)
    q = torch.randn(sum(counts), HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    more = {"scale": 0.2, "window": None, "kv_scales": scales.to(device)}
    expected = paged_prefill_reference(q.float(), keys, values, tables, starts, lengths, max_query_len=70, **more)
    close = 1e-5 if dtype is torch.float32 else 1e-2
    outs = [paged_prefill(q, keys, values, tables, starts, lengths, max_query_len=70, **more)]
    outs += [invariant_attention(q, keys, values, tables, starts, lengths, chunk=64, **more)]
    for out in outs:
        assert (out.float() - expected).norm() / expected.norm() < close
    # Rows that decode, with their chunks spread over programs, to the bit as in the prompt.
    last = torch.tensor([39, 41, 111], device=device)
    each = torch.arange(4, dtype=torch.int32, device=device)
    alone = invariant_attention(q[last], keys, values, tables, each, lengths, query_len=1, chunk=64, **more)
    assert torch.equal(alone, outs[1][last])


def test_what_is_written(scales, device):
    generator = torch.Generator().manual_seed(2)
    tokens, slots = 5, 9
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator).to(device, torch.bfloat16)
    qkv[0] *= 100  # beyond what some head can hold
    cos, sin = RotaryTable(RopeSpec(1e4), SIZE, 100, torch.bfloat16, device)(torch.arange(tokens, device=device))
    mapping = torch.randperm(slots, generator=generator)[:tokens].to(device)
    found = []
    for function in (rope_and_store, rope_and_store_reference, TorchKernels().rope_and_store):
        keys, values = (torch.zeros(slots, KV_HEADS, SIZE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        function(qkv, None, Places(cos, sin, mapping, keys, values, scales.to(device)))
        found.append(unscaled(keys, values, scales.to(device)))
    for keys, values in found:
        assert keys.abs().max() <= 448 * scales[0].max() * 1.001
        for side, expected in zip((keys, values), found[1], strict=True):
            # A key is rounded to bfloat16 on its way, which may move it across the border between two codes.
            error = (side - expected).abs()
            assert (error <= expected.abs() / 7 + 1e-4).all()
            assert (error > 0).float().mean() < 0.05
