"""The operations around attention (kernels/interface.py), as torch or as fused Triton kernels.

A model is handed one `Kernels` when it is built. Triton is imported by nobody else, and only where it is chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.core.config import KernelChoice
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.interface import Kernels, Places, QKNorm


class TorchKernels:
    """Plain torch operations, on any device."""

    name = "torch"

    def __init__(self, fallback: str | None = None) -> None:
        self.fallback = fallback

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x if residual is None else residual + x
        return F.rms_norm(total, weight.shape, weight, eps), total

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        silu_mul: bool = False,
    ) -> tuple[Tensor, Tensor]:
        normed, total = self.add_rms_norm(x, residual, norm_weight, eps)
        y = self.linear(normed, weight, bias)
        return (self.silu_mul(y) if silu_mul else y), total

    def linear_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.linear(x, weight, bias), residual

    def rope_and_store(self, qkv: Tensor, qk_norm: QKNorm | None, places: Places) -> Tensor:
        cos, sin, slot_mapping, key_slots, value_slots = places
        _, kv_heads, head_dim = key_slots.shape
        tokens, size = qkv.shape
        heads = size // head_dim - 2 * kv_heads
        qk, v = qkv.view(tokens, heads + 2 * kv_heads, head_dim).split((heads + kv_heads, kv_heads), dim=1)
        if qk_norm is not None:
            q_weight, k_weight, eps = qk_norm
            q, k = qk.split((heads, kv_heads), dim=1)
            q, k = F.rms_norm(q, q_weight.shape, q_weight, eps), F.rms_norm(k, k_weight.shape, k_weight, eps)
            qk = torch.cat((q, k), dim=1)
        # The sign of the rotation is in `sin`, so that exchanging the halves is all there is left to do.
        qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), sin)
        q, k = qk.split((heads, kv_heads), dim=1)
        key_slots.index_copy_(0, slot_mapping, k)
        value_slots.index_copy_(0, slot_mapping, v)
        return q

    def norm_qkv_rope(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        qk_norm: QKNorm | None,
        places: Places,
    ) -> tuple[Tensor, Tensor]:
        qkv, total = self.norm_linear(x, residual, norm_weight, eps, weight, bias)
        return self.rope_and_store(qkv, qk_norm, places), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)


class TritonKernels(TorchKernels):
    """One Triton kernel each, or torch's where that is faster. Raises ImportError where Triton is not installed."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        from mini_infer.kernels import gemv, rms_norm, rope_and_store, silu_mul

        self._rms_norm, self._add_rms_norm = rms_norm.rms_norm, rms_norm.add_rms_norm
        self._rope_and_store, self._silu_mul = rope_and_store.rope_and_store, silu_mul.silu_mul
        self._gemv, self._qkv_gemv = gemv.gemv, gemv.qkv_gemv
        self._gemv_is_faster, self._gemv_takes_norm = gemv.worth_it, gemv.takes_norm
        self._gemv_takes_heads = gemv.takes_heads

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self._rms_norm(x, weight, eps), x
        return self._add_rms_norm(x, residual, weight, eps)

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        silu_mul: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if not self._takes_gemv(x, weight):
            return super().norm_linear(x, residual, norm_weight, eps, weight, bias, silu_mul)
        x, norm, total = self._normed_for_gemv(x, residual, norm_weight, eps)
        return self._gemv(x, weight, bias, norm=norm, silu_mul=silu_mul), total

    def norm_qkv_rope(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        qk_norm: QKNorm | None,
        places: Places,
    ) -> tuple[Tensor, Tensor]:
        # A program of gemv has a few rows of a head, and QK-norm needs the sum over all of them.
        if qk_norm is not None or not self._takes_gemv(x, weight) or not self._gemv_takes_heads(x.dtype, places):
            return super().norm_qkv_rope(x, residual, norm_weight, eps, weight, bias, qk_norm, places)
        x, norm, total = self._normed_for_gemv(x, residual, norm_weight, eps)
        return self._qkv_gemv(x, weight, bias, places, norm=norm), total

    def rope_and_store(self, qkv: Tensor, qk_norm: QKNorm | None, places: Places) -> Tensor:
        return self._rope_and_store(qkv, qk_norm, places)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._silu_mul(gate_up)

    def linear_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._takes_gemv(x, weight):
            return self._gemv(x, weight, bias, residual=residual), None
        return super().linear_add(x, residual, weight, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self._takes_gemv(x, weight):
            return self._gemv(x, weight, bias, out)
        return super().linear(x, weight, bias, out)

    def _normed_for_gemv(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, tuple[Tensor, float] | None, Tensor]:
        """(what gemv reads; its norm, if that is left to it; the stream's value)."""
        if residual is None and self._gemv_takes_norm(*x.shape):
            return x, (norm_weight, eps), x
        normed, total = self.add_rms_norm(x, residual, norm_weight, eps)
        return normed, None, total

    def _takes_gemv(self, x: Tensor, weight: Tensor) -> bool:
        (rows, in_size), out_size = x.shape, weight.shape[0]
        return self._gemv_is_faster(rows, out_size, in_size, x.dtype) and weight.is_contiguous()

    def check(self, device: torch.device) -> None:
        """Compiles and runs one small kernel, whatever error that raises."""
        out = self.silu_mul(torch.zeros(1, 32, device=device))
        if out.any():
            raise RuntimeError(f"silu_mul of zeros gave {out.tolist()}")


def select_kernels(choice: KernelChoice, device: torch.device) -> Kernels:
    """The chosen kernels; `auto` takes Triton's on CUDA where they work, and else torch, with the reason in `fallback`.

    Raises:
        ConfigError: triton is chosen and cannot be had.
    """
    if choice is KernelChoice.torch or (choice is KernelChoice.auto and device.type != "cuda"):
        return TorchKernels()
    try:
        kernels = TritonKernels()
        if device.type == "cuda" or _interpreted():
            kernels.check(device)
            return kernels
        reason = f"it runs on CUDA, not on {device.type} (unless TRITON_INTERPRET=1 is set: for tests, and slow)"
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    except Exception as error:  # Triton's own errors, the C compiler's, the driver's
        message = str(error).strip().partition("\n")[0]
        reason = f"Triton cannot compile a kernel here ({type(error).__name__}: {message})"
    if choice is KernelChoice.auto:
        return TorchKernels(fallback=f"triton: {reason}")
    raise ConfigError(f"model.kernels=triton: {reason}. Set model.kernels=auto or torch")


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
