"""What of a layer is quantized together: linear layers that read the same input, and who makes that input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The output rows of the first are, times something, the input columns of the second, in the code of all decoders that
# have such names. A fold is checked all the same (`Stage.fold`).
_FOLLOWS = {"o_proj": "v_proj", "down_proj": "up_proj"}
_SAME = 1e-4  # relative error of a layer's outputs that float32 may make of a fold


@dataclass(frozen=True, eq=False)
class Stage:
    """
    Attributes:
        linears: by name within the layer, in the order of their calls.
        producer: the norm or linear layer whose output their input is, or is proportional to, column by column; None
            where none is known.
    """

    linears: Mapping[str, nn.Linear]
    producer: nn.Module | None

    @property
    def weight(self) -> Tensor:
        """Of all its linear layers, one under the other: [N, K]."""
        return torch.cat([linear.weight for linear in self.linears.values()])

    def fold(self, scales: Tensor, dtype: torch.dtype, output: Callable[[], Tensor]) -> Tensor | None:
        """Divides the input by `scales` [K], above 0, where it is made, and multiplies the weights by them. What makes
        the input is rounded to `dtype` first, in which it will be stored.

        Returns the scales as rounding left them; None, with nothing changed, where `output`, the layer's, would
        change, since somebody else reads the input too or the producer does not work like that.
        """
        if self.producer is None:
            return None
        before = output()
        saved = [(p, p.data.clone()) for m in (self.producer, *self.linears.values()) for p in m.parameters(False)]
        weight, bias = self.producer.get_parameter("weight"), getattr(self.producer, "bias", None)
        norm = weight.dim() == 1
        for offset in (0.0, 1.0) if norm else (0.0,):  # norms multiply by weight, or by 1 + weight
            exact = scales
            if norm:
                old = weight.data + offset
                weight.data = (old / scales - offset).to(dtype).float()
                exact = torch.where(old == 0, scales, old / (weight.data + offset))
            else:  # it is quantized itself, or stored in `dtype`
                weight.data = weight.data / scales[:, None]
            if isinstance(bias, Tensor):
                bias.data = bias.data / exact
            for linear in self.linears.values():
                linear.weight.data = linear.weight.data * exact
            error = (output() - before).norm() / before.norm()
            if float(error) < _SAME:
                return exact
            for parameter, data in saved:
                parameter.data = data.clone()
        return None


@dataclass
class Inputs:
    """Of one stage, over all calibration tokens.

    Attributes:
        gram: X^T X of its inputs X [tokens, K], float32.
        largest, mean: magnitude of each column [K].
        some: the inputs themselves of the first calibration sequence [length, K].
    """

    gram: Tensor
    largest: Tensor
    mean: Tensor
    some: Tensor

    def divided(self, scales: Tensor) -> Inputs:
        """Of inputs that are divided by `scales` [K]."""
        return Inputs(
            self.gram / scales[:, None] / scales, self.largest / scales, self.mean / scales, self.some / scales
        )


def find_stages(layer: nn.Module, run: Callable[[], Any]) -> list[Stage]:
    """Of a layer that `run` calls once."""
    by_input: list[tuple[Tensor, dict[str, nn.Linear]]] = []
    outputs: list[tuple[Tensor, nn.Module]] = []
    handles = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):

            def reads(linear: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                known = next((linears for x, linears in by_input if x is args[0]), None)
                if known is None:
                    by_input.append((args[0], known := {}))
                known[name] = linear  # type: ignore[assignment]

            handles.append(module.register_forward_pre_hook(reads))
        elif getattr(module, "weight", None) is not None and module.weight.dim() == 1:
            handles.append(module.register_forward_hook(lambda m, args, out: outputs.append((out, m))))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [Stage(linears, _producer(layer, x, linears, outputs)) for x, linears in by_input]


def _producer(
    layer: nn.Module, x: Tensor, linears: Mapping[str, nn.Linear], outputs: list[tuple[Tensor, nn.Module]]
) -> nn.Module | None:
    norm = next((module for out, module in outputs if out is x), None)
    if norm is not None or len(linears) > 1:
        return norm
    path, _, name = next(iter(linears)).rpartition(".")
    before = getattr(layer.get_submodule(path), _FOLLOWS.get(name, ""), None)
    fits = isinstance(before, nn.Linear) and before.out_features == next(iter(linears.values())).in_features
    return before if fits else None


def observe(stages: list[Stage], run: Callable[[], Any]) -> list[Inputs]:
    """Of each stage, while `run` calls the layer with all calibration tokens."""
    found: list[Inputs | None] = [None] * len(stages)
    handles = []
    for index, stage in enumerate(stages):

        def reads(linear: nn.Module, args: tuple[Tensor, ...], index: int = index) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            new = Inputs(x.T @ x, x.abs().amax(0), x.abs().sum(0), x)
            old = found[index]
            found[index] = new if old is None else Inputs(
                old.gram + new.gram, torch.maximum(old.largest, new.largest), old.mean + new.mean, old.some
            )  # fmt: skip

        handles.append(next(iter(stage.linears.values())).register_forward_pre_hook(reads))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [inputs for inputs in found if inputs is not None]
