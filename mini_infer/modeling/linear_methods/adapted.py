"""A linear method with adapters beside it: y = W x + B A x, W in any format, A and B those that each token has.

    x ----> base ----------------> y --> += B s --> y      of tokens that have one
       '--> s = A x, beside it ----------'

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
from mini_infer.parallel.context import ParallelContext, tree_sum

if TYPE_CHECKING:
    from mini_infer.modeling.adapters import Adapters


class AdaptedLinear(LinearMethod):
    """
    Attributes:
        stack: A and B of all slots.
    """

    def __init__(self, base: LinearMethod, shape: LinearShape, build: Build, adapters: Adapters) -> None:
        self.base, self._adapters, self._parallel = base, adapters, build.parallel
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
        fork = self._adapters.fork()
        return self._adapted(self.base.apply(x), x, fork)

    def apply_shared(self, x: Tensor | Gated, parallel: ParallelContext) -> Part | Tensor:
        if not self._adapters.active:
            return self.base.apply_shared(x, parallel)
        if self._chunk is None:
            return super().apply_shared(x, parallel)
        fork = self._adapters.fork()
        part = self.base.apply_shared(x, parallel)
        assert isinstance(part, Part)
        return self._adapted(part.sum(), x, fork)

    def apply_add(self, x: Tensor | Gated, residual: Tensor) -> Tensor | None:
        if not self._adapters.active:
            return self.base.apply_add(x, residual)
        fork = self._adapters.fork()
        total = self.base.apply_add(x, residual)
        return None if total is None else self._adapted(total, x, fork)

    def _adapted(self, y: Tensor, x: Tensor | Gated, fork: torch.cuda.Event | None) -> Tensor:
        """y after B A x is added to it."""
        assert isinstance(x, Tensor), "takes_gated"
        shrunk = self._adapters.shrink(x, self.stack, self._chunk, fork)
        if self._chunk is not None:
            branch = tree_sum(shrunk.transpose(0, 1))
            shrunk = self._parallel.tree_sum(branch.contiguous())[:, None]
        self._adapters.expand(y, shrunk, self.stack)
        return y

    # --- what only the base does, which takes no time for x -----------------------------------------------------------

    @property
    def takes_gated(self) -> bool:
        return not self._adapters.active and self.base.takes_gated

    def apply_silu_mul(self, x: Tensor) -> Tensor | None:
        return None if self._adapters.active else self.base.apply_silu_mul(x)

    def norm_apply(self, stream: Stream, silu_mul: bool) -> tuple[Tensor | Gated, Tensor] | None:
        return None if self._adapters.active else self.base.norm_apply(stream, silu_mul)

    def norm_apply_rope(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor] | None:
        return None if self._adapters.active else self.base.norm_apply_rope(stream, qk_norm, places)

    # --- the base's weights -----------------------------------------------------------------------------------------

    def weights(self) -> dict[str, nn.Parameter]:
        return self.base.weights()

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return self.base.checkpoint_tensors()

    def loaded(self) -> None:
        self.base.loaded()

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        self.base.fill_dummy(draw)
