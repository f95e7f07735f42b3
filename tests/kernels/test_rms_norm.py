from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.interface import Norm, Part, Stream
from mini_infer.kernels.ops import TorchKernels, TritonKernels
from mini_infer.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from mini_infer.parallel.context import ONE_RANK

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 64), (1, 1), (1, 3584), (3, 40), (5, 1000), (64, 256)]
BIG = [(8192, 4096), (257, 3584), (8193, 1536), (1, 18944), (300, 7)]


def inputs(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight, of unequal scale."""
    torch.manual_seed(rows * size)
    x, residual = torch.randn(2, rows, size, device=device) * torch.tensor([0.3, 5.0], device=device)[:, None, None]
    return x.to(dtype), residual.to(dtype), (1 + 0.2 * torch.randn(size, device=device)).to(dtype)


def close(got: Tensor, expected: Tensor) -> None:
    """To the last bits: the interpreter cuts bfloat16 off where a GPU rounds."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(got, expected, rtol=max(2.5 * torch.finfo(got.dtype).eps, 1e-5), atol=1e-6)


def check(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = inputs(rows, size, dtype, device)
    kept = x.clone(), residual.clone()
    close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
    if device.type == "cuda" or dtype is not torch.bfloat16:
        assert torch.equal(total, expected_total)
    close(total, expected_total)
    close(normed, expected_normed)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(*shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_equals_the_reference_at_size(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(*shape, dtype, device)


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_more_is_added(alone: bool, device: torch.device) -> None:
    x, residual, weight = inputs(5, 1000, torch.float32, device)
    more, norm = torch.randn_like(x), Norm(weight, 1e-6)
    terms, added = Part(x, ONE_RANK, x.dtype, more=more), None if alone else residual
    expected = TorchKernels().add_rms_norm(Stream(x + more, added, norm))
    for kernels in (TorchKernels(), TritonKernels()):
        for ours, known in zip(kernels.add_rms_norm(Stream(terms, added, norm)), expected, strict=True):
            close(ours, known)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_kernels_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = inputs(7, 96, dtype, device)
    kernels = TorchKernels()
    normed, total = kernels.add_rms_norm(Stream(x, None, Norm(weight, 1e-5)))
    close(normed, rms_norm_reference(x, weight, 1e-5))
    assert total is x
    for got, expected in zip(
        kernels.add_rms_norm(Stream(x, residual, Norm(weight, 1e-5))),
        add_rms_norm_reference(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(got, expected)


def test_rows_of_zeros_and_of_large_numbers(device: torch.device) -> None:
    x = torch.tensor([[0.0] * 48, [3e4] * 48], device=device)
    for eps in (1e-6, 1e-1):
        close(
            rms_norm(x, torch.ones(48, device=device), eps), rms_norm_reference(x, torch.ones(48, device=device), eps)
        )
