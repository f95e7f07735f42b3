"""The layers that decoders are built of. Parameters are created empty: the loader fills them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import overload

from torch import Tensor, nn

from mini_infer.kernels.interface import Gated, Norm, Places, QKNorm, Stream
from mini_infer.modeling.linear_methods.base import Build, LinearShape, Parallel, empty_parameter
from mini_infer.modeling.model import CheckpointTensor


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


class Linear(Layer):
    """A product from or to the residual stream (kernels/interface.py), with weights that its method owns.

    Each operation is the method's, in one go, or made of several where the method declines. `name` is as in
    LinearMethodFactory.
    """

    def __init__(
        self, name: str, in_size: int, parts: Mapping[str, int], bias: bool, parallel: Parallel, build: Build
    ) -> None:
        super().__init__()
        self._name = name
        self.method = build.linear_method(name, LinearShape(in_size, parts, bias, parallel), build)
        for key, weight in self.method.weights().items():
            self.register_parameter(key, weight)
        self._kernels = build.kernels

    @overload
    def of_stream(self, stream: Stream) -> tuple[Tensor, Tensor]: ...

    @overload
    def of_stream(self, stream: Stream, silu_mul: bool) -> tuple[Tensor | Gated, Tensor]: ...

    def of_stream(self, stream: Stream, silu_mul: bool = False) -> tuple[Tensor | Gated, Tensor]:
        """(the product of the stream's norm, with `silu_mul` through SiLU(gate) * up or Gated; the stream's value)."""
        fused = self.method.norm_apply(stream, silu_mul)
        if fused is not None:
            return fused
        normed, total = self._kernels.add_rms_norm(stream)
        return self.of(normed, silu_mul), total

    def of(self, x: Tensor, silu_mul: bool = False) -> Tensor:
        """The product of x, with `silu_mul` through SiLU(gate) * up."""
        y = self.method.apply(x)
        return self._kernels.silu_mul(y) if silu_mul else y

    def heads_of_stream(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor]:
        """The product of the stream's norm is q | k | v heads, of which k and v are stored -> (queries [T, Hq, D], the
        stream's value)."""
        fused = self.method.norm_apply_rope(stream, qk_norm, places)
        if fused is not None:
            return fused
        qkv, total = self.of_stream(stream)
        return self._kernels.rope_and_store(qkv, qk_norm, places), total

    def add_to_stream(self, x: Tensor | Gated, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream of value `residual` after the product of x is added to it."""
        if isinstance(x, Gated) and not self.method.takes_gated:
            x = self._kernels.silu_mul(x.gate_up)
        total = self.method.apply_add(x, residual)
        return (self.method.apply(x), residual) if total is None else (total, None)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        return {f"{self._name}.{part}": tensor for part, tensor in self.method.checkpoint_tensors().items()}

    def loaded(self) -> None:
        self.method.loaded()

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        self.method.fill_dummy(draw)
