from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.interface import Places, QKNorm
from mini_infer.kernels.ops import TorchKernels
from mini_infer.kernels.rope_and_store import rope_and_store, rope_and_store_reference
from mini_infer.modeling.rope import RopeSpec, RotaryTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Shape:
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm: bool = False


SHAPES = [
    Shape(0, 4, 2, 32),
    Shape(1, 28, 4, 128),
    Shape(1, 16, 8, 128, norm=True),
    Shape(3, 4, 4, 64),
    Shape(5, 3, 1, 20, norm=True),
    Shape(2, 6, 2, 96, norm=True),
    Shape(1, 1, 1, 2),
    Shape(70, 4, 2, 32, norm=True),
    Shape(130, 5, 1, 16),
]
BIG = [
    Shape(8192, 32, 8, 128, norm=True),
    Shape(8192, 28, 4, 128),
    Shape(256, 16, 8, 128, norm=True),
    Shape(1025, 12, 2, 80),
]


class Case:
    """Inputs of a step, and a cache in which unwritten slots are NaN."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(shape.tokens)
        heads = shape.q_heads + 2 * shape.kv_heads
        self.shape, self.dtype = shape, dtype
        self.qkv = torch.randn(shape.tokens, heads * shape.head_dim, device=device).to(dtype)
        self.q_weight, self.k_weight = (1 + 0.3 * torch.randn(2, shape.head_dim, device=device)).to(dtype)
        table = RotaryTable(RopeSpec(1e4), shape.head_dim, 1000, dtype, device)
        self.cos, self.sin = table(torch.randint(1000, (shape.tokens,), device=device))
        self.slots = shape.tokens + 7
        self.slot_mapping = torch.randperm(self.slots, device=device)[: shape.tokens]

    def cache(self) -> tuple[Tensor, Tensor]:
        shape = (self.slots, self.shape.kv_heads, self.shape.head_dim)
        keys, values = (torch.full(shape, torch.nan, dtype=self.dtype, device=self.qkv.device) for _ in range(2))
        return keys, values

    def run(self, function: object, wide: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(q, keys, values). wide: in float32 throughout."""
        assert callable(function)
        tensors = (self.qkv, self.q_weight, self.k_weight, self.cos, self.sin, *self.cache())
        qkv, q_weight, k_weight, cos, sin, keys, values = (tensor.float() if wide else tensor for tensor in tensors)
        qk_norm = QKNorm(q_weight, k_weight, 1e-6) if self.shape.norm else None
        q = function(qkv, qk_norm, Places(cos, sin, self.slot_mapping, keys, values))
        return q, keys, values


def check(shape: Shape, dtype: torch.dtype, device: torch.device, function: object = rope_and_store) -> None:
    case = Case(shape, dtype, device)
    kept = case.qkv.clone()
    q, keys, values = case.run(function)
    assert torch.equal(case.qkv, kept)
    assert (q.shape, q.dtype) == ((shape.tokens, shape.q_heads, shape.head_dim), dtype)
    expected_q, expected_keys, expected_values = case.run(rope_and_store_reference, wide=True)
    # NaN equals NaN: what no token owns is as it was.
    torch.testing.assert_close(values.float(), expected_values, rtol=0, atol=0, equal_nan=True)
    eps = torch.finfo(dtype).eps
    for got, expected in ((q, expected_q), (keys, expected_keys)):
        # Normed, multiplied, added: three roundings of numbers of up to about 5, which the interpreter cuts off.
        torch.testing.assert_close(got.float(), expected, rtol=2 * eps, atol=max(8 * eps, 2e-6), equal_nan=True)
        written = ~expected.isnan()
        if written.any():
            error = (got.float() - expected)[written].norm() / expected[written].norm()
            assert error < max(1.5 * eps, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    check(shape, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", BIG, ids=str)
def test_equals_the_reference_at_size(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    check(shape, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4], SHAPES[8]], ids=str)
def test_torch_kernels_equal_the_reference(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    check(shape, dtype, device, TorchKernels().rope_and_store)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
def test_rounds_once(norm: bool, device: torch.device) -> None:
    """Where torch rounds after every operation: what differs from it is closer to float32."""
    case = Case(Shape(90, 4, 2, 64, norm), torch.bfloat16, device)
    expected, _, _ = case.run(rope_and_store_reference, wide=True)
    ours, _, _ = case.run(rope_and_store)
    torchs, _, _ = case.run(TorchKernels().rope_and_store)
    assert (ours.float() - expected).norm() < 0.9 * (torchs.float() - expected).norm()


@pytest.mark.parametrize("kernel", [rope_and_store, TorchKernels().rope_and_store])
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_more_is_added(norm: bool, kernel: Callable[..., Tensor], device: torch.device) -> None:
    case = Case(Shape(5, 4, 2, 64, norm), torch.float32, device)
    more = torch.randn_like(case.qkv)
    ours = case.run(partial(kernel, more=more))
    case.qkv += more
    for part, expected in zip(ours, case.run(kernel), strict=True):
        assert torch.equal(part[~expected.isnan()], expected[~expected.isnan()])


def test_a_cache_of_another_dtype(device: torch.device) -> None:
    case = Case(Shape(4, 2, 1, 16), torch.float32, device)
    keys, values = (tensor.to(torch.bfloat16) for tensor in case.cache())
    rope_and_store(case.qkv, None, Places(case.cos, case.sin, case.slot_mapping, keys, values))
    _, expected_keys, expected_values = case.run(rope_and_store_reference)
    torch.testing.assert_close(keys.float(), expected_keys, rtol=1e-2, atol=1e-2, equal_nan=True)
    torch.testing.assert_close(values.float(), expected_values, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.gpu
def test_slots_beyond_32_bits(device: torch.device) -> None:
    """A store of tens of GB: slot * kv_heads * head_dim passes 2^31."""
    heads, head_dim = 8, 128
    slots = 2**31 // (heads * head_dim) + 100
    keys, values = (torch.zeros(slots, heads, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    case = Case(Shape(2, 8, heads, head_dim), torch.bfloat16, device)
    mapping = torch.tensor([slots - 1, 3], device=device)
    rope_and_store(case.qkv, None, Places(case.cos, case.sin, mapping, keys, values))
    v = case.qkv.view(2, 3 * heads, head_dim)[:, 2 * heads :]
    assert torch.equal(values[mapping], v)
    assert torch.count_nonzero(values[:, 0, :8]) == torch.count_nonzero(v[:, 0, :8])
    assert keys[mapping].count_nonzero() > 0.9 * keys[mapping].numel()
