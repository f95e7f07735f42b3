"""Batch-invariant kernels: right, and the same to the bit in any company. On a CPU, where the interpreter multiplies by
numpy, tiles of one shape are compared; on a GPU all are."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor
from uninterpreted import output_of

pytest.importorskip("triton")

from mini_infer.kernels.invariant_attention import invariant_attention
from mini_infer.kernels.invariant_linear import CHUNKS, chunked_tile_for, invariant_linear, num_chunks, tile_for
from mini_infer.kernels.paged_prefill import paged_prefill_reference

# Of queries that only fill up a tile, which may see nothing.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "bias"), [(1, 16, 16, False), (70, 100, 72, True), (5, 40, 136, True)]
)
def test_a_linear_layer_is_right(dtype, rows, out_size, in_size, bias):
    x, weight = torch.randn(rows, in_size).to(dtype), torch.randn(out_size, in_size).to(dtype)
    b = torch.randn(out_size).to(dtype) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    out = torch.full((rows, out_size), math.nan, dtype=dtype)
    for got in (invariant_linear(x, weight, b), invariant_linear(x, weight, b, out)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
    assert invariant_linear(x[:0], weight, b).shape == (0, out_size)


def test_a_linear_layer_whose_rows_are_not_aligned_says_so():
    with pytest.raises(ValueError, match=r"multiple of 16 bytes, not 13 of torch\.bfloat16"):
        invariant_linear(torch.zeros(2, 13, dtype=torch.bfloat16), torch.zeros(4, 13, dtype=torch.bfloat16))


def test_rows_of_a_linear_layer_that_lie_apart():
    wide, weight = torch.randn(9, 64), torch.randn(24, 32)
    assert torch.equal(invariant_linear(wide[:, :32], weight), invariant_linear(wide[:, :32].contiguous(), weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out_size", "in_size"), [(4608, 3584), (3584, 18944), (640, 256), (1000, 136)])
@pytest.mark.parametrize("most_chunks", [1, CHUNKS])
def test_a_row_is_the_same_to_the_bit_in_every_tile(dtype, out_size, in_size, most_chunks):
    torch.manual_seed(0)
    chunks = min(most_chunks, num_chunks(in_size, dtype.itemsize))
    best = tile_for if chunks == 1 else chunked_tile_for
    x = torch.randn(2048, in_size, device="cuda", dtype=dtype)
    weight, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((out_size, in_size), (out_size,)))
    every = invariant_linear(x, weight, bias, chunks=chunks)
    for rows in (1, 2, 17, 64, 65, 256, 300, 700):
        assert torch.equal(invariant_linear(x[:rows], weight, bias, chunks=chunks), every[:rows]), rows
        assert torch.equal(invariant_linear(x[-rows:], weight, bias, chunks=chunks), every[-rows:]), rows
    tiles = {best(rows, out_size, x.element_size()) for rows in (1, 20, 50, 100, 300, 2048)}
    for tile in tiles:
        assert torch.equal(invariant_linear(x[:130], weight, bias, chunks=chunks, tile=tile), every[:130]), tile


COMPILES_PRODUCTS_IN_CHUNKS = """
import torch
from h200 import H200
from triton.runtime import driver

driver.set_active(H200())
from mini_infer.kernels.compile_ahead import compiled_in_parallel
from mini_infer.kernels.invariant_linear import invariant_linear

for rows in (1, 20, 50, 100, 300, 600):
    for chunks, dtype in ((2, torch.bfloat16), (4, torch.bfloat16), (8, torch.bfloat16), (8, torch.float16)):
        with compiled_in_parallel(1):
            x, weight = (torch.zeros(n, 1024, dtype=dtype) for n in (rows, 256))
            invariant_linear(x, weight, chunks=chunks)
"""


def test_weights_of_products_in_chunks_stay_in_shared_memory(tmp_path) -> None:
    """Triton leaves wgmma unfinished behind a step of a loop, be its weights in shared memory, where the next step has
    another place for them, or in registers, where it has not. Compiled for Hopper, on any machine."""
    output_of(COMPILES_PRODUCTS_IN_CHUNKS, TRITON_CACHE_DIR=str(tmp_path))
    compiled = [path.read_text() for path in tmp_path.rglob("_linear_kernel.ttgir")]
    assert len(compiled) == 24
    for code in compiled:
        products = re.findall(r"ttng\.warp_group_dot .* : (\S+)<", code)
        assert products
        assert set(products) == {"!ttg.memdesc"}, "what is in registers is a tensor"


class Cached:
    """A sequence whose K and V lie scattered over a cache; what nobody owns is NaN."""

    def __init__(self, length: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype, device="cpu"):
        generator = torch.Generator().manual_seed(length)
        blocks = -(-length // block_size)
        self.table = torch.randperm(blocks + 3, generator=generator)[:blocks].int()
        size = (blocks + 3, block_size, kv_heads, head_dim)
        self.keys, self.values = (torch.full(size, math.nan, dtype=dtype) for _ in range(2))
        for side in (self.keys, self.values):
            own = torch.randn(blocks * block_size, kv_heads, head_dim, generator=generator).to(dtype)
            own[length:] = math.nan
            side[self.table.long()] = own.view(blocks, block_size, kv_heads, head_dim)
        self.q = torch.randn(length, heads, head_dim, generator=generator).to(dtype).to(device)
        self.keys, self.values, self.table = self.keys.to(device), self.values.to(device), self.table.to(device)

    def arguments(self, parts: list[tuple[int, int]]) -> list[Tensor]:
        """Queries [begin, end) of each part, as rows of one step."""
        q = torch.cat([self.q[begin:end] for begin, end in parts])
        starts = torch.tensor([0] + [end - begin for begin, end in parts]).cumsum(0).int()
        lens = torch.tensor([end for _, end in parts]).int()
        device = q.device
        return [q, self.keys, self.values, self.table.repeat(len(parts), 1), starts.to(device), lens.to(device)]

    def attended(self, parts: list[tuple[int, int]], **options) -> Tensor:
        return invariant_attention(*self.arguments(parts), scale=0.3, **options)


@pytest.mark.parametrize("window", [None, 1, 50, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_right(dtype, window):
    cached = Cached(210, 6, 2, 24, 16, dtype)
    parts = [(0, 210), (63, 130), (209, 210), (0, 1)]
    expected = paged_prefill_reference(*cached.arguments(parts), max_query_len=210, scale=0.3, window=window)
    got = cached.attended(parts, window=window, chunk=64)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def _check_any_company(cached: Cached, length: int, window: int | None, chunk: int, many: list[int]) -> None:
    every = cached.attended([(0, length)], window=window, chunk=chunk)
    assert not every.isnan().any()
    parts = [(0, 7), (7, length // 3), (length // 3, length)]  # chunks of a prompt, as rows of one step and one by one
    assert torch.equal(cached.attended(parts, window=window, chunk=chunk), every), parts
    for begin, end in parts:
        assert torch.equal(cached.attended([(begin, end)], window=window, chunk=chunk), every[begin:end])
    for query_len in (1, 3):  # rows that decode: few, whose keys are spread over programs, and many
        for rows in many:
            ends = [length - i * 5 % (length - 3) for i in range(rows)]
            parts = [(end - query_len, end) for end in ends]
            got = cached.attended(parts, window=window, chunk=chunk, query_len=query_len)
            assert torch.equal(got, torch.cat([every[begin:end] for begin, end in parts])), (query_len, rows)


@pytest.mark.parametrize("window", [None, 100])
def test_attention_is_the_same_to_the_bit_in_any_company(window):
    _check_any_company(Cached(150, 4, 2, 16, 16, torch.float32), 150, window, 64, [1, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(28, 4, 128), (16, 8, 128), (14, 2, 64), (8, 8, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_is_the_same_to_the_bit_in_any_company_on_a_gpu(dtype, heads, kv_heads, head_dim, window):
    cached = Cached(4500, heads, kv_heads, head_dim, 16, dtype, "cuda")
    _check_any_company(cached, 4500, window, 1024, [1, 4, 40, 300])
