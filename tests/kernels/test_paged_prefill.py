"""Prefill over the paged cache against its definition: unowned blocks and slots past the end are NaN."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.paged_prefill import paged_prefill, paged_prefill_reference

# Of queries that only fill up a tile, which may see nothing.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")


class Shape(NamedTuple):
    rows: list[tuple[int, int]]  # tokens in the cache before the step, tokens of the step
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    value_dim: int | None = None


SHAPES = {
    "prompt": Shape([(0, 37)], 4, 2, 16, 16),
    "one token": Shape([(0, 1)], 1, 1, 16, 16),
    "one token after a full block": Shape([(16, 1)], 2, 2, 16, 16),
    "chunks": Shape([(5, 30), (64, 3), (31, 33)], 4, 1, 16, 16),
    "many short rows": Shape([(n * 7 % 40, n % 5 + 1) for n in range(23)], 2, 1, 16, 16),
    "a group of seven": Shape([(3, 40), (0, 5), (90, 2)], 14, 2, 16, 16),
    "block of one": Shape([(10, 70), (0, 3)], 2, 1, 16, 1),
    "block of five": Shape([(11, 43), (0, 66)], 3, 1, 16, 5),
    "block wider than a tile": Shape([(100, 90), (0, 7)], 2, 1, 16, 256),
    "head_dim 80": Shape([(7, 21)], 4, 2, 80, 8),
    "head_dim 5": Shape([(7, 21), (0, 2)], 2, 1, 5, 4),
    "head_dim 256": Shape([(3, 18)], 2, 1, 256, 16),
    "head_dim 24, values 16": Shape([(7, 21), (30, 3)], 4, 4, 24, 8, value_dim=16),
    "head_dim 12, values 40": Shape([(7, 21)], 4, 2, 12, 8, value_dim=40),
    "window": Shape([(40, 150), (0, 9), (300, 5)], 2, 1, 16, 16, 50),
    "window of one": Shape([(40, 20), (0, 9)], 2, 1, 16, 16, 1),
    "window of a tile": Shape([(190, 140)], 2, 2, 16, 5, 64),
    "window wider than all": Shape([(30, 40)], 2, 1, 16, 16, 1000),
}


class Case(NamedTuple):
    arguments: tuple[torch.Tensor, ...]
    options: dict


def make(shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(0)
    lens = [start + count for start, count in shape.rows]
    blocks = [-(-length // shape.block_size) for length in lens]
    total = sum(blocks) + 3
    order = torch.randperm(total, generator=generator)
    size = (total, shape.block_size, shape.kv_heads)
    keys = torch.full((*size, shape.head_dim), math.nan, dtype=dtype)
    values = torch.full((*size, shape.value_dim or shape.head_dim), math.nan, dtype=dtype)
    # The rest of a row's table points at a block that is nobody's.
    tables = order[-1].repeat(len(lens), max(blocks) + 2).int()
    taken = 0
    for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        own = order[taken : taken + count]
        taken += count
        tables[row, :count] = own
        for side in (keys, values):
            slots = torch.full((count * shape.block_size, *side.shape[2:]), math.nan)
            slots[:length] = torch.randn(length, *side.shape[2:], generator=generator)
            side[own] = slots.view(count, *side.shape[1:]).to(dtype)
    counts = torch.tensor([count for _, count in shape.rows])
    query_starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    # Queries that are part of a wider tensor, as a split of q, k and v leaves them.
    wide = torch.randn(int(counts.sum()), shape.heads + 2, shape.head_dim, generator=generator).to(dtype)
    tensors = (wide, keys, values, tables, query_starts, torch.tensor(lens).int())
    wide, *rest = (tensor.to(device) for tensor in tensors)
    options = {"max_query_len": int(counts.max()), "scale": shape.head_dim**-0.5, "window": shape.window}
    return Case((wide[:, : shape.heads], *rest), options)


@pytest.mark.parametrize("name", SHAPES)
def test_float32(name: str, device: torch.device) -> None:
    case = make(SHAPES[name], torch.float32, device)
    out = paged_prefill(*case.arguments, **case.options)
    expected = paged_prefill_reference(*case.arguments, **case.options)
    assert not expected.isnan().any()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["chunks", "a group of seven", "head_dim 80", "window"])
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = make(SHAPES[name], dtype, device)
    out = paged_prefill(*case.arguments, **case.options)
    assert out.dtype is dtype
    wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in case.arguments]
    expected = paged_prefill_reference(*wide, **case.options)
    assert (out.float() - expected).norm() / expected.norm() < 1e-2


def test_no_tokens(device: torch.device) -> None:
    case = make(SHAPES["prompt"], torch.float32, device)
    q, keys, values, tables, starts, lens = case.arguments
    out = paged_prefill(q[:0], keys, values, tables[:0], starts[:1], lens[:0], **case.options)
    assert out.shape == (0, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [
    (28, 4, 128, 16), (32, 8, 64, 256), (8, 2, 256, 5), (12, 2, 96, 1)
])  # fmt: skip
def test_large(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    rows = [(0, 1500), (3584, 512), (77, 1), (2000, 900), (0, 3), *[(n * 13, n % 70 + 1) for n in range(120)]]
    case = make(Shape(rows, heads, kv_heads, head_dim, block_size, window), dtype, torch.device("cuda"))
    out = paged_prefill(*case.arguments, **case.options)
    wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in case.arguments]
    expected = paged_prefill_reference(*wide, **case.options)
    error = (out.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.gpu
def test_a_store_past_two_to_the_31_elements() -> None:
    """Block * stride does not fit 32 bits."""
    blocks, device = 2**31 // (16 * 4 * 128) + 10, torch.device("cuda")
    keys = torch.zeros(blocks, 16, 4, 128, dtype=torch.bfloat16, device=device)
    values = torch.zeros_like(keys)
    tables = torch.tensor([[blocks - 1, 0, blocks - 3]], dtype=torch.int32, device=device)
    used = tables[0].long()
    keys[used] = torch.randn(3, 16, 4, 128, device=device).bfloat16()
    values[used] = torch.randn(3, 16, 4, 128, device=device).bfloat16()
    q = torch.randn(40, 28, 128, device=device).bfloat16()
    small = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 40], [45]))
    options = {"max_query_len": 40, "scale": 0.1, "window": None}
    out = paged_prefill(q, keys, values, tables, starts, lens, **options)
    expected = paged_prefill_reference(q, keys[used], values[used], small, starts, lens, **options)
    assert (out.float() - expected.float()).norm() / expected.float().norm() < 1e-2
