"""A linear method with adapters beside it: y = W x + B A x, W in any format, A and B those that each token has.

    x ---> base: W x ----------------+--> whoever reads the product adds them up: norm, rotary embedding or SiLU-mul
       '-> beside it: s = A x, B s --'

Neither term waits for the other. B s is added to W x instead where tokens are many, since it costs less memory traffic,
and in batch-invariant numerics, where sums have an order.

While no token of a step has an adapter, it is the base, fusions included. Ranks share A and B as they share W: where
each has some outputs (column), it has B's rows of these; where each has some inputs (row), A's columns of these, and
its part of B A x is in the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mini_infer.kernels.interface import Gated, Part, Places, QKNorm, Stream
from mini_infer.kernels.lora import LoraWeights
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape, Parallel
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.parallel.context import ONE_RANK, ParallelContext, tree_sum

if TYPE_CHECKING:
    from mini_infer.modeling.adapters import Adapters
    from mini_infer.modeling.linear_methods.unquantized import Unquantized


class AdaptedLinear(LinearMethod):
    """
    Attributes:
        stack: A and B of all slots.
    """

    def __init__(self, base: LinearMethod, shape: LinearShape, build: Build, adapters: Adapters) -> None:
        self.base, self._adapters, self._parallel, self._kernels = base, adapters, build.parallel, build.kernels
        self._whole, self._is_row = shape.of_all(build.parallel.size), shape.parallel is Parallel.row
        self.parts = tuple(shape.parts.values())
        self.stack = self.empty(adapters.num_slots, shape.in_size, adapters.rank, build.dtype, build.device)
        # In numerics where sums have an order, ranks share a sum's chunks: A x is a tree of these as W x is.
        chunks = build.kernels.num_chunks(self._whole.in_size, build.dtype) if self._is_row else None
        self._chunk = None if chunks is None else self._whole.in_size // chunks

    def empty(self, slots: int, size: int, rank: int, dtype: torch.dtype, device: torch.device) -> LoraWeights:
        a = torch.zeros(slots, len(self.parts), rank, size, dtype=dtype, device=device)
        return LoraWeights(a, torch.zeros(slots, sum(self.parts), rank, dtype=dtype, device=device), self.parts)

    # --- an adapter of one part of the product ----------------------------------------------------------------------

    def shape_of(self, part: int, kind: str, rank: int) -> tuple[int, int]:
        """Of the tensor in a folder: of all ranks."""
        return (rank, self._whole.in_size) if kind == "A" else (list(self._whole.parts.values())[part], rank)

    def take(self, to: LoraWeights, part: int, kind: str, tensor: Tensor) -> None:
        """Puts this rank's part of a folder's tensor into weights of one slot."""
        if kind == "A":
            columns = self._parallel.part(tensor.shape[1], to.a.shape[3])
            to.a[0, part, : len(tensor)] = tensor[:, columns]
        else:
            start, size = sum(self.parts[:part]), self.parts[part]
            rows = self._parallel.part(len(tensor), size)
            to.b[0, start : start + size, : tensor.shape[1]] = tensor[rows]

    # --- products -------------------------------------------------------------------------------------------------

    def apply(self, x: Tensor | Gated) -> Tensor:
        if not self._adapters.active:
            return self.base.apply(x)
        if self._kernels.invariant:
            return self._adapted(self.base.apply(x), x)
        y, branch = self._terms(x)
        return y if branch is None else y.add_(branch)

    def apply_shared(self, x: Tensor | Gated, parallel: ParallelContext) -> Part | Tensor:
        if not self._adapters.active:
            return self.base.apply_shared(x, parallel)
        if self._chunk is None:
            return super().apply_shared(x, parallel)
        part = self.base.apply_shared(x, parallel)
        assert isinstance(part, Part)
        return self._adapted(part.sum(), x)

    def _adapted(self, y: Tensor, x: Tensor | Gated) -> Tensor:
        """y after B A x is added to it, in one order."""
        assert isinstance(x, Tensor), "takes_gated"
        shrunk = self._adapters.shrink(x, self.stack, self._chunk)
        if self._chunk is not None:
            branch = tree_sum(shrunk.transpose(0, 1))
            shrunk = self._parallel.tree_sum(branch.contiguous())[:, None]
        self._adapters.expand(y, shrunk, self.stack)
        return y

    def _terms(self, x: Tensor | Gated) -> tuple[Tensor, Tensor | None]:
        """(W x, B A x), which whoever reads the product adds up: so neither waits for the other. Or (the sum, None)."""
        assert isinstance(x, Tensor), "takes_gated"
        fork = self._adapters.fork(x, self.stack)
        return self._adapters.add(self.base.apply(x), x, self.stack, fork)

    # --- with its neighbours: while a token has an adapter, those who read the product add up its terms ---------------

    @property
    def plain(self) -> Unquantized | None:
        return None if self._adapters.active else self.base.plain

    @property
    def takes_gated(self) -> bool:
        return not self._adapters.active and self.base.takes_gated

    def apply_silu_mul(self, x: Tensor) -> Tensor | None:
        if not self._adapters.active:
            return self.base.apply_silu_mul(x)
        return None if self._kernels.invariant else self._kernels.silu_mul(*self._terms(x))

    def norm_apply(self, stream: Stream, silu_mul: bool) -> tuple[Tensor | Gated, Tensor] | None:
        return None if self._adapters.active else self.base.norm_apply(stream, silu_mul)

    def norm_apply_rope(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor] | None:
        if not self._adapters.active:
            return self.base.norm_apply_rope(stream, qk_norm, places)
        if self._kernels.invariant:
            return None
        normed, total = self._kernels.add_rms_norm(stream)
        qkv, branch = self._terms(normed)
        return self._kernels.rope_and_store(qkv, qk_norm, places, branch), total

    def apply_add(self, x: Tensor | Gated, residual: Tensor) -> tuple[Tensor | Part, Tensor | None] | None:
        if not self._adapters.active:
            return self.base.apply_add(x, residual)
        if self._kernels.invariant:
            return None
        y, branch = self._terms(x)
        return (y if branch is None else Part(y, ONE_RANK, y.dtype, more=branch)), residual

    # --- the base's weights -----------------------------------------------------------------------------------------

    def weights(self) -> dict[str, nn.Parameter]:
        return self.base.weights()

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return self.base.checkpoint_tensors()

    def loaded(self) -> None:
        self.base.loaded()

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        self.base.fill_dummy(draw)
