from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.ops import TorchKernels
from mini_infer.kernels.silu_mul import silu_mul, silu_mul_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 64), (1, 1), (1, 18944), (3, 40), (5, 1025), (33, 256)]
BIG = [(8192, 4096), (1025, 18944), (300, 7)]


def check(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(rows * size)
    gate_up = (4 * torch.randn(rows, 2 * size, device=device)).to(dtype)
    kept = gate_up.clone()
    got, expected = silu_mul(gate_up), silu_mul_reference(gate_up)
    assert (got.shape, got.dtype) == ((rows, size), dtype)
    eps = torch.finfo(dtype).eps
    # Two roundings, each of which may fall to the other side.
    torch.testing.assert_close(got, expected, rtol=max(3 * eps, 1e-5), atol=1e-6)
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(*shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_equals_the_reference_at_size(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(*shape, dtype, device)


@pytest.mark.filterwarnings("ignore:overflow")  # by numpy, in the interpreter
def test_far_out(device: torch.device) -> None:
    """Where exp overflows, silu is 0."""
    gate = torch.tensor([-1000.0, -88.0, -30.0, 0.0, 30.0, 1000.0], device=device)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)))[None]
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=1e-5, atol=1e-30)


def test_what_is_more_is_added(device: torch.device) -> None:
    gate_up, more = torch.randn(2, 5, 2 * 1025, device=device)
    expected = silu_mul(gate_up + more)
    assert torch.equal(silu_mul(gate_up, more), expected)
    torch.testing.assert_close(TorchKernels().silu_mul(gate_up, more), expected)


def test_torch_kernels_equal_the_reference(device: torch.device) -> None:
    gate_up = torch.randn(3, 34, device=device)
    assert torch.equal(TorchKernels().silu_mul(gate_up), silu_mul_reference(gate_up))
