"""Products with quantized weights: against their definition, over odd shapes, and the same to the bit in any batch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.quantized.linear import check, dequantize_weight, quantized_linear
from mini_infer.kernels.quantized.tiles import Tile, tile_for
from mini_infer.kernels.quantized.tokens import quantize_tokens
from mini_infer.kernels.rms_norm import add_rms_norm, quantized_rms_norm, rms_norm
from mini_infer.kernels.silu_mul import silu_mul
from mini_infer.quantization import formats
from mini_infer.quantization.formats import ActivationFormat, Number, WeightFormat
from mini_infer.quantization.packing import pack_int4, unpack_int4
from mini_infer.quantization.weight import QuantizedWeight, quantized_linear_reference

INT8, FP8 = ActivationFormat(Number.int8), ActivationFormat(Number.fp8)
FP8_GROUPS = ActivationFormat(Number.fp8, 128)
BLOCKS = WeightFormat(Number.fp8, columns=128, rows=128)
PAIRS = [
    (WeightFormat(Number.int8), INT8),
    (WeightFormat(Number.int8), None),
    (WeightFormat(Number.fp8), FP8),
    (WeightFormat(Number.fp8), None),
    (BLOCKS, FP8_GROUPS),
    (WeightFormat(Number.int4, 128), None),
    (WeightFormat(Number.int4, 64), None),
    (WeightFormat(Number.int4, 32, symmetric=False), None),
    (WeightFormat(Number.int4), None),
]


def made(form: WeightFormat, out_size: int, in_size: int, device: torch.device) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(out_size)
    weight = QuantizedWeight.of(formats.quantize(torch.randn(out_size, in_size, generator=generator), form), form)
    return QuantizedWeight(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in weight))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize(("rows", "out_size", "in_size", "bias"), [(1, 40, 128, True), (21, 136, 384, False)])
def test_equals_the_definition(pair, rows, out_size, in_size, bias, device):
    form, activations = pair
    torch.manual_seed(rows)
    dtype = torch.float32 if rows == 1 else torch.bfloat16
    x = torch.randn(rows, in_size).to(device, dtype)
    weight, b = made(form, out_size, in_size, device), torch.randn(out_size).to(device, dtype) if bias else None
    expected = quantized_linear_reference(x.double(), weight, b, activations).to(dtype)
    out = torch.full_like(expected, math.nan)
    assert quantized_linear(x, weight, b, activations, out) is out
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    atol = tolerance * math.sqrt(in_size)
    if activations is not None and activations.number is Number.fp8 and device.type == "cuda":
        products = x.double().abs() @ weight.dequantized(in_size).double().abs().T
        atol = max(atol, 2**-13 * float(products.max()))  # Hopper's tensor core keeps some 14 bits of a sum
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=atol)
    assert quantized_linear(x[:0], weight, b, activations).shape == (0, out_size)


@pytest.mark.parametrize("form", dict.fromkeys(form for form, _ in PAIRS), ids=str)
def test_a_weight_is_made_floating_again(form, device):
    weight = made(form, 136, 384, device)
    expected = weight.dequantized()
    assert torch.equal(dequantize_weight(weight, torch.float32), expected)
    rounded = dequantize_weight(weight, torch.bfloat16)
    if device.type == "cuda":
        assert torch.equal(rounded, expected.bfloat16())
    else:  # the interpreter cuts digits off
        torch.testing.assert_close(rounded.float(), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("form", [INT8, FP8, FP8_GROUPS], ids=str)
@pytest.mark.parametrize("shape", [(3, 128), (2, 200), (1, 3584), (2, 9000), (66, 4224)])
def test_tokens_are_quantized_to_the_bit(form, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    x[0] *= 1000
    if shape[0] > 1:
        x[1] = 0
    codes, scales, _ = quantize_tokens(x, form)
    expected_codes, expected_scales = formats.quantize_tokens(x, form)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.float(), expected_codes.float())


@pytest.mark.parametrize("form", [INT8, FP8, FP8_GROUPS], ids=str)
@pytest.mark.parametrize("size", [256, 4480])
def test_the_product_of_gate_and_up_is_quantized_to_the_bit(form, size, device):
    gate_up = torch.randn(2, 2 * size, generator=torch.Generator().manual_seed(size)).to(device, torch.bfloat16)
    tokens, expected = quantize_tokens(gate_up, form, silu_mul=True), quantize_tokens(silu_mul(gate_up), form)
    assert torch.equal(tokens.codes.float(), expected.codes.float())
    assert torch.equal(tokens.scales, expected.scales)


@pytest.mark.parametrize("form", [INT8, FP8_GROUPS], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_what_comes_before_a_product_quantizes_to_the_bit(form, added, device):
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(5, 256, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    weight = torch.rand(256, generator=generator).to(device, torch.bfloat16)
    if added:
        tokens, total = quantized_rms_norm(x, residual, weight, 1e-6, form)
        normed, expected_total = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, expected_total)
    else:
        tokens, total = quantized_rms_norm(x, None, weight, 1e-6, form)
        normed = rms_norm(x, weight, 1e-6)
        assert total is x
    expected = quantize_tokens(normed, form)
    assert torch.equal(tokens.codes.float(), expected.codes.float())
    assert torch.equal(tokens.scales, expected.scales)


def test_a_product_of_codes_plus_a_residual(device):
    torch.manual_seed(0)
    x, residual = torch.randn(3, 128).to(device), torch.randn(3, 40).to(device)
    weight = made(WeightFormat(Number.int8), 40, 128, device)
    expected = quantized_linear(x, weight, None, INT8) + residual
    assert torch.equal(quantized_linear(quantize_tokens(x, INT8), weight, None, INT8, residual=residual), expected)


def test_packed_codes_come_back():
    generator = torch.Generator().manual_seed(0)
    for symmetric, low in ((True, -8), (False, 0)):
        codes = torch.randint(low, low + 16, (5, 256), generator=generator, dtype=torch.int8)
        packed = pack_int4(codes, symmetric)
        assert packed.shape == (5, 128)
        assert torch.equal(unpack_int4(packed, symmetric), codes)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_row_is_the_same_to_the_bit_in_any_batch(pair, device):
    form, activations = pair
    torch.manual_seed(0)
    x = torch.randn(600, 3584, device=device, dtype=torch.bfloat16)
    weight = made(form, 1000, 3584, device)
    every = quantized_linear(x, weight, None, activations, one_order=True)
    for rows in (1, 2, 17, 64, 65, 256, 300):
        assert torch.equal(quantized_linear(x[:rows], weight, None, activations, one_order=True), every[:rows]), rows
        assert torch.equal(quantized_linear(x[-rows:], weight, None, activations, one_order=True), every[-rows:]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_tiles_that_share_an_sm_leave_each_others_registers_alone(pair, device):
    form, activations = pair
    torch.manual_seed(0)
    x = torch.randn(256, 3584, device=device, dtype=torch.bfloat16)
    weight = made(form, 18944, 3584, device)
    expected = quantized_linear_reference(x.float(), weight, None, activations)
    for tile in (None, Tile(128, 128, 128, 8, 3)):
        found = [quantized_linear(x, weight, None, activations, tile=tile) for _ in range(10)]
        assert all(torch.equal(y, found[0]) for y in found)
        assert (found[0] - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("form", "activations", "in_size", "message"),
    [
        (WeightFormat(Number.int4, 128), INT8, 128, "int4 weights take activations as they are"),
        (WeightFormat(Number.int4, 16), None, 128, "groups of 32, 64 or 128 columns"),
        (WeightFormat(Number.int8), FP8, 128, "of one format"),
        (WeightFormat(Number.int8, 64), INT8, 128, "a scale a row"),
        (WeightFormat(Number.int8), INT8, 120, "a multiple of 16 columns"),
    ],
)
def test_what_does_not_go_together_is_named(form, activations, in_size, message):
    with pytest.raises(ValueError, match=message):
        check(form, activations, in_size)


@pytest.mark.parametrize("form", [WeightFormat(Number.int8), WeightFormat(Number.int4, 64)], ids=str)
@pytest.mark.parametrize("tile", [Tile(16, 64, 128, 4, 2), Tile(16, 64, 128, 4, 2, splits=3)])
def test_a_tile_of_ones_own(tile, form, device):
    x, weight = torch.randn(3, 896, generator=torch.Generator().manual_seed(1)).to(device), made(form, 24, 896, device)
    assert tile != tile_for(3, form.number, 24, 896)
    expected = quantized_linear_reference(x.double(), weight).float()
    out = quantized_linear(x, weight, tile=tile)
    # Near 0 a sum is off by a part of what was added up, which is of the size sqrt(896).
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6 * math.sqrt(896))
