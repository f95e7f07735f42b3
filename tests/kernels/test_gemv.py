from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pairwise import kernel_cases
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.gemv import MAX_ROWS, gemv, gemv_reference, worth_it

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# [N, K]: divisible, not, smaller than a tile, one row, several tiles in both directions
SHAPES = [(32, 512), (37, 300), (5, 7), (1, 1), (18, 2304)]
MODEL_SHAPES = {
    "Qwen2.5-7B": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)],
    "Qwen2.5-1.5B": [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)],
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
}


def inputs(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + 3 * n + 5 * k)
    x = torch.randn(rows, k, device=device, dtype=dtype)
    weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
    bias = torch.randn(n, device=device, dtype=dtype)
    if device.type == "cuda":  # gemv reads weights ahead of the kernels before it
        torch.cuda.synchronize()
    return x, weight, bias


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert got.isfinite().all()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[got.dtype]
    assert (got.float() - expected.float()).norm() <= tolerance * expected.float().norm()


@pytest.mark.parametrize(("shape", "rows", "dtype"), kernel_cases(SHAPES, [1, 2, 3, 4, 7, MAX_ROWS], DTYPES), ids=str)
def test_equals_the_reference(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> None:
    n, k = shape
    x, weight, bias = inputs(rows, n, k, dtype, device)
    assert_near(gemv(x, weight), gemv_reference(x, weight))
    assert_near(gemv(x, weight, bias), gemv_reference(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_equal_inputs_give_equal_bits(rows: int, device: torch.device) -> None:
    x, weight, bias = inputs(rows, 37, 700, torch.bfloat16, device)
    assert torch.equal(gemv(x, weight, bias), gemv(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_result_may_have_a_place(rows: int, device: torch.device) -> None:
    x, weight, bias = inputs(rows, 37, 300, torch.float32, device)
    out = torch.full((rows + 1, 37), 7.0, device=device)
    assert gemv(x, weight, bias, out[:rows]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:rows], gemv(x, weight, bias))
    assert (out[rows:] == 7.0).all()


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_of_x_may_lie_apart(rows: int, device: torch.device) -> None:
    x, weight, _ = inputs(rows, 20, 256, torch.float32, device)
    wide = torch.full((rows, 300), float("nan"), device=device)
    wide[:, 20:276] = x
    assert torch.equal(gemv(wide[:, 20:276], weight), gemv(x, weight))


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_a_row_does_not_depend_on_its_neighbours(rows: int, device: torch.device) -> None:
    x, weight, _ = inputs(rows, 16, 512, torch.bfloat16, device)
    other = torch.cat((x[:1], torch.randn_like(x[1:])))
    assert torch.equal(gemv(x, weight)[0], gemv(other, weight)[0])


def test_nothing_to_do(device: torch.device) -> None:
    assert gemv(torch.empty(0, 8, device=device), torch.ones(4, 8, device=device)).shape == (0, 4)
    assert gemv(torch.ones(2, 8, device=device), torch.empty(0, 8, device=device)).shape == (2, 0)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(MAX_ROWS + 1, 8), torch.ones(4, 8)),
        (torch.ones(1, 8), torch.ones(4, 9)),
        (torch.ones(1, 8), torch.ones(8, 4).T),
        (torch.ones(1, 16)[:, ::2], torch.ones(4, 8)),
        (torch.ones(1, 8), torch.ones(4, 8, dtype=torch.bfloat16)),
    ],
    ids=["too many rows", "K differs", "weight transposed", "x strided", "dtypes differ"],
)
def test_refuses_what_it_cannot_do(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(ValueError, match="gemv"):
        gemv(x, weight)


def test_is_worth_it_for_decode_only() -> None:
    bf16 = torch.bfloat16
    assert all(worth_it(1, n, k, bf16) for shapes in MODEL_SHAPES.values() for n, k in shapes)
    assert worth_it(8, 3584, 18944, bf16)
    assert not worth_it(8, 1536, 8960, bf16)
    assert not worth_it(MAX_ROWS + 1, 3584, 3584, bf16)
    assert not worth_it(1, 3584, 3584, torch.float32)
    assert not worth_it(1, 3584, 1001, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_equals_the_reference_at_size(model: str, rows: int, device: torch.device) -> None:
    for n, k in MODEL_SHAPES[model]:
        x, weight, bias = inputs(rows, n, k, torch.bfloat16, device)
        assert_near(gemv(x, weight, bias), gemv_reference(x, weight, bias))


def in_a_graph(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_a_replayed_chain_equals_launches_one_by_one(rows: int, device: torch.device) -> None:
    """The race test: kernels overlap in the graph, and their outputs reuse each other's memory."""
    sizes = [(6144, 1024), (1024, 3072), (4096, 1024), (1024, 2048)] * 8
    weights = [inputs(1, n, k, torch.bfloat16, device)[1] for n, k in sizes]
    x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16)

    def chain(wait: Callable[[], None]) -> Tensor:
        h = x
        for i, weight in enumerate(weights):
            h = gemv(h[:, : weight.shape[1]], weight)
            wait()
            if i % 4 == 1:  # a neighbour that is not launched as a dependent
                h = h.tanh()
                wait()
        return h

    graph, out = in_a_graph(lambda: chain(lambda: None))
    for _ in range(100):
        x.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, chain(torch.cuda.synchronize))
