"""The dense feed-forward of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from mini_infer.kernels.interface import Part, Stream, TokenPlaces
from mini_infer.modeling.layers import Linear
from mini_infer.modeling.linear_methods.base import Build, Parallel
from mini_infer.modeling.spec import MLPSpec, ModelSpec


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, name: str, model: ModelSpec, spec: MLPSpec, build: Build) -> None:
        super().__init__()
        size = spec.intermediate_size
        gate_up, down = {"gate_proj": size, "up_proj": size}, {"down_proj": model.hidden_size}
        self.gate_up_proj = Linear(name, model.hidden_size, gate_up, spec.bias, Parallel.column, build)
        self.down_proj = Linear(name, size, down, spec.bias, Parallel.row, build)

    def forward(self, stream: Stream, tokens: TokenPlaces) -> tuple[Tensor | Part, Tensor | None]:
        activated, residual = self.gate_up_proj.of_stream(stream, silu_mul=True)
        return self.down_proj.add_to_stream(activated, residual)

    @property
    def weights(self) -> tuple[Tensor, Tensor] | None:
        """Gate over up [2I, H] and down [H, I], where they are all that this is made of, as they are computed with."""
        gate_up, down = self.gate_up_proj.method.plain, self.down_proj.method.plain
        if gate_up is None or down is None or gate_up.bias is not None or down.bias is not None:
            return None
        return gate_up.weight.data, down.weight.data

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | Part, Tensor | None]:
        """The stream of value `residual` after what this makes of x, read from the stream already, is added to it."""
        return self.down_proj.add_to_stream(self.gate_up_proj.of(x, silu_mul=True), residual)

    def of(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], of what is read from the stream already."""
        return self.down_proj.of(self.gate_up_proj.of(x, silu_mul=True))
