"""Which linear layers mind being quantized most, and so are worth leaving as they are.

Each is quantized alone, and the model's answers are held against the unquantized one's. Divergences that small add up,
near enough: whoever leaves those alone that lose most for each of their weights gets most back for the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from mini_infer.calibration.layerwise import RoundedLayer, put_in
from mini_infer.calibration.recipe import Recipe


def sensitivities(
    model: nn.Module, layers: Sequence[RoundedLayer], recipe: Recipe, divergence: Callable[[nn.Module], float]
) -> dict[str, float]:
    """By name in the model: what `divergence` says of it while this linear layer alone is quantized. The model is left
    as it was. For methods that fold no scales into other layers: RTN and GPTQ."""
    found = {}
    for layer in layers:
        for name in (f"{layer.name}.{linear}" for linear in layer.linears):
            exact = model.get_submodule(name)
            put_in(model, layer, recipe, lambda each, name=name: each == name)  # type: ignore[misc]
            found[name] = divergence(model)
            model.set_submodule(name, exact)
    return found


def worth_leaving(sensitivity: Mapping[str, float], weights: Mapping[str, int], share: float) -> list[str]:
    """Names, those first that lose most for each of their weights, which together have at most `share` of all."""
    left, kept = share * sum(weights.values()), []
    for name in sorted(sensitivity, key=lambda each: sensitivity[each] / weights[each], reverse=True):
        if weights[name] <= left:
            left -= weights[name]
            kept.append(name)
    return kept
