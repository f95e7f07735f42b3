"""Layer by layer: what a recipe makes of a decoder, in the memory of one layer and of the calibration's hidden states.

    hidden states [samples, length, H] --> layer, as it is ------> inputs of its linear layers --> method --> codes
              |                                                                                                 |
              '--------------------------> layer with these codes --> hidden states for the next layer <--------'

So each layer is calibrated on what the quantized layers before it make of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mini_infer.calibration.gptq import gptq
from mini_infer.calibration.migration import awq_scales, smoothquant_scales
from mini_infer.calibration.recipe import Method, Recipe
from mini_infer.calibration.scales import fitted, rounded
from mini_infer.calibration.stages import Inputs, Stage, find_stages, observe
from mini_infer.calibration.streamed import StreamedDecoder
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.quantization.formats import (
    ActivationFormat,
    Quantized,
    WeightFormat,
    dequantize,
    rounded_tokens,
)

Wanted = Callable[[str], bool]  # whether the linear layer of that name is quantized


def every(name: str) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class RoundedLinear:
    """One quantized linear layer.

    Attributes:
        outliers: input columns [n] int64 that stay as they were, whose codes are 0; None where there are none.
        outlier_weight: their weights [N, n] float32.
    """

    quantized: Quantized
    outliers: Tensor | None = None
    outlier_weight: Tensor | None = None

    def weight(self, form: WeightFormat) -> Tensor:
        """[N, K] float32."""
        whole = dequantize(self.quantized, form)
        if self.outliers is not None and self.outlier_weight is not None:
            whole[:, self.outliers] = self.outlier_weight
        return whole


@dataclass(frozen=True, eq=False)
class RoundedLayer:
    """
    Attributes:
        name: in the checkpoint: "model.layers.0".
        linears: by name within the layer.
        others: all its other parameters, by name within the layer, float32; norms may have taken up scales.
    """

    name: str
    linears: Mapping[str, RoundedLinear]
    others: Mapping[str, Tensor]

    @property
    def weights(self) -> dict[str, int]:
        """How many each of its quantized linear layers has, by name in the checkpoint."""
        return {f"{self.name}.{name}": linear.quantized.codes.numel() for name, linear in self.linears.items()}

    @property
    def num_weights(self) -> int:
        """Of its matrices."""
        kept = sum(value.numel() for value in self.others.values() if value.dim() == 2)
        return kept + sum(self.weights.values())

    def bits(self, recipe: Recipe, wanted: Wanted = every) -> int:
        """Of its matrices, scales and zeros included, where these linear layers are quantized. Scales, and what is not
        quantized, take 16."""
        bits = recipe.formats.weights.number.bits
        total = 16 * sum(value.numel() for value in self.others.values() if value.dim() == 2)
        for name, linear in self.linears.items():
            if not wanted(f"{self.name}.{name}"):
                total += 16 * linear.quantized.codes.numel()
                continue
            zeros, kept = linear.quantized.zeros, linear.outlier_weight
            total += bits * linear.quantized.codes.numel() + 16 * linear.quantized.scales.numel()
            total += (0 if zeros is None else 4 * zeros.numel()) + (0 if kept is None else 16 * kept.numel())
        return total


@torch.no_grad()
def quantized_layers(
    decoder: StreamedDecoder, recipe: Recipe, ids: Tensor | None, start: int = 0, hidden: Tensor | None = None
) -> Iterator[tuple[RoundedLayer, Tensor | None]]:
    """Each layer from `start` on, with the hidden states behind it [samples, length, H].

    Args:
        ids: calibration text [samples, length]; None where the recipe needs none.
        hidden: in front of layer `start`, where it is not the first and the recipe needs text.

    Raises ModelError, naming the tensor that cannot be quantized.
    """
    told: list[dict[str, Any]] = [{}] * len(decoder.layers)
    if recipe.needs_text:
        if ids is None:
            raise ConfigError(f"--method {recipe.method.value} needs calibration text")
        first, told = decoder.inputs(ids if start == 0 else ids[:1])
        if start == 0:
            hidden = first
        elif hidden is not None:
            hidden = hidden.to(first.device)  # what was kept comes from a file
        elif start < len(decoder.layers):
            raise ValueError(f"hidden states in front of layer {start} are missing")
    for index in range(start, len(decoder.layers)):
        with decoder.loaded(index) as layer:
            result = _Layer(decoder, index, layer, recipe, told[index], hidden).quantized()
            if hidden is not None:
                hidden = torch.cat([_call(layer, row[None], told[index]) for row in hidden])
        yield result, hidden


class _Layer:
    def __init__(
        self,
        decoder: StreamedDecoder,
        index: int,
        layer: nn.Module,
        recipe: Recipe,
        told: Mapping[str, Any],
        hidden: Tensor | None,
    ) -> None:
        self._name, self._layer, self._recipe, self._told, self._hidden = (
            decoder.layer_names[index], layer, recipe, told, hidden,
        )  # fmt: skip
        self._form, self._dtype = recipe.formats.weights, decoder.dtype

    def quantized(self) -> RoundedLayer:
        """Leaves the layer with its weights as the codes have them."""
        recipe, done = self._recipe, {}
        if self._hidden is None:
            linears = {n: m for n, m in self._layer.named_modules() if isinstance(m, nn.Linear)}
            for name, linear in self._chosen(linears).items():
                done[name] = RoundedLinear(rounded(linear.weight, self._form, self._dtype))
        else:
            stages = find_stages(self._layer, self._one)
            observed = observe(stages, self._all)
            if recipe.method in (Method.awq, Method.smoothquant):  # all, before weights that take up scales are rounded
                observed = [self._migrated(*seen) for seen in zip(stages, observed, strict=True)]
            for stage, inputs in zip(stages, observed, strict=True):
                for name, linear in self._chosen(stage.linears).items():
                    done[name] = self._linear(linear.weight, inputs)
        for name, found in done.items():
            self._layer.get_submodule(name).weight.data = found.weight(self._form)
        weights = {f"{name}.weight" for name in done}
        others = {n: p.detach().clone() for n, p in self._layer.named_parameters() if n not in weights}
        return RoundedLayer(self._name, done, others)

    def _chosen(self, linears: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
        chosen = {n: m for n, m in linears.items() if not self._recipe.keeps(f"{self._name}.{n}")}
        for name, linear in chosen.items():
            if self._form.columns and linear.in_features % self._form.columns:
                smaller = "--group 32 or 64" if self._form.rows == 1 else "--scheme fp8"
                raise ModelError(
                    f"{self._name}.{name} has {linear.in_features} input columns, which groups of "
                    f"{self._form.columns} do not divide: give {smaller}, or --keep {name}"
                )
        return chosen

    def _migrated(self, stage: Stage, inputs: Inputs) -> Inputs:
        if not self._chosen(stage.linears):
            return inputs
        if self._recipe.method is Method.awq:
            scales = awq_scales(stage.weight, inputs, self._form)
        else:
            scales = smoothquant_scales(stage.weight, inputs, self._recipe.formats, self._recipe.alpha)
        exact = stage.fold(scales, self._dtype, self._one)
        return inputs if exact is None else inputs.divided(exact)

    def _linear(self, weight: Tensor, inputs: Inputs) -> RoundedLinear:
        recipe, form = self._recipe, self._form
        if recipe.method is Method.gptq:
            return RoundedLinear(gptq(weight, inputs.gram, form, recipe.act_order, self._dtype))
        if recipe.method is Method.awq:
            return RoundedLinear(fitted(weight, form, inputs.gram.diagonal(), self._dtype))
        if not (count := recipe.formats.num_outliers(weight.shape[1])):
            return RoundedLinear(rounded(weight, form, self._dtype))
        columns = inputs.largest.topk(count).indices.sort().values
        rest = weight.index_fill(1, columns, 0.0)
        return RoundedLinear(rounded(rest, form, self._dtype), columns, weight[:, columns].to(self._dtype).float())

    def _one(self) -> Tensor:
        assert self._hidden is not None
        return _call(self._layer, self._hidden[:1], self._told)

    def _all(self) -> None:
        assert self._hidden is not None
        for row in self._hidden:
            _call(self._layer, row[None], self._told)


def _call(layer: nn.Module, hidden: Tensor, told: Mapping[str, Any]) -> Tensor:
    output = layer(hidden, **told)
    return output if isinstance(output, Tensor) else output[0]


class ComputesRounded(nn.Module):
    """A linear layer that computes as a quantized one does, in floating point: what kernels must agree with. Without
    `activations` these stay as they are."""

    weight: Tensor

    def __init__(
        self, rounded: RoundedLinear, form: WeightFormat, activations: ActivationFormat | None, bias: Any
    ) -> None:
        super().__init__()
        self.register_buffer("weight", rounded.weight(form))
        self.bias, self.activations, self._outliers = bias, activations, rounded.outliers

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] float32 -> [..., N]."""
        flat = x.reshape(-1, x.shape[-1])
        if self.activations is not None:
            exact = None if self._outliers is None else flat[:, self._outliers]
            rest = flat if self._outliers is None else flat.index_fill(1, self._outliers, 0.0)
            flat = rounded_tokens(rest, self.activations)
            if exact is not None:
                flat[:, self._outliers] = exact
        return nn.functional.linear(flat, self.weight, self.bias).view(*x.shape[:-1], -1)


def put_in(model: nn.Module, layer: RoundedLayer, recipe: Recipe, wanted: Wanted = every) -> None:
    """Makes a layer of a whole model of transformers, in float32, compute as the quantized one does.

    wanted: the linear layers that are quantized, by name in the model. Where others share scales with them, folded into
    what makes their inputs, the layer computes something else: for RTN and GPTQ.
    """
    inside, scheme = model.get_submodule(layer.name), recipe.formats
    for name, value in layer.others.items():
        inside.get_parameter(name).data = value.clone()
    for name, found in layer.linears.items():
        if wanted(f"{layer.name}.{name}"):
            bias = inside.get_submodule(name).bias
            inside.set_submodule(name, ComputesRounded(found, scheme.weights, scheme.activations, bias))
