"""Mixture of experts, the feed-forward of a layer in which every token has experts of its own.

    stream --> norm --> x --> gate --> route --> experts and their weights
                        |                             |
                        |----------------> experts ---+--> weighted sum --+--> stream
                        '----------------> shared experts, of all tokens -'

How a token's experts follow from the gate's product is RouterSpec's, and their products are one operation of the
kernels (kernels/interface.py). The host never learns who went where, so that a CUDA graph has it all.

Ranks share them in one of two ways. Tensor parallel ranks have some of every expert's intermediate numbers: each
routes all tokens, and what their experts and shared experts make of these is added up. Expert parallel ranks have some
of the experts: each routes its part of the tokens, parallel/expert.py brings them to their experts, and all ranks get
all results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mini_infer.core.errors import ModelError
from mini_infer.kernels.interface import ExpertWeights, Part, RouterSpec, Routes, Stream, TokenPlaces
from mini_infer.modeling.layers import Layer, Linear, Shards
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape, Parallel, empty_parameter
from mini_infer.modeling.linear_methods.quantized import QuantizedLinear
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.mlp import MLP
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.modeling.spec import ModelSpec, MoESpec
from mini_infer.parallel.context import ONE_RANK
from mini_infer.parallel.expert import ExpertExchange
from mini_infer.parallel.expert_copies import ExpertCopies
from mini_infer.parallel.expert_meter import Meter
from mini_infer.quantization.formats import ActivationFormat
from mini_infer.quantization.weight import QuantizedWeight


class MoE(nn.Module):
    """
    Attributes:
        counts: [E] int32, to which tokens are added by the experts that they go to; None: they are not counted.
        rank_counts: [ranks] int32, the same by the rank that computes them, copies of experts included; None: there is
            one rank, or they are not counted.
        meter: of what brings them there; None: it is not measured, or there is one rank.
        copies: of experts, where ranks that share them have room for some.
    """

    counts: Tensor | None = None
    rank_counts: Tensor | None = None
    meter: Meter | None = None
    copies: ExpertCopies | None = None

    def __init__(self, name: str, model: ModelSpec, spec: MoESpec, build: Build) -> None:
        super().__init__()
        names, size = spec.names, model.hidden_size
        name = f"{name.rpartition('.')[0]}.{names.block}"
        self._kernels, self._ranks, self._exchange = build.kernels, build.experts.context, None
        self.num_experts, redundant = spec.router.num_experts, build.experts.redundant
        alone = dataclasses.replace(build, parallel=ONE_RANK)
        if self._ranks.size > 1:
            slots = self.num_experts + redundant
            self._per_rank = slots // self._ranks.size
            self._exchange = ExpertExchange(build.experts, slots, build.kernels)
            # Whoever has an expert has all of it. Adapters know all tokens of a step, and here a rank has some of them.
            build = alone = dataclasses.replace(alone, adapters=None)
        self._parallel = build.parallel
        self.gate = Router(name, size, spec.router, build)
        self.experts = Experts(f"{name}.experts", size, spec, build)
        if redundant:
            weights = list(self.experts.parameters())
            self.copies = ExpertCopies(self._ranks, self.num_experts, redundant, weights, build.device)
        self.shared = None if spec.shared is None else MLP(f"{name}.{names.shared}", model, spec.shared, build)
        self.shared_gate = None
        if spec.shared_gate:
            self.shared_gate = Linear(name, size, {f"{names.shared}_gate": 1}, False, Parallel.column, alone)

    def forward(self, stream: Stream, tokens: TokenPlaces) -> tuple[Tensor | Part, Tensor | None]:
        if self._exchange is not None:
            return self._exchanged(self._exchange, stream, tokens)
        x, total, routes = self._routed(stream, tokens)
        if self._parallel.size > 1:
            return self._over_ranks(x, total, routes)
        shared = None if self.shared is None or self.shared_gate is not None else self.shared.weights
        if shared is not None:
            y = self._kernels.experts_and_shared(x, routes, self.experts.weights, shared, total)
            if y is not None:
                return y, None
        base, residual = self._base(x, total)
        return self._kernels.experts(x, routes, self.experts.weights, base), residual

    def _exchanged(self, exchange: ExpertExchange, stream: Stream, tokens: TokenPlaces) -> tuple[Tensor, Tensor | None]:
        """By ranks which have some of the experts each."""
        own, residual, real = self._ranks.rows_of, stream.residual, tokens.real
        x = stream.x.sum() if isinstance(stream.x, Part) else stream.x
        places = TokenPlaces(own(tokens.token_ids), own(tokens.positions), None if real is None else own(real))
        part, total, routes = self._routed(
            Stream(own(x), None if residual is None else own(residual), stream.norm), places
        )
        base, behind = self._base(part, total)
        routes = routes if self.copies is None else self.copies.routed(routes)
        _count(self.rank_counts, routes.ids // self._per_rank, places.real)
        y = exchange.experts(part, routes, self.experts.weights, base, len(x), self.meter)
        if behind is None:
            return y, None
        return y, x if residual is None else residual + x  # of all tokens, with no need to ask the others

    def _routed(self, stream: Stream, tokens: TokenPlaces) -> tuple[Tensor, Tensor, Routes]:
        """(x that experts read, the stream's value, where x goes)."""
        if self.meter is not None:
            self.meter.start()
        x, total, routes = self.gate.of_stream(stream, tokens)
        _count(self.counts, routes.ids, tokens.real)
        if self.meter is not None:
            self.meter.ends("route")
        return x, total, routes

    def _base(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """(base to which the experts' sum is added, residual to which that is), of a stream of value `total`."""
        if self.shared is None:
            return total, None
        if self.shared_gate is not None:
            return self._gated(x, self.shared.of(x)), total
        base, residual = self.shared.add(x, total)
        return (base.sum() if isinstance(base, Part) else base), residual

    def _over_ranks(self, x: Tensor, total: Tensor, routes: Routes) -> tuple[Tensor | Part, Tensor | None]:
        """The stream of value `total` after what is made of x, its norm, is added to it, by ranks which have a part of
        all experts each."""
        kernels, weights, ranks = self._kernels, self.experts.weights, self._parallel
        if not kernels.invariant:
            shared = None if self.shared is None else self._gated(x, self.shared.of(x))
            own = kernels.experts(x, routes, weights, shared)
            return Part(own, ranks, own.dtype), total
        # As one rank does it: what an expert makes of a token is all summed up, and rounded, before it is weighted.
        results = kernels.expert_results(x, routes, weights)
        results = ranks.tree_sum(results.flatten(0, 1)).view_as(results)
        y = kernels.add_experts(results.to(x.dtype), routes.weights)
        if self.shared is None:
            return total + y, None
        part, residual = self.shared.add(x, total)
        return self._gated(x, part.sum() if isinstance(part, Part) else part) + y, residual

    def _gated(self, x: Tensor, shared: Tensor) -> Tensor:
        """What shared experts make of x, or a part of it, times what their gate does."""
        return shared if self.shared_gate is None else self.shared_gate.of(x).sigmoid() * shared


def _count(counts: Tensor | None, ids: Tensor, real: Tensor | None) -> None:
    """Adds each token of `ids` [T, k] to the counts of those; `real` [T] has 1 for a token, and 0 for padding."""
    if counts is not None and real is not None:
        counts.index_add_(0, ids.flatten(), real[:, None].expand_as(ids).flatten())


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

    def of_stream(self, stream: Stream, tokens: TokenPlaces) -> tuple[Tensor, Tensor, Routes]:
        """(the stream's norm, its value, where the tokens go)."""
        fused = self._kernels.norm_and_route(stream, self.weight, self.correction, self._spec, tokens)
        if fused is not None:
            return fused
        x, total = self._kernels.add_rms_norm(stream)
        logits = self._method.apply(x.to(self.weight.dtype))
        return x, total, self._kernels.route(logits, self.correction, self._spec, tokens)

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
    """E experts below `name` ("model.layers.0.mlp.experts"), or a rank's own or its part of each, to be computed with
    `weights`.
    Raises ModelError where they are quantized in a form that their products cannot have."""

    def __init__(self, name: str, size: int, spec: MoESpec, build: Build) -> None:
        super().__init__()
        inner, names, ranks = spec.intermediate_size, spec.names, build.experts.context
        self._every = range(spec.router.num_experts)
        self._own = ranks.rows_of(self._every)
        gate_up = LinearShape(size, {names.gate: inner, names.up: inner}, False, Parallel.column)
        down = LinearShape(inner, {names.down: size}, False, Parallel.row)
        self._name = name
        room = build.experts.redundant // ranks.size
        self._gate_up, self._down = (_Stack(name, self._own, shape, build, room) for shape in (gate_up, down))
        if self._gate_up.activations != self._down.activations:
            raise ModelError(f"{name}: gate, up and down of experts with activations in different formats")
        for product, stack in (("gate_up", self._gate_up), ("down", self._down)):
            for key, weight in stack.weights.items():
                self.register_parameter(f"{product}_{key}", weight)
        self.weights = ExpertWeights(
            self._gate_up.stacked, self._down.stacked, self._down.activations, self._down.chunks
        )

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return {
            f"{self._name}.{expert}.{part}": tensor
            for stack in (self._gate_up, self._down)
            for expert, tensors in zip(self._own, stack.checkpoint_tensors(), strict=True)
            for part, tensor in tensors.items()
        }

    def elsewhere(self) -> list[str]:
        """As Model.elsewhere."""
        return [f"{self._name}.{expert}." for expert in self._every if expert not in self._own]

    def loaded(self) -> None:
        for method in self._gate_up.methods + self._down.methods:
            method.loaded()

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        for stack in (self._gate_up, self._down):
            drawn = stack.drawn(draw)
            for expert in self._every:  # those of other ranks too, so that its own are what they are on one
                own = expert in self._own
                method = stack.methods[expert - self._own.start] if own else stack.new_method(expert)
                method.fill_dummy(drawn)


class _Stack:
    """One product of all experts: a linear method each, which loads its weights, in memory that they have together,
    and with `room` for so many more.

    Attributes:
        weights: what the methods keep, with the expert as the first dimension.
        stacked, activations, chunks: as in ExpertWeights.
    """

    def __init__(self, name: str, experts: range, shape: LinearShape, build: Build, room: int) -> None:
        self._name, self._shape, self._build = name, shape, build
        self._shards = None if build.parallel.size == 1 else Shards(f"{name}.{experts[0]}", shape, build)
        self.methods = [self.new_method(expert) for expert in experts]
        first, own = self.methods[0], [method.weights() for method in self.methods]
        formats = {_format(method) for method in self.methods}
        if len(formats) > 1 or None in formats:
            raise ModelError(
                f"{name}: {', '.join(shape.parts)} of all experts must be in one format, in which they can be one "
                "product: without outlier columns (model.quantization=mixed) and without act-order (desc_act=true)"
            )
        self.weights: dict[str, nn.Parameter] = {}
        for key, weight in own[0].items():
            strides = weight.numel(), *weight.stride()
            memory = torch.empty_strided(
                (len(experts) + room, *weight.shape), strides, dtype=weight.dtype, device=weight.device
            )
            stack = nn.Parameter(memory, requires_grad=False)
            for expert, weights in enumerate(own):
                weights[key].data = stack[expert]
            self.weights[key] = stack
        self.stacked: Tensor | QuantizedWeight
        self.activations: ActivationFormat | None = None
        if isinstance(first, QuantizedLinear):
            codes, scales, zeros = (self.weights.get(key) for key in ("codes", "scales", "zeros"))
            assert codes is not None
            assert scales is not None
            self.stacked, self.activations = QuantizedWeight(codes, scales, zeros, first.weight.form), first.activations
        else:
            self.stacked = self.weights["weight"]
        self.chunks = first.chunks if isinstance(first, Unquantized) else 1

    def checkpoint_tensors(self) -> list[dict[str, CheckpointTensor]]:
        """Of each method."""
        tensors = [method.checkpoint_tensors() for method in self.methods]
        return tensors if self._shards is None else self._shards.cut(*tensors)

    def drawn(self, draw: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """What fills a method's weights, where `draw` fills those of all ranks."""
        return draw if self._shards is None else partial(self._shards.draw, draw)

    def new_method(self, expert: int) -> LinearMethod:
        return self._build.linear_method(f"{self._name}.{expert}", self._shape, self._build)


def _format(method: LinearMethod) -> object:
    """What methods of one product have in common; None where there is no such product."""
    if isinstance(method, QuantizedLinear) and method.order is None and method.outlier_columns is None:
        return method.weight.form, method.activations
    return "unquantized" if isinstance(method, Unquantized) else None
