"""The operations between attention and the matrix products, and products with few rows: each one kernel, against what
it is made of in torch, against torch's own kernels, and against what torch.compile makes of them.

    eager      operation by operation, as transformers writes it
    torch      with what torch has fused itself, as mini_infer's torch kernels do
    compile    torch.compile of `eager`
    triton     one kernel

Bytes are what must come from memory and go back: inputs and outputs once, weights of norms not at all (they are small
and stay in a cache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lab.kernels.case import Case, Implementation, VariantAbsent, Work, heads, require_triton
from mini_infer.kernels.interface import Kernels, Norm, Places, QKNorm, Stream
from mini_infer.kernels.ops import TorchKernels, TritonKernels
from mini_infer.modeling.rope import RopeSpec, RotaryTable

EPS = 1e-6
EAGER, TORCH, COMPILED, TRITON = "eager", "torch", "compile", "triton"
THETA = 1e6


class _Fused(Case):
    variants = (EAGER, TORCH, COMPILED, TRITON)
    compute: Callable[..., Any]  # by kernels, of a set of inputs
    eager: Callable[..., Any]

    def implementation(self, variant: str) -> Implementation:
        compute: Callable[..., Any] = self.eager
        if variant == COMPILED:
            compute = self._compiled(compute)
        elif variant == TORCH:
            compute = partial(self.compute, TorchKernels())
        elif variant == TRITON:
            require_triton(self.device)
            compute = partial(self.compute, TritonKernels())
        return self.on_sets(compute)

    def _compiled(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()  # each shape is compiled for itself
        compiled = torch.compile(compute, dynamic=False)
        try:
            compiled(*self.sets[0])
        except Exception as error:  # the compiler's own errors, the C compiler's, Triton's
            reason = str(error).strip().partition("\n")[0]
            raise VariantAbsent(f"torch.compile fails here ({type(error).__name__}: {reason})") from error
        return compiled

    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        expected = self.compute(TorchKernels(), *(tensor.float() for tensor in self.sets[0]))
        return [(output, expected)] if isinstance(output, Tensor) else zip(output, expected, strict=True)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class AddRmsNorm(_Fused, tokens=None, hidden=4096):
    """x and residual -> the norm of their sum, and their sum."""

    name = "add_rms_norm"

    def work(self, variant: str = "") -> Work:
        return Work(4 * self.shape["tokens"] * self.shape["hidden"] * self.dtype.itemsize)

    def allocate(self, copies: int) -> None:
        size = (self.shape["tokens"], self.shape["hidden"])
        weight = self.random(self.shape["hidden"])
        self.sets = [(self.random(*size), self.random(*size), weight) for _ in range(copies)]

    def compute(self, kernels: Kernels, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, residual, weight = inputs
        return kernels.add_rms_norm(Stream(x, residual, Norm(weight, EPS)))

    def eager(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, residual, weight = inputs
        total = residual + x
        return _norm(total, weight), total


class SiluMul(_Fused, tokens=None, inner=4096):
    """gate | up -> silu(gate) * up."""

    name = "silu_mul"

    def work(self, variant: str = "") -> Work:
        return Work(3 * self.shape["tokens"] * self.shape["inner"] * self.dtype.itemsize)

    def allocate(self, copies: int) -> None:
        self.sets = [(self.random(self.shape["tokens"], 2 * self.shape["inner"]),) for _ in range(copies)]

    def compute(self, kernels: Kernels, *inputs: Any) -> Tensor:
        return kernels.silu_mul(*inputs)

    def eager(self, *inputs: Any) -> Tensor:
        gate, up = inputs[0].chunk(2, dim=-1)
        return F.silu(gate) * up


class GatedLinear(_Fused, rows=None, inner=None, hidden=None):
    """x and gate | up, a batch's product and SiLU-mul: the time is the time to read the weights."""

    name = "gated_linear"

    def work(self, variant: str = "") -> Work:
        rows, inner, hidden = (self.shape[key] for key in ("rows", "inner", "hidden"))
        moved = (2 * inner * hidden + rows * (hidden + inner)) * self.dtype.itemsize
        return Work(moved, 4.0 * rows * inner * hidden, "read_gb_s")

    def allocate(self, copies: int) -> None:
        rows, inner, hidden = (self.shape[key] for key in ("rows", "inner", "hidden"))
        weights = (self.random(2 * inner, hidden, scale=hidden**-0.5) for _ in range(copies))
        self.sets = [(self.random(rows, hidden), weight) for weight in weights]

    def compute(self, kernels: Kernels, *inputs: Any) -> Tensor:
        x, weight = inputs
        fused = kernels.gated_linear(x, weight)
        return kernels.silu_mul(kernels.linear(x, weight, None)) if fused is None else fused

    def eager(self, *inputs: Any) -> Tensor:
        gate, up = F.linear(*inputs).chunk(2, dim=-1)
        return F.silu(gate) * up


class RopeAndStore(_Fused, tokens=None, heads=None, qk_norm=False, head_dim=128):
    """q | k | v -> q rotated, k rotated and stored, v stored; with `qk_norm` q and k are normalised by head first."""

    name = "rope_and_store"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._q_heads, self._kv_heads = heads(self.shape["heads"], self.name)

    def work(self, variant: str = "") -> Work:
        """q, k and v come and go; the slot comes, and one half each of cos and sin, whose other half says the same."""
        tokens, head_dim = self.shape["tokens"], self.shape["head_dim"]
        a_token = 2 * (self._q_heads + 2 * self._kv_heads) * head_dim + 2 * (head_dim // 2)
        return Work(tokens * (a_token * self.dtype.itemsize + 8))

    def allocate(self, copies: int) -> None:
        tokens, head_dim = self.shape["tokens"], self.shape["head_dim"]
        width = (self._q_heads + 2 * self._kv_heads) * head_dim
        cache = (2 * tokens, self._kv_heads, head_dim)
        table = RotaryTable(RopeSpec(THETA), head_dim, 2 * tokens, self.dtype, self.device)
        norms = [self.random(head_dim) if self.shape["qk_norm"] else None for _ in range(2)]
        slots = 2 * torch.arange(tokens, device=self.device)  # every other one, so that a wrong slot shows
        half, self.sets = head_dim // 2, []
        for _ in range(copies):
            cos, sin = table(torch.randperm(2 * tokens, device=self.device)[:tokens])
            places = (slots.clone(), self.random(*cache), self.random(*cache))
            unsigned = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # as transformers has it
            self.sets.append((self.random(tokens, width), *norms, cos, sin, unsigned, *places))

    def compute(self, kernels: Kernels, *inputs: Any) -> Tensor:
        qkv, q_weight, k_weight, cos, sin, _, slots, keys, values = inputs
        qk_norm = None if q_weight is None else QKNorm(q_weight, k_weight, EPS)
        return kernels.rope_and_store(qkv, qk_norm, Places(cos, sin, slots, keys, values))

    def eager(self, *inputs: Any) -> Tensor:
        qkv, q_weight, k_weight, cos, _, sin, slots, keys, values = inputs
        parts = qkv.unflatten(-1, (-1, self.shape["head_dim"]))
        q, k, v = parts.split((self._q_heads, self._kv_heads, self._kv_heads), dim=1)
        if q_weight is not None:
            q, k = _norm(q, q_weight), _norm(k, k_weight)
        keys.index_copy_(0, slots, _rotate(k, cos, sin))
        values.index_copy_(0, slots, v)
        return _rotate(q, cos, sin)

    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        *given, slots, keys, values = self.sets[0]
        exact = [torch.zeros_like(side, dtype=torch.float32) for side in (keys, values)]
        floats = (None if tensor is None else tensor.float() for tensor in given)
        yield output, self.compute(TorchKernels(), *floats, slots, *exact)
        for side, right in zip((keys, values), exact, strict=True):
            yield side[slots], right[slots]
            side.normal_()  # what the next implementation does not store itself must not be found right


class Gemv(Case, **{"rows": None, "out": None, "in": None}):
    """x W^T with few rows of x: the time is the time to read W. `eager` is what torch calls, cuBLAS."""

    name = "gemv"
    variants = (EAGER, TRITON)

    def work(self, variant: str = "") -> Work:
        rows, out, into = (self.shape[key] for key in ("rows", "out", "in"))
        moved = (out * into + rows * (out + into)) * self.dtype.itemsize
        return Work(moved, 2.0 * rows * out * into, "read_gb_s")

    def allocate(self, copies: int) -> None:
        rows, out, into = (self.shape[key] for key in ("rows", "out", "in"))
        self.sets = [(self.random(rows, into), self.random(out, into, scale=into**-0.5)) for _ in range(copies)]

    def implementation(self, variant: str) -> Implementation:
        if variant == EAGER:
            return self.on_sets(F.linear)
        require_triton(self.device)
        from mini_infer.kernels.gemv import gemv

        return self.on_sets(gemv)

    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        x, weight = self.sets[0]
        return [(output, x.float() @ weight.float().T)]
