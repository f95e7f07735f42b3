"""The layers that decoders are built of. Parameters are created empty: the loader fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_infer.kernels.interface import Gated, Norm, Part, Places, QKNorm, Stream
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape, Parallel, empty_parameter
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.modeling.sharding import cut
from mini_infer.modeling.spec import ModelSpec
from mini_infer.parallel.context import ONE_RANK


class Layer(nn.Module):
    """A module with weights of its own, which a model finds among its modules when they are to be filled."""

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """Checkpoint name -> what becomes of that tensor."""
        raise NotImplementedError

    def loaded(self) -> None:
        """As Model.loaded."""

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        """As Model.fill_dummy."""
        raise NotImplementedError


class RMSNorm(Layer):
    """Zhang & Sennrich 2019 (arXiv:1910.07467), over the last dimension; computed in float32."""

    def __init__(self, name: str, size: int, eps: float, build: Build) -> None:
        super().__init__()
        self._name = name
        self.weight = empty_parameter(size, dtype=build.dtype, device=build.device)
        self.norm = Norm(self.weight, eps)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return {f"{self._name}.weight": CheckpointTensor.copied_to(self.weight)}

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        draw(self.weight)  # so that what is drawn after it stays what it was
        self.weight.fill_(1.0)


class Shards:
    """A layer of which this rank has a part, `shape`."""

    def __init__(self, name: str, shape: LinearShape, build: Build) -> None:
        self._name, self._shape, self._build, self._parallel = name, shape, build, build.parallel
        self._whole = shape.of_all(build.parallel.size)

    def apply(self, method: LinearMethod, x: Tensor | Gated) -> Part | Tensor:
        """This rank's part of what the ranks' products of their own inputs add up to, or that sum."""
        return method.apply_shared(x, self._parallel)

    def filled(self, method: LinearMethod) -> None:
        """Leaves the bias of a sum over ranks to the first of them, unless it is added behind the sum."""
        behind = self._build.kernels.num_chunks(self._whole.in_size, self._build.dtype) is not None
        if self._shape.parallel is Parallel.row and self._parallel.rank and not behind:
            for key, weight in method.weights().items():
                if key.endswith("bias"):
                    weight.zero_()

    def cut(self, *layers: Mapping[str, CheckpointTensor]) -> list[dict[str, CheckpointTensor]]:
        """Those of the rank's method, or of several alike, read from the whole layer's in a checkpoint."""
        nowhere = replace(self._build, device=torch.device("meta"), parallel=ONE_RANK)
        whole = self._build.linear_method(self._name, self._whole, nowhere).checkpoint_tensors()
        return [cut(tensors, whole, self._parallel) for tensors in layers]

    def draw(self, draw: Callable[[Tensor], None], weight: Tensor) -> None:
        """Fills the rank's part, of a weight or of a bias, with its part of what would be drawn for the whole layer."""
        plain = Unquantized.create(self._name, self._whole, replace(self._build, parallel=ONE_RANK))
        drawn = plain.weight if weight.dim() == 2 else plain.bias
        assert drawn is not None
        draw(drawn)
        outs = zip(drawn.split(list(self._whole.parts.values())), self._shape.parts.values(), strict=True)
        own = torch.cat([part[self._parallel.part(len(part), size)] for part, size in outs])
        weight.copy_(own[:, self._parallel.part(own.shape[1], weight.shape[1])] if weight.dim() == 2 else own)


class Linear(Layer):
    """A product from or to the residual stream (kernels/interface.py), with weights that its method owns.

    Each operation is the method's, in one go, or made of several where the method declines. `name` is as in
    LinearMethodFactory; sizes are the rank's own, and `copies` as in LinearShape.
    """

    def __init__(
        self,
        name: str,
        in_size: int,
        parts: Mapping[str, int],
        bias: bool,
        parallel: Parallel,
        build: Build,
        copies: Mapping[str, int] = {},
    ) -> None:
        super().__init__()
        self._name = name
        shape = LinearShape(in_size, parts, bias, parallel, copies)
        self.method = build.linear_method(name, shape, build)
        if build.adapters is not None:
            self.method = build.adapters.adapt(name, shape, self.method, build)
        for key, weight in self.method.weights().items():
            self.register_parameter(key, weight)
        self._kernels = build.kernels
        self._shards = None if build.parallel.size == 1 else Shards(name, shape, build)

    @overload
    def of_stream(self, stream: Stream) -> tuple[Tensor, Tensor]: ...

    @overload
    def of_stream(self, stream: Stream, silu_mul: bool) -> tuple[Tensor | Gated, Tensor]: ...

    def of_stream(self, stream: Stream, silu_mul: bool = False) -> tuple[Tensor | Gated, Tensor]:
        """(the product of the stream's norm, with `silu_mul` through SiLU(gate) * up or Gated; the stream's value)."""
        fused = self.method.norm_apply(stream, silu_mul)
        if fused is not None:
            return fused
        if isinstance(stream.x, Part) and stream.x.halves and self.method.plain is not None:
            return self._of_halves(stream.x, self.method.plain, stream, silu_mul)
        normed, total = self._kernels.add_rms_norm(stream)
        return self.of(normed, silu_mul), total

    def _of_halves(self, x: Part, method: Unquantized, stream: Stream, silu_mul: bool) -> tuple[Tensor, Tensor]:
        """As of_stream: a half is computed while the next is summed up."""
        assert stream.residual is not None
        total = torch.empty_like(stream.residual)
        y = total.new_empty((len(total), len(method.weight)))
        for rows, wait in x.halves:
            wait()
            half = Stream(x.own[rows], stream.residual[rows], stream.norm)
            method.apply(self._kernels.add_rms_norm(half, total[rows])[0], y[rows])
        return (self._kernels.silu_mul(y) if silu_mul else y), total

    def of(self, x: Tensor, silu_mul: bool = False) -> Tensor:
        """The product of x, with `silu_mul` through SiLU(gate) * up."""
        if not silu_mul:
            return self.method.apply(x)
        fused = self.method.apply_silu_mul(x)
        return self._kernels.silu_mul(self.method.apply(x)) if fused is None else fused

    def heads_of_stream(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor]:
        """The product of the stream's norm is q | k | v heads, of which k and v are stored -> (queries [T, Hq, D], the
        stream's value)."""
        fused = self.method.norm_apply_rope(stream, qk_norm, places)
        if fused is not None:
            return fused
        qkv, total = self.of_stream(stream)
        return self._kernels.rope_and_store(qkv, qk_norm, places), total

    def add_to_stream(self, x: Tensor | Gated, residual: Tensor) -> tuple[Tensor | Part, Tensor | None]:
        """The stream of value `residual` after the product of x is added to it."""
        if isinstance(x, Gated) and not self.method.takes_gated:
            x = self._kernels.silu_mul(x.gate_up)
        if self._shards is not None:
            return self._shards.apply(self.method, x), residual
        added = self.method.apply_add(x, residual)
        return (self.method.apply(x), residual) if added is None else added

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        tensors = self.method.checkpoint_tensors()
        tensors = tensors if self._shards is None else self._shards.cut(tensors)[0]
        return {f"{self._name}.{part}": tensor for part, tensor in tensors.items()}

    def loaded(self) -> None:
        self.method.loaded()
        if self._shards is not None:
            self._shards.filled(self.method)

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        if self._shards is None:
            self.method.fill_dummy(draw)
        else:
            self.method.fill_dummy(partial(self._shards.draw, draw))
            self._shards.filled(self.method)


class VocabularyTable(Layer):
    """A row of `hidden_size` numbers for each token of the vocabulary, of which ranks have a stretch each. What is
    looked up, and the scores of all tokens, every rank gets."""

    def __init__(self, name: str, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self._name, self._vocab_size, self._parallel = name, spec.vocab_size, build.parallel
        rows = -(-spec.vocab_size // build.parallel.size)
        self._first = build.parallel.rank * rows
        self._known = max(0, min(rows, spec.vocab_size - self._first))  # the last rank's other rows are padding
        self.weight = empty_parameter(rows, spec.hidden_size, dtype=build.dtype, device=build.device)
        shape = LinearShape(spec.hidden_size, {name: rows}, False, Parallel.column)
        self._scores = Unquantized(self.weight, None, shape, build.kernels)

    def look_up(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden_size]."""
        if self._parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        found = self._parallel.look_up(token_ids, self.weight, self._first, self._known)
        if found is not None:
            return found
        own = token_ids - self._first
        others = (own < 0) | (own >= self._known)
        return self._parallel.all_reduce(
            F.embedding(own.masked_fill(others, 0), self.weight).masked_fill(others[:, None], 0)
        )

    def score(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size], in `out` where it is given."""
        if self._parallel.size == 1:
            return self._scores.apply(hidden, out)
        if out is None:
            out = hidden.new_empty(len(hidden), self._vocab_size)
        return self._parallel.gather_columns(self._scores.apply(hidden), out)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        known = self.weight[: self._known]
        tensor = CheckpointTensor.copied_to(known)
        if self._parallel.size > 1:
            shape = (self._vocab_size, self.weight.shape[1])
            rows = slice(self._first, self._first + self._known)
            tensor = replace(tensor, shape=shape, reads={shape: (rows, slice(None))})
            self.weight[self._known :].zero_()
        return {f"{self._name}.weight": tensor}

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        if self._parallel.size == 1:
            draw(self.weight)
            return
        whole = self.weight.new_empty(self._vocab_size, self.weight.shape[1])
        draw(whole)
        self.weight.zero_()
        self.weight[: self._known] = whole[self._first : self._first + self._known]
