"""The product that gives attention its operands: rotated, and stored in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.gemv import gemv, qkv_gemv, qkv_gemv_reference, takes_heads, takes_norm
from mini_infer.kernels.interface import Places
from mini_infer.kernels.rope_and_store import rope_and_store
from mini_infer.modeling.rope import RopeSpec, RotaryTable

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    q_heads: int
    kv_heads: int
    head_dim: int
    k: int

    def __str__(self) -> str:
        return f"{self.q_heads}-{self.kv_heads}-{self.head_dim}-{self.k}"


SHAPES = [Shape(3, 1, 64, 72), Shape(2, 2, 16, 300), Shape(1, 1, 128, 40)]
SMALL = Shape(3, 1, 16, 24)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (1, 2, 3, 4, 8, 16)
# Triton's interpreter is slow: there each number of rows has one shape, and one dtype.
ROWS_AND_SHAPES = list(product(ROWS, SHAPES) if torch.cuda.is_available() else zip(ROWS, cycle(SHAPES)))
ROWS_AND_DTYPES = list((product if torch.cuda.is_available() else zip)((1, 3, 5), DTYPES))
MODEL_SHAPES = {
    "Qwen2.5-0.5B": Shape(14, 2, 64, 896),
    "Qwen2.5-7B": Shape(28, 4, 128, 3584),
    "Llama-3-8B": Shape(32, 8, 128, 4096),
}


class Case:
    """Inputs of qkv_gemv for `steps`, words of "norm bias", and a cache in which unwritten slots are NaN."""

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, steps: str = "") -> None:
        torch.manual_seed(rows + shape.k)
        n = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
        self.shape = shape
        self.x = torch.randn(rows, shape.k, device=device, dtype=dtype)
        self.weight = torch.randn(n, shape.k, device=device, dtype=dtype) / shape.k**0.5
        self.bias = torch.randn(n, device=device, dtype=dtype) if "bias" in steps else None
        self.norm = (torch.rand(shape.k, device=device, dtype=dtype) + 0.5, EPS) if "norm" in steps else None
        table = RotaryTable(RopeSpec(1e4), shape.head_dim, 1000, dtype, device)
        self.cos, self.sin = table(torch.randint(1000, (rows,), device=device))
        self.slots = rows + 9
        self.slot_mapping = torch.randperm(self.slots, device=device)[:rows]
        if device.type == "cuda":  # gemv reads weights ahead of the kernels before it
            torch.cuda.synchronize()

    def places(self) -> Places:
        size = (2, self.slots, self.shape.kv_heads, self.shape.head_dim)
        keys, values = torch.full(size, torch.nan, dtype=self.x.dtype, device=self.x.device)
        return Places(self.cos, self.sin, self.slot_mapping, keys, values)

    def run(self, compute: Any = qkv_gemv) -> tuple[Tensor, Tensor, Tensor]:
        """(q, keys, values)"""
        places = self.places()
        q = compute(self.x, self.weight, self.bias, places, norm=self.norm)
        return q, places.key_slots, places.value_slots


def unfused(
    x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    return rope_and_store(gemv(x, weight, bias, norm=norm), None, places)


def assert_near(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for ours, right in zip(got, expected, strict=True):
        assert (ours.shape, ours.dtype) == (right.shape, right.dtype)
        assert torch.equal(ours.isnan(), right.isnan()), "the same slots are written, and no others"
        ours, right = ours.nan_to_num().float(), right.nan_to_num().float()
        assert (ours - right).norm() <= tolerance * right.norm()


def check_against_reference(case: Case) -> None:
    # The interpreter cuts bfloat16 off instead of rounding it.
    tolerance = 1e-5 if case.x.dtype == torch.float32 else 1e-2 if case.x.is_cuda else 3e-2
    assert_near(case.run(), case.run(qkv_gemv_reference), tolerance)


def check_against_unfused(case: Case) -> None:
    """What they round is the same: only a last bit of the sums and of the rotation may differ."""
    assert_near(case.run(), case.run(unfused), 1e-6 if case.x.dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize(("rows", "shape"), ROWS_AND_SHAPES, ids=str)
def test_equals_the_reference(rows: int, shape: Shape, device: torch.device) -> None:
    check_against_reference(Case(shape, rows, torch.bfloat16, device, "bias" if rows % 2 else ""))


@pytest.mark.parametrize(("rows", "dtype"), ROWS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("steps", ["", "bias", "norm", "norm bias"])
def test_with_and_without_norm_and_bias(steps: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(SMALL, rows, dtype, device, steps)
    check_against_reference(case)
    check_against_unfused(case)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_equal_inputs_give_equal_bits_and_rows_do_not_see_each_other(rows: int, device: torch.device) -> None:
    case = Case(SMALL, rows, torch.bfloat16, device)
    q, keys, values = case.run()
    case.x[1:].mul_(7)
    again = case.run()
    slot = case.slot_mapping[0]
    assert torch.equal(again[0][0], q[0])
    assert torch.equal(again[1][slot], keys[slot])
    assert torch.equal(again[2][slot], values[slot])


def test_values_are_not_turned(device: torch.device) -> None:
    """Not even by an angle that is no number."""
    case = Case(SMALL, 2, torch.float32, device)
    case.cos, case.sin = torch.full_like(case.cos, torch.nan), torch.full_like(case.sin, torch.nan)
    _, _, values = case.run()
    heads = gemv(case.x, case.weight).unflatten(1, (-1, SMALL.head_dim))
    torch.testing.assert_close(values[case.slot_mapping], heads[:, -SMALL.kv_heads :])


def test_no_tokens(device: torch.device) -> None:
    q, keys, values = Case(SMALL, 0, torch.bfloat16, device).run()
    assert q.shape == (0, 3, 16)
    assert keys.isnan().all()
    assert values.isnan().all()


@pytest.mark.parametrize(
    ("heads", "cache", "fits"),
    [(16, torch.bfloat16, True), (80, torch.bfloat16, True), (24, torch.bfloat16, False), (16, torch.float32, False)],
    ids=["16", "80", "24 dimensions", "float32 cache"],
)
def test_refuses_heads_that_do_not_fit(heads: int, cache: torch.dtype, fits: bool, device: torch.device) -> None:
    case = Case(Shape(1, 1, heads, 8), 1, torch.bfloat16, device)
    places = case.places()
    places = places._replace(key_slots=places.key_slots.to(cache), value_slots=places.value_slots.to(cache))
    assert takes_heads(torch.bfloat16, places) == fits
    if not fits:
        with pytest.raises(ValueError, match=r"qkv_gemv takes heads of a multiple of 16 .* Call gemv and"):
            qkv_gemv(case.x, case.weight, None, places)


def test_refuses_what_gemv_refuses(device: torch.device) -> None:
    case = Case(SMALL, 17, torch.bfloat16, device)
    with pytest.raises(ValueError, match="up to 16 rows, not 17"):
        case.run()
    case = Case(SMALL, 1, torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"weight \(32, 24\)"):
        qkv_gemv(case.x, case.weight[:32], None, case.places())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_at_size_and_replayed(model: str, rows: int, device: torch.device) -> None:
    """The race test too: kernels overlap in the graph, angles and slots are written just before them, and their outputs
    reuse each other's memory."""
    shape = MODEL_SHAPES[model]
    steps = "norm bias" if takes_norm(rows, shape.k) else "bias"
    cases = [Case(shape, rows, torch.bfloat16, device, steps) for _ in range(6)]
    check_against_reference(cases[0])
    check_against_unfused(cases[0])
    places = [case.places() for case in cases]
    back = torch.randn(shape.k, shape.q_heads * shape.head_dim, device=device, dtype=torch.bfloat16) / shape.k**0.5
    table = RotaryTable(RopeSpec(1e4), shape.head_dim, 1000, torch.bfloat16, device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    torch.cuda.synchronize()

    def layers() -> Tensor:
        x = cases[0].x
        cos, sin = table(positions)
        slots = positions % cases[0].slots
        for case, place in zip(cases, places, strict=True):
            here = Places(cos, sin, slots, place.key_slots, place.value_slots)
            q = qkv_gemv(x, case.weight, case.bias, here, norm=case.norm)
            x = gemv(q.flatten(1), back, residual=x)
        return x

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for i in range(20):
        positions.copy_(torch.arange(rows, device=device) + 7 * i)
        found = []
        for step in (graph.replay, lambda: out.copy_(layers())):
            for place in places:
                place.key_slots.fill_(torch.nan)
                place.value_slots.fill_(torch.nan)
            out.fill_(torch.nan)
            step()
            found.append([out.clone(), *(place.key_slots.clone() for place in places)])
            found[-1] += [place.value_slots.clone() for place in places]
        for replayed, launched in zip(*found, strict=True):
            assert torch.equal(replayed.nan_to_num(), launched.nan_to_num())
        assert not found[0][0].isnan().any()
