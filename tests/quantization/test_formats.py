"""Codes and scales: what comes back is near, by half a step of the format at most."""

import pytest
import torch

from mini_infer.quantization.formats import (
    SCHEMES,
    ActivationFormat,
    Number,
    WeightFormat,
    dequantize,
    quantize,
    quantize_tokens,
    spread_scales,
)

FORMATS = [
    WeightFormat(Number.int8),
    WeightFormat(Number.fp8),
    WeightFormat(Number.fp8, columns=128, rows=128),
    WeightFormat(Number.int4, columns=32),
    WeightFormat(Number.int4, columns=128, symmetric=False),
]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 128), (130, 300), (1, 5)])
def test_a_value_comes_back_within_half_a_step(form, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    quantized = quantize(values, form)
    assert quantized.codes.shape == shape
    assert quantized.codes.dtype == form.number.code_dtype
    assert quantized.scales.shape == form.scales_shape(*shape)
    error = (dequantize(quantized, form) - values).abs()
    step = spread_scales(quantized.scales, form, values.shape)
    if form.number is Number.fp8:  # 3 bits behind the first one, or the smallest step
        assert (error <= torch.maximum(values.abs() / 16, step * 2**-10) * 1.0001).all()
    else:
        assert (error <= step * (0.5 if form.symmetric else 1.0) * 1.0001).all()


def test_the_largest_value_is_exact_and_zero_is_zero():
    values = torch.tensor([[0.0, -3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    for form in (form for form in FORMATS if form.symmetric):
        back = dequantize(quantize(values, form), form)
        assert back[0, 1] == pytest.approx(-3.0, rel=1e-6)
        assert (back[1] == 0).all()
        assert back[0, 0] == 0


def test_zeros_serve_values_that_lie_on_one_side():
    values = torch.rand(4, 128, generator=torch.Generator().manual_seed(1)) + 2.0
    errors = {
        symmetric: (dequantize(quantize(values, form), form) - values).abs().max()
        for symmetric in (True, False)
        for form in [WeightFormat(Number.int4, 128, symmetric=symmetric)]
    }
    assert errors[False] < 0.6 * errors[True]


def test_tokens_have_scales_of_their_own():
    x = torch.tensor([[1.0, -2.0, 0.5, 4.0], [100.0, 50.0, -200.0, 0.0]])
    codes, scales = quantize_tokens(x, ActivationFormat(Number.int8))
    assert scales.flatten().tolist() == pytest.approx([4 / 127, 200 / 127])
    assert codes.tolist()[0] == [32, -64, 16, 127]
    _, grouped = quantize_tokens(x, ActivationFormat(Number.fp8, columns=2))
    assert grouped.flatten().tolist() == pytest.approx([2 / 448, 4 / 448, 100 / 448, 200 / 448])


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[1.0, float("nan")]]), WeightFormat(Number.int8))


def test_every_scheme_is_stated():
    assert set(SCHEMES) == {"w8a8", "w8a16", "mixed", "fp8", "fp8_block", "w4a16"}
