from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mini_infer.calibration.gptq import DAMPING, _inverse_factor, gptq
from mini_infer.calibration.migration import ALPHAS, awq_scales, product_error, smoothquant_scales
from mini_infer.calibration.scales import fitted, rounded
from mini_infer.calibration.stages import Inputs
from mini_infer.quantization.formats import (
    INT8,
    SCHEMES,
    Number,
    Quantized,
    WeightFormat,
    dequantize,
    encode,
    quantize_tokens,
)

W8A8 = SCHEMES["w8a8"]
FORMS = [
    WeightFormat(Number.int4, columns=32),
    WeightFormat(Number.int4, columns=32, symmetric=False),
    WeightFormat(Number.int4),
]


def inputs(tokens: int = 512, columns: int = 96) -> tuple[Tensor, Inputs]:
    """Correlated, with two columns far larger than the others and one that is never used."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 24, generator=generator) @ torch.randn(24, columns, generator=generator)
    x += 0.3 * torch.randn(tokens, columns, generator=generator)
    x[:, [5, 70]] *= 30
    x[:, 9] = 0
    return x, Inputs(x.T @ x, x.abs().amax(0), x.abs().sum(0), x)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(2))


def error(found: Quantized, weight: Tensor, form: WeightFormat) -> float:
    x, _ = inputs()
    return float((x @ (dequantize(found, form) - weight).T).square().sum())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_errs_less_than_rounding_to_nearest(weight: Tensor, form: WeightFormat, act_order: bool) -> None:
    _, seen = inputs()
    found = gptq(weight, seen.gram, form, act_order)
    low, high = (-8, 7) if form.symmetric else (0, 15)
    assert int(found.codes.min()) >= low
    assert int(found.codes.max()) <= high
    nearest = error(rounded(weight, form), weight, form)
    assert error(found, weight, form) < 0.5 * nearest
    assert error(fitted(weight, form, seen.gram.diagonal()), weight, form) < nearest


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [32, 48, 64])
def test_without_act_order_scales_are_those_of_weights_that_make_up_for_what_came_before(
    columns: int, symmetric: bool
) -> None:
    """Column by column as the paper has it, errors go to all columns behind at once; whatever the blocks of ours."""
    form, one = WeightFormat(Number.int4, columns, symmetric=symmetric), WeightFormat(Number.int4, symmetric=symmetric)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 96, generator=generator) @ torch.randn(96, 384, generator=generator)
    x += 0.3 * torch.randn(1024, 384, generator=generator)
    weight, gram = torch.randn(64, 384, generator=generator), x.T @ x
    factor = _inverse_factor(gram.clone(), DAMPING)

    def errs(scales_before: bool) -> float:
        work, before, made = weight.clone(), fitted(weight, form, gram.diagonal()), torch.empty_like(weight)
        for j in range(384):
            if j % columns == 0:
                own = slice(j, j + columns)
                found = fitted(work[:, own], form, gram.diagonal()[own])
                if scales_before:
                    zeros = None if before.zeros is None else before.zeros[:, j // columns, None]
                    found = Quantized(found.codes, before.scales[:, j // columns, None], zeros)
            code = encode(work[:, j, None], found.scales, found.zeros, one)
            made[:, j, None] = dequantize(Quantized(code, found.scales, found.zeros), one)
            work[:, j:] -= (work[:, j] - made[:, j])[:, None] / factor[j, j] * factor[j, j:]
        return product_error(made - weight, Inputs(gram, x, x, x))

    found = gptq(weight, gram, form, act_order=False)
    own = product_error(dequantize(found, form) - weight, Inputs(gram, x, x, x))
    assert own == pytest.approx(errs(scales_before=False), rel=0.02)
    assert own < 0.97 * errs(scales_before=True)


@pytest.mark.parametrize("form", FORMS)
def test_gptq_of_inputs_that_have_nothing_in_common_rounds_to_nearest(weight: Tensor, form: WeightFormat) -> None:
    found = gptq(weight, torch.eye(96), form)
    expected = fitted(weight, form, torch.ones(96))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)


def test_gptq_of_fewer_tokens_than_columns(weight: Tensor) -> None:
    x, _ = inputs(tokens=8)
    found = gptq(weight, x.T @ x, FORMS[0])
    assert bool(torch.isfinite(dequantize(found, FORMS[0])).all())


def test_scales_are_numbers_of_the_dtype_that_stores_them(weight: Tensor) -> None:
    _, seen = inputs()
    for found in (
        rounded(weight, INT8, torch.bfloat16),
        fitted(weight, FORMS[0], seen.gram.diagonal(), torch.bfloat16),
        gptq(weight, seen.gram, FORMS[0], dtype=torch.bfloat16),
    ):
        assert torch.equal(found.scales, found.scales.bfloat16().float())


@pytest.mark.parametrize("form", FORMS)
def test_awq_errs_less_than_without_scales(weight: Tensor, form: WeightFormat) -> None:
    _, seen = inputs()
    scales = awq_scales(weight, seen, form)
    found = dequantize(fitted(weight * scales, form, seen.gram.diagonal() / scales.square()), form) / scales
    alone = dequantize(fitted(weight, form, seen.gram.diagonal()), form)
    assert product_error(found - weight, seen) < product_error(alone - weight, seen)


def test_smoothquant_moves_outliers_to_the_weights(weight: Tensor) -> None:
    _, seen = inputs()
    half = smoothquant_scales(weight, seen, W8A8, 0.5)
    expected = seen.largest[5] / seen.largest[6] * weight[:, 6].abs().max() / weight[:, 5].abs().max()
    assert torch.allclose(half[5] / half[6], expected.sqrt())
    every = seen.divided(smoothquant_scales(weight, seen, W8A8, 1.0)).largest
    used = every[every > 0]
    assert float(used.max() / used.min()) == pytest.approx(1, abs=1e-3)  # all of it: activations are alike


def test_smoothquant_takes_what_errs_least(weight: Tensor) -> None:
    x, seen = inputs()

    def error(scales: Tensor) -> float:
        codes, of_tokens = quantize_tokens(x / scales, W8A8.activations)
        held = dequantize(rounded(weight * scales, INT8), INT8)
        return float((dequantize(Quantized(codes, of_tokens), INT8) @ held.T - x @ weight.T).norm())

    found = error(smoothquant_scales(weight, seen, W8A8))
    assert found < 0.5 * error(torch.ones(96)), "two columns are outliers"
    assert all(found <= error(smoothquant_scales(weight, seen, W8A8, alpha)) for alpha in ALPHAS)


def test_product_error_is_that_of_the_products(weight: Tensor) -> None:
    x, seen = inputs()
    difference = 0.01 * weight
    assert product_error(difference, seen) == pytest.approx(float((x @ difference.T).square().sum()), rel=1e-4)


def test_inputs_divided(weight: Tensor) -> None:
    x, seen = inputs()
    scales = torch.rand(96) + 0.5
    found, y = seen.divided(scales), x / scales
    torch.testing.assert_close(found.gram, y.T @ y, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found.largest, y.abs().amax(0))
