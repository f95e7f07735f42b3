"""gemv with its neighbours' work: a norm before, SiLU-mul and a residual behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import kernel_cases
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.gemv import gemv, gemv_reference, takes_norm
from mini_infer.kernels.rms_norm import add_rms_norm, rms_norm
from mini_infer.kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
STEPS = ["norm", "silu", "residual", "norm silu", "norm silu residual"]
SHAPES = [(8, 512), (22, 300), (6, 7), (2, 1)]  # [N, K]
MODEL_SHAPES = {"Qwen2.5-0.5B": (896, 1152, 4864), "Qwen3-0.6B": (1024, 4096, 3072), "Qwen2.5-7B": (3584, 4608, 18944)}


class Case:
    """Inputs of gemv for `steps`, words of STEPS."""

    def __init__(
        self, steps: str, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        torch.manual_seed(rows + 3 * n + 5 * k)
        self.x = 3 * torch.randn(rows, k, device=device, dtype=dtype)
        self.weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
        outs = n // 2 if "silu" in steps else n
        self.residual = torch.randn(rows, outs, device=device, dtype=dtype) if "residual" in steps else None
        self.norm = (torch.rand(k, device=device, dtype=dtype) + 0.5, EPS) if "norm" in steps else None
        self.bias = torch.randn(n, device=device, dtype=dtype) if bias else None
        self.silu_mul = "silu" in steps
        if device.type == "cuda":  # gemv reads weights ahead of the kernels before it
            torch.cuda.synchronize()

    def run(self, compute: Any = gemv) -> Tensor:
        return compute(self.x, self.weight, self.bias, norm=self.norm, residual=self.residual, silu_mul=self.silu_mul)


def assert_near(got: Tensor, expected: Tensor, times: float = 1) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert got.isfinite().all()
    # The interpreter cuts bfloat16 off instead of rounding it, up to four times on the way.
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2 if got.is_cuda else 3e-2
    assert (got.float() - expected.float()).norm() <= times * tolerance * expected.float().norm()


@pytest.mark.parametrize(
    ("steps", "shape", "rows", "dtype"), kernel_cases(STEPS, SHAPES, [1, 2, 3, 4, 7], DTYPES), ids=str
)
def test_equals_the_reference(
    steps: str, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(steps, rows, *shape, dtype, device, bias=rows % 2 == 1)
    assert_near(case.run(), case.run(gemv_reference))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_equal_inputs_give_equal_bits_and_rows_do_not_see_each_other(rows: int, device: torch.device) -> None:
    case = Case("norm silu residual", rows, 12, 700, torch.bfloat16, device)
    whole = case.run()
    assert torch.equal(case.run(), whole)
    case.x[1:].mul_(7)
    assert torch.equal(case.run()[0], whole[0])


@pytest.mark.parametrize("rows", [1, 5])
def test_a_norm_of_zeros_is_zero(rows: int, device: torch.device) -> None:
    case = Case("norm", rows, 8, 64, torch.bfloat16, device)
    case.x.zero_()
    assert not case.run().any()


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_of_x_may_lie_apart(rows: int, device: torch.device) -> None:
    case = Case("norm residual", rows, 10, 64, torch.float32, device)
    expected = case.run()
    wide = torch.full((rows, 100), float("nan"), device=device)
    wide[:, 20:84] = case.x
    case.x = wide[:, 20:84]
    assert torch.equal(case.run(), expected)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    case = Case("norm residual", 2, 10, 64, torch.float32, device)
    case.residual = torch.ones(2, 9, device=device)
    with pytest.raises(ValueError, match=r"residual of gemv is contiguous, \(2, 10\), not \(2, 9\)"):
        case.run()
    case = Case("norm", 2, 10, 64, torch.float32, device)
    case.norm = (torch.ones(10, device=device), EPS)
    with pytest.raises(ValueError, match=r"gemv's norm is \(64,\), not \(10,\)"):
        case.run()


def test_where_the_norm_is_worth_it() -> None:
    assert takes_norm(1, 3584)
    assert takes_norm(3, 896)
    assert not takes_norm(2, 3584), "its squares would take the registers of the products"
    assert not takes_norm(4, 896), "tensor cores take the products"


def chain(case: dict[str, Tensor], fused: bool) -> Tensor:
    """A layer without attention, whose place the queries take."""
    x, g, qkv_weight, o_weight, gate_up_weight, down_weight = case.values()
    heads = o_weight.shape[1]
    if fused:
        qkv = gemv(x, qkv_weight, norm=(g, EPS))
        x = gemv(qkv[:, :heads], o_weight, residual=x)
        return gemv(gemv(x, gate_up_weight, norm=(g, EPS), silu_mul=True), down_weight, residual=x)
    qkv = gemv(rms_norm(x, g, EPS), qkv_weight)
    normed, x = add_rms_norm(gemv(qkv[:, :heads], o_weight), x, g, EPS)
    return x + gemv(silu_mul(gemv(normed, gate_up_weight)), down_weight)


def chain_inputs(
    rows: int, hidden: int, qkv: int, inner: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    sizes = {"qkv": (qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    weights = {name: torch.randn(size, device=device, dtype=dtype) / size[1] ** 0.5 for name, size in sizes.items()}
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    inputs = {"x": x, "g": torch.rand(hidden, device=device, dtype=dtype) + 0.5, **weights}
    if device.type == "cuda":
        torch.cuda.synchronize()
    return inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_layer_equals_one_of_unfused_kernels(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    case = chain_inputs(rows, 32, 40, 24, dtype, device)
    assert_near(chain(case, fused=True), chain(case, fused=False))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_a_layer_at_size_and_replayed(model: str, rows: int, device: torch.device) -> None:
    """The race test too: kernels overlap in the graph, and their outputs reuse each other's memory."""
    case = chain_inputs(rows, *MODEL_SHAPES[model], torch.bfloat16, device)
    assert_near(chain(case, fused=True), chain(case, fused=False))

    def layers() -> Tensor:
        x = case["x"]
        for _ in range(6):
            x = chain(case | {"x": x}, fused=True)
        return x

    expected = layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
