"""Gate and up of a batch in one kernel, with SiLU-mul."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from mini_infer.kernels.gated_linear import Tile, gated_linear, gated_linear_reference, tile_for, worth_it
from mini_infer.kernels.ops import InvariantKernels, TorchKernels, TritonKernels
from mini_infer.kernels.rms_norm import rms_norm
from mini_infer.modeling.linear_methods.base import LinearShape, Parallel
from mini_infer.modeling.linear_methods.unquantized import Unquantized

BF16 = torch.bfloat16
gated_linear_module = importlib.import_module("mini_infer.kernels.gated_linear")
ONE, TWO = Tile(32, 0, 32, 4, 2), Tile(64, 32, 32, 4, 2)  # products of a program


def inputs(rows: int, outs: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + outs + k)
    x = 3 * torch.randn(rows, k, device=device, dtype=dtype)
    return x, torch.randn(2 * outs, k, device=device, dtype=dtype) / k**0.5


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    # The interpreter cuts bfloat16 off instead of rounding it.
    assert (got.float() - expected.float()).norm() <= (1e-2 if got.is_cuda else 3e-2) * expected.float().norm()


@pytest.mark.parametrize("tile", [ONE, TWO], ids=["one product", "two products"])
@pytest.mark.parametrize(("rows", "outs", "k"), [(17, 48, 64), (65, 50, 72), (1, 7, 8)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_equals_the_reference(
    rows: int, outs: int, k: int, tile: Tile, dtype: torch.dtype, device: torch.device
) -> None:
    """The last program's columns, and columns of x, may lie beyond the end."""
    x, weight = inputs(rows, outs, k, dtype, device)
    assert_near(gated_linear(x, weight, tile=tile), gated_linear_reference(x, weight))


def test_rows_do_not_see_each_other(device: torch.device) -> None:
    x, weight = inputs(20, 48, 64, BF16, device)
    whole = gated_linear(x, weight, tile=TWO)
    x[1:].mul_(7)
    assert torch.equal(gated_linear(x, weight, tile=TWO)[0], whole[0])
    assert gated_linear(x[:0], weight).shape == (0, 48)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x, weight = inputs(20, 48, 64, BF16, device)
    for wrong in (
        (x.float(), weight.float()),
        (x, weight.half()),
        (x[:, :60].contiguous(), weight[:, :60].contiguous()),
        (x, weight[1:]),
        (torch.cat([x] * 7), weight),
        (x.t().contiguous().t(), weight),
    ):
        with pytest.raises(ValueError, match=r"up to 128 rows of a multiple of 8 numbers.*Call linear and silu_mul"):
            gated_linear(*wrong)


def test_parts_are_as_many_as_sms() -> None:
    assert tile_for(64, 18944) == Tile(256, 32, 64, 4, 4), "131.6 of them, of Qwen2.5-7B"
    assert tile_for(128, 18944) == Tile(256, 32, 64, 8, 4)
    assert tile_for(32, 8960)[:3] == (128, 16, 128), "124.4, of Qwen2.5-1.5B"
    assert tile_for(128, 14336)[:2] == (256, 0), "112, of Llama-3.1-8B, where 256 + 32 are 100"
    for rows in (17, 64, 65, 128):
        for outs in (3072, 4864, 8960, 11008, 14336, 18944, 27648):
            tile = tile_for(rows, outs)
            stage = (tile.wide + tile.rest + (64 if rows <= 64 else 128)) * tile.k * 2
            assert 2 <= tile.num_stages <= 4
            assert tile.num_stages * stage <= 227 * 1024, "shared memory of an H200's SM"


def test_where_it_is_worth_it() -> None:
    cpu = torch.device("cpu")
    assert worth_it(17, 18944, 3584, BF16, cpu)
    assert worth_it(64, 3072, 1024, BF16, cpu)
    assert not worth_it(128, 3072, 1024, BF16, cpu), "narrow parts and many rows have not been measured"
    assert not worth_it(16, 18944, 3584, BF16, cpu), "few rows are gemv's"
    assert not worth_it(129, 18944, 3584, BF16, cpu)
    assert not worth_it(64, 18944, 3584, torch.float32, cpu)
    assert not worth_it(64, 4864, 896, BF16, cpu), "76 parts at best for 132 SMs"


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_takes_it_where_nothing_is_added(bias: bool, device: torch.device) -> None:
    x, weight = inputs(17, 3072, 8, BF16, device)
    added = nn.Parameter(torch.randn(6144, device=device, dtype=BF16), False) if bias else None
    shape = LinearShape(8, {"gate_proj": 3072, "up_proj": 3072}, bias, Parallel.column)
    layer = Unquantized(nn.Parameter(weight, False), added, shape, TritonKernels())
    got = layer.apply_silu_mul(x)
    assert (got is None) == bias, "another kernel adds it, and SiLU-mul comes behind that"
    if got is not None:
        assert_near(got, gated_linear_reference(x, weight))


def test_gpus_with_less_shared_memory_do_without(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(17, 3072, 8, BF16, device)
    monkeypatch.setattr(gated_linear_module, "shared_memory", lambda device: 99 * 1024)
    assert TritonKernels().gated_linear(x, weight) is None


def test_whose_kernels_have_it(device: torch.device) -> None:
    x, weight = inputs(17, 3072, 8, BF16, device)
    assert TorchKernels().gated_linear(x, weight) is None
    assert InvariantKernels().gated_linear(x, weight) is None, "another order of sums than of more rows"
    kernels = TritonKernels()
    assert kernels.gated_linear(x[:16], weight) is None
    assert kernels.gated_linear(x.t().contiguous().t(), weight) is None, "its rows do not lie in memory one by one"
    got = kernels.gated_linear(x, weight)
    assert got is not None
    assert_near(got, gated_linear_reference(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 64, 128])
def test_a_replayed_chain_equals_launches_one_by_one(rows: int, device: torch.device) -> None:
    """The race test: kernels overlap in the graph, and their outputs reuse each other's memory."""
    layers = [inputs(1, 3072, 1024, BF16, device)[1] for _ in range(8)]
    downs = [torch.randn(1024, 3072, device=device, dtype=BF16) / 3072**0.5 for _ in layers]
    x, norm = torch.randn(rows, 1024, device=device, dtype=BF16), torch.ones(1024, device=device, dtype=BF16)

    def chain(wait: Callable[[], None]) -> Tensor:
        h = x
        for weight, down in zip(layers, downs, strict=True):
            h = rms_norm(h, norm, 1e-6)
            wait()
            h = gated_linear(h, weight)
            wait()
            h = h @ down.T  # a neighbour that is not launched as a dependent
            wait()
        return h

    chain(lambda: None)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(100):
        x.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, chain(torch.cuda.synchronize))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 64, 65, 128])
@pytest.mark.parametrize(("outs", "k"), [(18944, 3584), (8960, 1536), (3072, 1024), (14336, 4096)])
def test_at_size_and_replayed(rows: int, outs: int, k: int, device: torch.device) -> None:
    x, weight = inputs(rows, outs, k, BF16, device)
    expected = gated_linear_reference(x, weight)
    assert_near(gated_linear(x, weight), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            got = gated_linear(x, weight)
    for _ in range(3):
        graph.replay()
    assert_near(got, expected)
