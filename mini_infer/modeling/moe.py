"""Mixture of experts, the feed-forward of a layer in which every token has experts of its own.

    stream --> norm --> x --> gate --> route --> experts and their weights
                        |                             |
                        |----------------> experts ---+--> weighted sum --+--> stream
                        '----------------> shared experts, of all tokens -'

How a token's experts follow from the gate's product is RouterSpec's, and their products are one operation of the
kernels (kernels/interface.py). The host never learns who went where, so that a CUDA graph has it all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mini_infer.kernels.interface import RouterSpec, Stream, TokenPlaces
from mini_infer.modeling.layers import Layer, Linear
from mini_infer.modeling.linear_methods.base import Build, LinearShape, Parallel, empty_parameter
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.mlp import MLP
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.modeling.spec import ModelSpec, MoESpec


class MoE(nn.Module):
    def __init__(self, name: str, model: ModelSpec, spec: MoESpec, build: Build) -> None:
        super().__init__()
        names, size = spec.names, model.hidden_size
        name = f"{name.rpartition('.')[0]}.{names.block}"
        self.gate = Router(name, size, spec.router, build)
        self.experts = Experts(f"{name}.experts", size, spec, build)
        self.shared = None if spec.shared is None else MLP(f"{name}.{names.shared}", model, spec.shared, build)
        self.shared_gate = None
        if spec.shared_gate:
            self.shared_gate = Linear(name, size, {f"{names.shared}_gate": 1}, False, Parallel.column, build)
        self._kernels = build.kernels

    def forward(self, stream: Stream, tokens: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        x, total = self._kernels.add_rms_norm(stream)
        y = self.experts.forward(x, *self.gate.forward(x, tokens))
        if self.shared is not None:
            shared = self.shared.of(x)
            y = y + shared if self.shared_gate is None else y + self.shared_gate.of(x).sigmoid() * shared
        return y, total


class Router(Layer):
    """The gate of `name` ("model.layers.0.mlp"): which experts each token goes to. Not quantized in any format."""

    def __init__(self, name: str, size: int, spec: RouterSpec, build: Build) -> None:
        super().__init__()
        self._name, self._spec, self._kernels = name, spec, build.kernels
        if spec.float32_logits:
            build = dataclasses.replace(build, dtype=torch.float32)
        shape = LinearShape(size, {"gate": spec.num_experts}, False, Parallel.column)
        self._method = Unquantized.create(name, shape, build)
        self.weight, self.correction = self._method.weight, None
        if spec.correction_bias:
            self.correction = empty_parameter(spec.num_experts, dtype=torch.float32, device=build.device)

    def forward(self, x: Tensor, tokens: TokenPlaces) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (experts, weights), as Kernels.route."""
        logits = self._method.apply(x.to(self.weight.dtype))
        return self._kernels.route(logits, self.correction, self._spec, tokens)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        found = {"gate.weight": CheckpointTensor.copied_to(self.weight)}
        if self.correction is not None:
            found["gate.e_score_correction_bias"] = CheckpointTensor.copied_to(self.correction)
        return {f"{self._name}.{name}": tensor for name, tensor in found.items()}

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        draw(self.weight)
        if self.correction is not None:
            self.correction.zero_()


class Experts(Layer):
    """E experts below `name` ("model.layers.0.mlp.experts"), whose weights lie one after the other in memory."""

    def __init__(self, name: str, size: int, spec: MoESpec, build: Build) -> None:
        super().__init__()
        self._name, self._names, self._kernels = name, spec.names, build.kernels
        count, inner, on = spec.router.num_experts, spec.intermediate_size, (build.dtype, build.device)
        self.gate_up = empty_parameter(count, 2 * inner, size, dtype=on[0], device=on[1])
        self.down = empty_parameter(count, size, inner, dtype=on[0], device=on[1])

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._kernels.experts(x, ids, weights, self.gate_up, self.down)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        names = self._names
        found = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            for part, memory in ((names.gate, gate), (names.up, up), (names.down, down)):
                found[f"{self._name}.{expert}.{part}.weight"] = CheckpointTensor.copied_to(memory)
        return found

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        draw(self.gate_up)
        draw(self.down)
