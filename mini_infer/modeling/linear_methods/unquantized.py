"""Weights as they are computed with: bf16, fp16 or fp32. Few rows of x go to one kernel with what is around them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

from mini_infer.core.errors import ConfigError
from mini_infer.kernels.interface import Kernels, Norm, Part, Places, QKNorm, Stream
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape, Parallel, empty_parameter
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.parallel.context import ONE_RANK, ParallelContext


class Unquantized(LinearMethod):
    """y = x W^T + b, W [out_size, in_size].

    Attributes:
        chunks: of this rank's inputs, as in Kernels.linear.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        shape: LinearShape,
        kernels: Kernels,
        parallel: ParallelContext = ONE_RANK,
    ) -> None:
        self.weight, self.bias, self._shape = weight, bias, shape
        self._kernels, self._gemv = kernels, kernels.gemv
        chunks = None
        if shape.parallel is Parallel.row:
            chunks = kernels.num_chunks(shape.in_size * parallel.size, weight.dtype)
        if chunks is not None and chunks % parallel.size:
            raise ConfigError(
                f"numerics=batch_invariant: sums over {shape.in_size * parallel.size} inputs have {chunks} chunks, "
                f"which parallel.tensor={parallel.size} ranks cannot share. Set parallel.tensor to a divisor, or "
                "numerics=fast"
            )
        self._ordered, self.chunks = chunks is not None, (chunks or 1) // parallel.size or 1

    @classmethod
    def create(cls, name: str, shape: LinearShape, build: Build) -> Unquantized:
        dtype, device = build.dtype, build.device
        weight = empty_parameter(shape.out_size, shape.in_size, dtype=dtype, device=device)
        if device.type == "cpu" and shape.out_size > 1:
            # Input-major memory: MKL reads it 1.8 times as fast at batch 1, 1.3 times at 8, and no slower at 512.
            weight.data = weight.data.view(shape.in_size, shape.out_size).t()
        bias = empty_parameter(shape.out_size, dtype=dtype, device=device) if shape.bias else None
        return cls(weight, bias, shape, build.kernels, build.parallel)

    def weights(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        names, sizes = list(self._shape.parts), list(self._shape.parts.values())
        return {
            f"{name}.{kind}": CheckpointTensor.copied_to(part)
            for kind, weight in self.weights().items()
            for name, part in zip(names, weight.split(sizes), strict=True)
        }

    @property
    def plain(self) -> Unquantized:
        return self

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """In `out`, contiguous and of x's dtype, where it is given."""
        if (gemv := self._gemv_for(x)) is not None:
            return gemv.gemv(x, self.weight, self.bias, out)
        return self._kernels.linear(x, self.weight, self.bias, out, chunks=self.chunks)

    def apply_silu_mul(self, x: Tensor) -> Tensor | None:
        if (gemv := self._gemv_for(x)) is not None:
            return gemv.gemv(x, self.weight, self.bias, silu_mul=True)
        return None if self.bias is not None else self._kernels.gated_linear(x, self.weight)

    def apply_shared(self, x: Tensor, parallel: ParallelContext) -> Part | Tensor:  # type: ignore[override]
        if not self._ordered:
            halves = parallel.in_halves(len(x))
            return self._apply_halves(x, parallel, halves) if halves else super().apply_shared(x, parallel)
        branch = x.new_empty((len(x), len(self.weight)), dtype=torch.float32)
        self._kernels.linear(x, self.weight, None, branch, chunks=self.chunks)
        return Part(branch, parallel, x.dtype, ordered=True, bias=self.bias)

    def _apply_halves(self, x: Tensor, parallel: ParallelContext, halves: Sequence[slice]) -> Part:
        """One is summed up while the next is computed."""
        y = x.new_empty((len(x), len(self.weight)))
        begun = [(rows, parallel.begin_all_reduce(self.apply(x[rows], y[rows]))) for rows in halves]
        return Part(y, parallel, y.dtype, halves=begun)

    def norm_apply(self, stream: Stream, silu_mul: bool) -> tuple[Tensor, Tensor] | None:
        if (gemv := self._gemv_for(stream.x)) is None:
            return None
        x, norm, total = self._normed(gemv, stream)
        return gemv.gemv(x, self.weight, self.bias, norm=norm, silu_mul=silu_mul), total

    def norm_apply_rope(self, stream: Stream, qk_norm: QKNorm | None, places: Places) -> tuple[Tensor, Tensor] | None:
        # A program of gemv has a few rows of a head, and QK-norm needs the sum over all of them.
        gemv = self._gemv_for(stream.x) if qk_norm is None else None
        if gemv is None or not gemv.takes_heads(stream.x.dtype, places):
            return None
        x, norm, total = self._normed(gemv, stream)
        return gemv.qkv_gemv(x, self.weight, self.bias, places, norm=norm), total

    def apply_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, None] | None:  # type: ignore[override]
        gemv = self._gemv_for(x)
        return None if gemv is None else (gemv.gemv(x, self.weight, self.bias, residual=residual), None)

    def _gemv_for(self, x: Tensor | Part) -> ModuleType | None:
        """kernels/gemv.py, where it is the faster for x."""
        if self._gemv is None:
            return None
        (rows, in_size), out_size = x.shape, self.weight.shape[0]
        fits = self._gemv.worth_it(rows, out_size, in_size, x.dtype) and self.weight.is_contiguous()
        return self._gemv if fits else None

    def _normed(self, gemv: ModuleType, stream: Stream) -> tuple[Tensor, Norm | None, Tensor]:
        """(what gemv reads; the norm, if that is left to it; the stream's value)."""
        x, residual, norm = stream
        if residual is None and isinstance(x, Tensor) and gemv.takes_norm(*x.shape):
            return x, norm, x
        normed, total = self._kernels.add_rms_norm(stream)
        return normed, None, total
