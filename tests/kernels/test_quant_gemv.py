"""Few rows times weights in fewer bits, and what rides along: against the kernels that they stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.interface import Places
from mini_infer.kernels.quant_gemv import DotTile, FmaTile, quant_gemv
from mini_infer.kernels.quant_linear import quantized_linear
from mini_infer.kernels.quantize_tokens import quantize_tokens
from mini_infer.kernels.rope_and_store import rope_and_store
from mini_infer.kernels.silu_mul import silu_mul
from mini_infer.quantization import formats
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
