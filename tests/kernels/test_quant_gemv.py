"""Few rows times weights in fewer bits, and what rides along: against the kernels that they stand for."""

from __future__ import annotations

import pytest
import torch
from pairwise import kernel_cases

pytest.importorskip("triton")

from mini_infer.kernels.interface import Norm, Places, Stream
from mini_infer.kernels.ops import TorchKernels, TritonKernels
from mini_infer.kernels.quantized.gemv import quant_gemv
from mini_infer.kernels.quantized.linear import quantized_linear
from mini_infer.kernels.quantized.tiles import DotTile, FmaTile
from mini_infer.kernels.quantized.tokens import quantize_tokens
from mini_infer.kernels.rope_and_store import rope_and_store
from mini_infer.kernels.silu_mul import silu_mul
from mini_infer.modeling.layers import Linear
from mini_infer.modeling.linear_methods.base import Build, Parallel
from mini_infer.modeling.linear_methods.stored import stored_as
from mini_infer.quantization import formats
from mini_infer.quantization.checkpoint_config import rounding
from mini_infer.quantization.formats import ActivationFormat, Number, WeightFormat
from mini_infer.quantization.weight import QuantizedWeight, quantized_linear_reference

FORMS = [
    WeightFormat(Number.int8),
    WeightFormat(Number.fp8),
    WeightFormat(Number.int4, 128),
    WeightFormat(Number.int4, 64, symmetric=False),
    WeightFormat(Number.int4, 32),
    WeightFormat(Number.int4),
]
TILES = [FmaTile(4, 1, 2), DotTile(16, 256, 16, 1, 2, 1), DotTile(16, 128, 8, 1, 2, 3)]


def made(form: WeightFormat, out_size: int, in_size: int, device: torch.device) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out_size)
    weight = QuantizedWeight.of(formats.quantize(torch.randn(out_size, in_size, generator=generator), form), form)
    weight = weight._replace(scales=weight.scales / in_size**0.5)
    return QuantizedWeight(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in weight))


def drawn(rows, in_size, form, device):
    """x, what the kernels take of it, and its format."""
    activations = None if form.number is Number.int4 else ActivationFormat(form.number)
    x = torch.randn(rows, in_size, generator=torch.Generator().manual_seed(rows))
    x = x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float16)  # the interpreter cuts digits off bf16
    return x, x if activations is None else quantize_tokens(x, activations), activations


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_and_what_is_added(form, tile, device):
    for rows, out_size, in_size in ((3, 40, 384), (1, 24, 1152)):
        x, values, activations = drawn(rows, in_size, form, device)
        weight = made(form, out_size, in_size, device)
        bias, residual = (torch.randn(*shape, out_size).to(device, x.dtype) for shape in ((), (rows,)))
        found = quant_gemv(values, weight, bias, residual=residual, tile=tile)
        wide = quantized_linear_reference(x.double(), weight, bias, activations).to(x.dtype) + residual
        torch.testing.assert_close(found, wide, rtol=1e-2, atol=1e-2)
        if form.number is Number.int8:
            assert torch.equal(found, quantized_linear(values, weight, bias, activations, residual=residual))


@pytest.mark.parametrize("form", FORMS[2:], ids=str)
def test_fixed_point_of_x_is_not_what_limits_a_result(form, device):
    """Columns that differ by a factor of thousands, as activations have them; some of a row's groups are zeros."""
    x, _, _ = drawn(1, 1152, form, device)
    x[:, ::67] *= 3000
    x[:, 128:256] = 0
    weight = made(form, 40, 1152, device)
    exact = quantized_linear_reference(x.double(), weight, None, None)
    error = (quant_gemv(x, weight, tile=FmaTile(4, 1, 2)).double() - exact).norm() / exact.norm()
    rounding = (exact.to(x.dtype).double() - exact).norm() / exact.norm()
    assert error < 1.25 * rounding, (error, rounding)  # that of float16; of bfloat16 it would be eight times as large


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "column", "broken"),
    kernel_cases(FORMS[2:], [0, 75, 383], [float("nan"), float("inf"), -float("inf")]),
    ids=str,
)
def test_what_is_no_number_stays_none(form, column, broken, device):
    """In every result of that row of x, and of no other: whoever looks for such finds it."""
    x, _, _ = drawn(2, 384, form, device)
    x[0, column] = broken
    found = quant_gemv(x, made(form, 24, 384, device), tile=FmaTile(4, 1, 2))
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_what_rides_along_is_as_on_its_own(form, tile, device):
    rows, in_size, head = 2, 256, 16
    x, values, _ = drawn(rows, in_size, form, device)
    weight = made(form, 4 * head, in_size, device)
    bias = torch.randn(4 * head).to(device, x.dtype)
    plain = quant_gemv(values, weight, bias, tile=tile)
    close = {"rtol": 2**-7, "atol": 2**-9}  # the product is rounded to the next bf16 by chance
    torch.testing.assert_close(quant_gemv(values, weight, bias, silu_mul=True, tile=tile), silu_mul(plain), **close)

    def places() -> Places:
        slots = [torch.zeros(5, 1, head, dtype=x.dtype, device=device) for _ in range(2)]
        angles = torch.arange(rows * head, device=device, dtype=x.dtype).view(rows, 1, head)
        mapping = torch.tensor([3, 1], device=device)
        return Places(angles.cos(), angles.sin(), mapping, *slots)

    ours, theirs = places(), places()
    q = quant_gemv(values, weight, bias, places=ours, tile=tile)
    torch.testing.assert_close(q, rope_and_store(plain, None, theirs), **close)
    torch.testing.assert_close(ours.key_slots, theirs.key_slots, **close)
    torch.testing.assert_close(ours.value_slots, theirs.value_slots, **close)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a16"])
def test_a_layer_computes_what_torch_does(scheme, rows, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    size, inner, head = 128, 128, 16
    generator = torch.Generator().manual_seed(rows)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkv = {"q_proj": 2 * head, "k_proj": head, "v_proj": head}
    shapes = [
        (size, qkv, True),
        (size, {"gate_proj": inner, "up_proj": inner}, False),
        (inner, {"down_proj": size}, False),
    ]
    weights = [drawn(sum(parts.values()), k) / k**0.5 for k, parts, _ in shapes]
    stream = Stream(drawn(rows, size), drawn(rows, size), Norm(drawn(size).abs(), 1e-6))
    angles = drawn(rows, 1, head // 2)
    cos, sin = torch.cat((angles.cos(), angles.cos()), 2), torch.cat((-angles.sin(), angles.sin()), 2)
    found = []
    for kernels in (TorchKernels(), TritonKernels()):
        build = Build(dtype, device, kernels, stored_as(rounding(scheme, 128, True)))
        layers = [Linear("", k, parts, bias, Parallel.column, build) for k, parts, bias in shapes]
        for layer, weight in zip(layers, weights, strict=True):
            layer.method.round(weight, torch.ones(len(weight), device=device, dtype=dtype))
        slots = [torch.zeros(32, 1, head, dtype=dtype, device=device) for _ in range(2)]
        places = Places(cos, sin, torch.arange(rows, device=device), *slots)
        q, total = layers[0].heads_of_stream(stream, None, places)
        activated, _ = layers[1].of_stream(stream, silu_mul=True)
        x, residual = layers[2].add_to_stream(activated, total)
        found.append([q, total, *slots, x if residual is None else x + residual])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.06)  # a code's step is 6 % of fp8


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_parts_of_k_add_up_in_one_order(form, device):
    _, values, _ = drawn(8, 18944, form, device)
    weight = made(form, 3584, 18944, device)
    tile = DotTile(32, 256, 8, 1, 4, 4)
    expected = quant_gemv(values, weight, tile=tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [quant_gemv(values, weight, tile=tile) for _ in range(20)]
    graph.replay()
    assert all(torch.equal(y, expected) for y in found)
    if isinstance(values, torch.Tensor):
        alone = values[:1]
    else:
        alone = values._replace(codes=values.codes[:1], scales=values.scales[:1])
    assert torch.equal(quant_gemv(alone, weight, tile=tile), expected[:1])
