"""Scales between a layer's inputs and its weights, folded into what makes the inputs: AWQ and SmoothQuant.

For any s > 0: x W^T = (x / s) (s W)^T. The first factor is folded into the norm, or the linear layer, that makes x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_infer.calibration.scales import rounded
from mini_infer.calibration.stages import Inputs
from mini_infer.quantization.formats import Scheme, WeightFormat, dequantize, rounded_tokens

EXPONENTS = tuple(step / 20 for step in range(20))
ALPHAS = tuple(step / 10 for step in range(2, 10))
_LEAST = 1e-4  # of scales: a column that is hardly used is not blown up without bound


def awq_scales(weight: Tensor, inputs: Inputs, form: WeightFormat) -> Tensor:
    """Lin et al. 2023 (AWQ, arXiv:2306.00978): columns with large inputs matter most, so they are scaled up before
    rounding. s = mean |x|^a, with the exponent a (0: nothing is scaled) that leaves the least error of the products.

    weight [N, K], of all layers that read the inputs -> scales [K].
    """
    best, least = torch.ones_like(inputs.mean), float("inf")
    for exponent in EXPONENTS:
        scales = _balanced(inputs.mean.clamp(min=1e-12) ** exponent)
        found = dequantize(rounded(weight * scales, form), form) / scales
        error = product_error(found - weight, inputs)
        if error < least:
            best, least = scales, error
    return best


def smoothquant_scales(weight: Tensor, inputs: Inputs, scheme: Scheme, alpha: float | None = None) -> Tensor:
    """Xiao et al. 2022 (SmoothQuant, arXiv:2211.10438): s = max |x|^alpha / max |W|^(1 - alpha), column by column: so
    much of what is hard to round in activations becomes the weights'.

    Where no alpha is given, it is the one that leaves the least error of some products with both rounded; or nothing is
    scaled, where that leaves less.
    """
    activations, weights = inputs.largest.clamp(min=1e-5), weight.abs().amax(0).clamp(min=1e-5)

    def scales_of(alpha: float) -> Tensor:
        return _balanced(activations**alpha / weights ** (1 - alpha))

    if alpha is not None:
        return scales_of(alpha)
    tried = [torch.ones_like(activations), *map(scales_of, ALPHAS)]
    return min(tried, key=lambda scales: _rounded_error(weight * scales, inputs.some / scales, scheme))


def _rounded_error(weight: Tensor, x: Tensor, scheme: Scheme) -> float:
    """Sum of squares of what rounding of both changes in x W^T."""
    assert scheme.activations is not None
    found = rounded_tokens(x, scheme.activations) @ dequantize(rounded(weight, scheme.weights), scheme.weights).T
    return float((found - x @ weight.T).square().sum())


def product_error(difference: Tensor, inputs: Inputs) -> float:
    """Sum of squares of what `difference` [N, K] of weights changes in the products with the calibration inputs."""
    return float((difference @ inputs.gram * difference).sum())


def _balanced(scales: Tensor) -> Tensor:
    """As many times above 1 as below, so that folding changes no magnitudes on the whole."""
    return (scales / (scales.max() * scales.min()).sqrt()).clamp(_LEAST, 1 / _LEAST)
