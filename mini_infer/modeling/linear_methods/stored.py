"""Which linear method computes with what a folder holds: one for all parts of a layer, or one for each; and weights
that are made floating when they have been read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearMethodFactory, LinearShape
from mini_infer.modeling.linear_methods.quantized import QuantizedLinear
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.parallel.context import ONE_RANK
from mini_infer.quantization.checkpoints import ModelFormat
from mini_infer.quantization.formats import WeightFormat


def stored_as(model: ModelFormat) -> LinearMethodFactory:
    """Linear methods for weights that a folder holds in this form."""

    def create(name: str, shape: LinearShape, build: Build) -> LinearMethod:
        formats = {part: model.layer(f"{name}.{part}" if name else part) for part in shape.parts}
        first = next(iter(formats.values()))
        if any(layer != first for layer in formats.values()):
            return SideBySide(name, shape, build, create)
        if first is None:
            return Unquantized.create(name, shape, build)
        if len(shape.parts) > 1 and not _fit_together(first.scheme.weights, shape):
            return SideBySide(name, shape, build, create)
        return QuantizedLinear(name, shape, build, first)

    return create


def _fit_together(form: WeightFormat, shape: LinearShape) -> bool:
    """Whether every part begins with a scale of its own."""
    *above, _ = shape.parts.values()
    return all(size % form.rows == 0 for size in above)


class Dequantized(Unquantized):
    """As `kept_plain` says."""

    _stored: QuantizedLinear | None = None  # on the CPU, until all of it is there

    @classmethod
    def create(cls, name: str, shape: LinearShape, build: Build) -> Dequantized:
        plain = super().create(name, shape, build)
        assert isinstance(plain, Dequantized)
        near = build.device if build.device.type == "meta" else torch.device("cpu")
        stored = build.linear_method(name, shape, replace(build, device=near, kernels=TorchKernels()))
        if isinstance(stored, QuantizedLinear) and not stored.rounds:
            plain._stored = stored
        return plain

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return super().checkpoint_tensors() if self._stored is None else self._stored.checkpoint_tensors()

    def loaded(self) -> None:
        if self._stored is not None:
            self._stored.loaded()
            self.weight.copy_(self._stored.dequantized())
            self._stored = None


def kept_plain(create: LinearMethodFactory) -> LinearMethodFactory:
    """Of weights that are computed with, though not as products of their own: they are read as `create` has them, and
    kept in the model's dtype."""
    return lambda name, shape, build: Dequantized.create(name, shape, replace(build, linear_method=create))


class SideBySide(LinearMethod):
    """Parts that no one product can have: of different formats, or whose blocks of rows would overlap. Each has its
    own, and their outputs stand side by side."""

    def __init__(self, name: str, shape: LinearShape, build: Build, create: LinearMethodFactory) -> None:
        self._name, self._shape, self._build = name, shape, build
        self._methods = {
            part: create(name, replace(shape, parts={part: size}), build) for part, size in shape.parts.items()
        }

    def weights(self) -> dict[str, nn.Parameter]:
        own = {part: method.weights() for part, method in self._methods.items()}
        return {f"{part}_{name}": weight for part, weights in own.items() for name, weight in weights.items()}

    def apply(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([method.apply(x) for method in self._methods.values()], dim=1)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return {
            name: tensor for method in self._methods.values() for name, tensor in method.checkpoint_tensors().items()
        }

    def loaded(self) -> None:
        for method in self._methods.values():
            method.loaded()

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        plain, start = Unquantized.create(self._name, self._shape, replace(self._build, parallel=ONE_RANK)), 0
        plain.fill_dummy(draw)
        for part, size in self._shape.parts.items():
            method, rows = self._methods[part], slice(start, start + size)
            bias = None if plain.bias is None else plain.bias[rows]
            if isinstance(method, QuantizedLinear):
                method.round(plain.weight[rows], bias)
            else:
                for name, own in method.weights().items():
                    own.copy_(getattr(plain, name)[rows])
            start += size
