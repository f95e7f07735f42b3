"""What a number format must do to be a linear layer's: a file beside this one, and no edit in a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mini_infer.kernels.interface import Gated, Kernels, Part, Places, QKNorm, Stream
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.expert import ALL_EXPERTS, ExpertRanks

if TYPE_CHECKING:
    from mini_infer.modeling.adapters import Adapters
    from mini_infer.modeling.linear_methods.unquantized import Unquantized


class Parallel(Enum):
    """How ranks would share a product (Shoeybi et al. 2019, arXiv:1909.08053)."""

    column = "column"  # each has some outputs of every part, and sees all inputs
    row = "row"  # each has some inputs, and their results are added up


@dataclass(frozen=True)
class LinearShape:
    """x [T, in_size] -> [T, sum of parts].

    `parts` names the checkpoint's projections that lie side by side in this one, with their output sizes: one product
    for q, k and v, one for gate and up. `copies`: of a part that several ranks have alike, how many.
    """

    in_size: int
    parts: Mapping[str, int]
    bias: bool
    parallel: Parallel
    copies: Mapping[str, int] = field(default_factory=dict)

    @property
    def out_size(self) -> int:
        return sum(self.parts.values())

    def of_all(self, size: int) -> LinearShape:
        """Of the layer of which each of `size` ranks has this one."""
        if self.parallel is Parallel.row:
            return replace(self, in_size=self.in_size * size)
        parts = {part: own * size // self.copies.get(part, 1) for part, own in self.parts.items()}
        return replace(self, parts=parts)


# (name, shape, build) -> a layer's method, its weights empty. `name` is the module that has the layer's parts in a
# checkpoint: "model.layers.0.mlp" has gate_proj and up_proj.
LinearMethodFactory = Callable[[str, LinearShape, "Build"], "LinearMethod"]


@dataclass(frozen=True)
class Build:
    """What a model's layers are made with."""

    dtype: torch.dtype  # of activations, and of weights that have no format of their own
    device: torch.device
    kernels: Kernels
    linear_method: LinearMethodFactory
    parallel: ParallelContext = ONE_RANK  # sizes of layers are this rank's own
    experts: ExpertRanks = ALL_EXPERTS  # of a mixture's experts this rank has some
    adapters: Adapters | None = None  # that tokens may have beside the layers' own weights


class LinearMethod(ABC):
    """The weights of one linear layer, in one number format.

    Fusion with the layer's neighbours is an optimisation. It is asked for at every call, with the tensors at hand, and
    declined with None, as here: the caller then takes the operations one by one (modeling/layers.py).
    """

    @abstractmethod
    def weights(self) -> dict[str, nn.Parameter]:
        """All tensors that are kept, scales and the like included: what the layer takes in memory."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """Name ("q_proj.weight") -> what becomes of that tensor. Together they fill the weights."""

    def loaded(self) -> None:  # noqa: B027 most have nothing left to do
        """Called once, when every tensor of a checkpoint has been taken. Raises ModelError where what came is not
        whole."""

    @property
    def plain(self) -> Unquantized | None:
        """What computes the same of the step at hand, if that has nothing but weights of x's dtype."""
        return None

    @property
    def takes_gated(self) -> bool:
        """Whether `apply` and `apply_add` are given Gated, instead of the x that it stands for."""
        return False

    @abstractmethod
    def apply(self, x: Tensor | Gated) -> Tensor:
        """x [T, in_size] -> [T, out_size] of x's dtype, contiguous."""

    def apply_silu_mul(self, x: Tensor) -> Tensor | None:
        """Of x [T, in_size], whose product is gate and up, silu(gate) * up."""
        return None

    def apply_shared(self, x: Tensor | Gated, parallel: ParallelContext) -> Part | Tensor:
        """Of ranks which have some inputs each. One of them has the bias. A tensor is the sum already."""
        y = self.apply(x)
        return Part(y, parallel, y.dtype)

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        """Random weights. `draw` fills a floating tensor in place, the same from run to run if called in one order."""
        for weight in self.weights().values():
            draw(weight)

    def norm_apply(self, stream: Stream, silu_mul: bool) -> tuple[Tensor | Gated, Tensor] | None:
        """The stream (kernels/interface.py) -> (the product of its norm, on request through `silu_mul` or Gated; its
        value)."""
        return None

    def norm_apply_rope(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor] | None:
        """The stream -> (of the product of its norm, q | k | v heads, what `rope_and_store` gives; its value)."""
        return None

    def apply_add(self, x: Tensor | Gated, residual: Tensor) -> tuple[Tensor | Part, Tensor | None] | None:
        """The stream (kernels/interface.py) whose value is the product of x plus residual [T, out_size]."""
        return None


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
