"""Quantized layers as compressed-tensors has them in files, which transformers and vLLM read too.

`mixed` is ours alone, since compressed-tensors has no layer of two formats: its int8 codes and scales stand in the
files as those of w8a8 do, and beside them what stays as it was, `outlier_columns` [n] and `outlier_weight` [N, n].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mini_infer.calibration.layerwise import RoundedLayer, RoundedLinear
from mini_infer.calibration.recipe import Recipe
from mini_infer.core.errors import ConfigError
from mini_infer.quantization.formats import ActivationFormat, Number, WeightFormat, dequantize

OURS = "mini-infer"  # quant_method of what compressed-tensors has no name for


def require_library() -> None:
    """Raises ConfigError where compressed-tensors is not installed."""
    try:
        import compressed_tensors  # noqa: F401
    except ImportError:
        raise ConfigError(
            "quantized folders are written by compressed-tensors, which is not installed: pip install -e '.[quantize]'"
        ) from None


def layer_tensors(layer: RoundedLayer, recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """As the file has them, by whole names; what is not quantized in `dtype`."""
    tensors = {f"{layer.name}.{name}": value.to(dtype) for name, value in layer.others.items()}
    scheme = _scheme(recipe)
    for name, linear in layer.linears.items():
        for part, value in _compressed(linear, recipe.formats.weights, scheme, dtype).items():
            tensors[f"{layer.name}.{name}.{part}"] = value.contiguous().cpu()
    return tensors


def quantization_config(recipe: Recipe, kept: list[str]) -> dict[str, Any]:
    """For config.json. `kept`: names of the linear layers that are not quantized."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    scheme = _scheme(recipe)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=kept,
    ).model_dump(mode="json", exclude_none=True)
    if recipe.formats.outliers:
        config |= {"quant_method": OURS, "scheme": recipe.scheme}
    return config


def _compressed(linear: RoundedLinear, form: WeightFormat, scheme: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor

    quantized = linear.quantized
    # The library divides by the scales again, and rounds to the codes that these values were made of.
    state = {"weight": dequantize(quantized, form), "weight_scale": quantized.scales}
    if quantized.zeros is not None:
        state["weight_zero_point"] = (quantized.zeros.int() - 8).to(torch.int8)  # its codes are signed
    packed: dict[str, Tensor] = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
    packed["weight_scale"] = packed["weight_scale"].to(dtype)
    if linear.outliers is not None and linear.outlier_weight is not None:
        packed |= {"outlier_columns": linear.outliers, "outlier_weight": linear.outlier_weight.to(dtype)}
    return packed


def _scheme(recipe: Recipe) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    weights, activations = recipe.formats.weights, recipe.formats.activations
    kind, inputs = "pack-quantized", None  # weights alone: the format of theirs that vLLM has products for
    if activations is not None:
        kind = "float-quantized" if weights.number is Number.fp8 else "int-quantized"
        inputs = _activation_args(activations)
    return QuantizationScheme(targets=["Linear"], weights=_weight_args(weights), input_activations=inputs, format=kind)


def _weight_args(form: WeightFormat) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    shared: dict[str, Any] = {"strategy": "channel"}
    if form.rows > 1:
        shared = {"strategy": "block", "block_structure": [form.rows, form.columns]}
    elif form.columns is not None:
        shared = {"strategy": "group", "group_size": form.columns}
    return QuantizationArgs(**_number(form.number), symmetric=form.symmetric, **shared)


def _activation_args(form: ActivationFormat) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    shared = {"strategy": "group", "group_size": form.columns} if form.columns else {"strategy": "token"}
    return QuantizationArgs(**_number(form.number), symmetric=True, dynamic=True, **shared)


def _number(number: Number) -> dict[str, Any]:
    return {"num_bits": number.bits, "type": "float" if number is Number.fp8 else "int"}
