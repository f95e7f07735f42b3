"""The operations between products and attention (kernels/interface.py), as torch or as fused Triton kernels.

A model is handed one `Kernels` when it is built. Triton is imported by nobody else, and only where it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.core.config import KernelChoice, Numerics
from mini_infer.core.errors import ConfigError
from mini_infer.kernels import lora
from mini_infer.kernels.interface import (
    ExpertWeights,
    Kernels,
    LatentPlaces,
    Norm,
    Part,
    Places,
    QKNorm,
    RouterSpec,
    Routes,
    Stream,
    TokenPlaces,
)
from mini_infer.kernels.limits import FP8_GPUS
from mini_infer.kernels.moe.reference import (
    add_experts_reference,
    expert_results_reference,
    experts_reference,
    route_reference,
)
from mini_infer.quantization.formats import ActivationFormat, Number, WeightFormat, as_stored, quantize_tokens
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight, quantized_linear_reference


class TorchKernels:
    """Plain torch operations, on any device."""

    name = "torch"
    invariant = False
    gemv: ModuleType | None = None
    all_reduce: ModuleType | None = None
    dispatch: ModuleType | None = None
    lora: ModuleType = lora

    def __init__(self, fallback: str | None = None) -> None:
        self.fallback = fallback

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, *, chunks: int = 1
    ) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def num_chunks(self, in_size: int, dtype: torch.dtype) -> int | None:
        return None

    def quantized_linear(
        self,
        x: Tensor | QuantizedTokens,
        weight: QuantizedWeight,
        bias: Tensor | None,
        activations: ActivationFormat | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        dtype = x.dtype
        if activations is not None:
            # Summed in float64, so that no row's company decides to which side its result is rounded: it is rounded
            # again before the next product, where a step of fp8 is 6 %.
            codes, scales = quantize_tokens(x, activations) if isinstance(x, Tensor) else x[:2]
            x = QuantizedTokens(codes, scales, torch.float64)
        y = quantized_linear_reference(x, weight, bias, activations).to(dtype)
        return y if residual is None else residual + y

    def quantized_refusal(self, form: WeightFormat, activations: ActivationFormat | None, in_size: int) -> str | None:
        return None

    def quantized_gemv(
        self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int, dtype: torch.dtype
    ) -> Callable[..., Tensor] | None:
        return None

    def adds_residual(self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int) -> bool:
        return True

    def outlier_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.double(), weight.double()).to(x.dtype)  # as `quantized_linear` sums the other columns

    def quantize_tokens(self, x: Tensor, form: ActivationFormat, silu_mul: bool = False) -> QuantizedTokens:
        return QuantizedTokens(*quantize_tokens(self.silu_mul(x) if silu_mul else x, form), x.dtype)

    def quantized_norm(self, stream: Stream, form: ActivationFormat) -> tuple[QuantizedTokens, Tensor]:
        normed, total = self.add_rms_norm(stream)
        return self.quantize_tokens(normed, form), total

    def add_rms_norm(self, stream: Stream, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, residual, (weight, eps) = stream
        x = x.sum() if isinstance(x, Part) else x
        total = x if residual is None else torch.add(residual, x, out=value)
        return F.rms_norm(total, weight.shape, weight, eps), total

    def rope_and_store(self, qkv: Tensor, qk_norm: QKNorm | None, places: Places, more: Tensor | None = None) -> Tensor:
        qkv = qkv if more is None else qkv + more
        cos, sin, slot_mapping, key_slots, value_slots, kv_scales = places
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
        if key_slots.dtype is not k.dtype:
            k, v = as_stored(k, v, key_slots.dtype, kv_scales)
        key_slots.view(k.dtype).index_copy_(0, slot_mapping, k)
        value_slots.view(v.dtype).index_copy_(0, slot_mapping, v)
        return q

    def rope_and_store_latent(self, q: Tensor, kv: Tensor, norm: Norm, places: LatentPlaces) -> Tensor:
        rope_dim = places.cos.shape[-1]
        c, r = kv.tensor_split((-rope_dim,), dim=1)
        nope, rotated = q.tensor_split((-rope_dim,), dim=2)
        latents = torch.cat((F.rms_norm(c, norm.weight.shape, *norm), _rotated(r[:, None], places)[:, 0]), dim=1)
        latents, _ = as_stored(latents, latents, places.slots.dtype, None)
        places.slots.view(latents.dtype).index_copy_(0, places.slot_mapping, latents)
        return torch.cat((nope, _rotated(rotated, places)), dim=2)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        return None

    def silu_mul(self, gate_up: Tensor, more: Tensor | None = None) -> Tensor:
        gate_up = gate_up if more is None else gate_up + more
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def route(self, logits: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces) -> Routes:
        return route_reference(logits, bias, router, tokens)

    def norm_and_route(
        self, stream: Stream, gate: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces
    ) -> tuple[Tensor, Tensor, Routes] | None:
        return None

    def experts(
        self,
        x: Tensor,
        routes: Routes,
        weights: ExpertWeights,
        residual: Tensor | None = None,
        *,
        elsewhere: bool = False,
    ) -> Tensor:
        return experts_reference(x, routes, weights, residual)

    def experts_and_shared(
        self, x: Tensor, routes: Routes, weights: ExpertWeights, shared: tuple[Tensor, Tensor], residual: Tensor
    ) -> Tensor | None:
        return None

    def expert_results(self, x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        return expert_results_reference(x, routes, weights).float()

    def add_experts(self, results: Tensor, shares: Tensor) -> Tensor:
        return add_experts_reference(results, shares)


def _rotated(x: Tensor, places: LatentPlaces) -> Tensor:
    """x [T, heads, P], the first of each pair then in the first half."""
    if places.interleaved:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return torch.addcmul(x * places.cos, x.roll(x.shape[-1] // 2, dims=-1), places.sin)


class TritonKernels(TorchKernels):
    """One Triton kernel each. Raises ImportError where Triton is not installed."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        from mini_infer.kernels import (
            all_reduce,
            gated_linear,
            gemv,
            lora_kernels,
            rms_norm,
            rope_and_store,
            rope_and_store_latent,
            silu_mul,
        )
        from mini_infer.kernels.moe import dispatch, experts, route
        from mini_infer.kernels.quantized import gemv as quantized_gemv
        from mini_infer.kernels.quantized import linear as quantized_linear
        from mini_infer.kernels.quantized.tokens import quantize_tokens

        self.gemv, self.all_reduce, self.dispatch, self.lora = gemv, all_reduce, dispatch, lora_kernels
        self._gated_linear: ModuleType | None = gated_linear
        self._quantized, self._quantized_gemv = quantized_linear, quantized_gemv
        self._quantize_tokens = quantize_tokens
        self._rms_norm, self._add_rms_norm = rms_norm.rms_norm, rms_norm.add_rms_norm
        self._rope_and_store_latent = rope_and_store_latent.rope_and_store_latent
        self._rope_and_store, self._silu_mul = rope_and_store.rope_and_store, silu_mul.silu_mul
        self._router, self._experts, self._few_tokens = route, experts.experts, experts.FEW_TOKENS
        self._can_share = experts.can_share
        self._expert_results, self._add_experts = experts.expert_results, experts.add_experts
        self._quantized_norm = rms_norm.quantized_rms_norm

    def quantized_linear(
        self,
        x: Tensor | QuantizedTokens,
        weight: QuantizedWeight,
        bias: Tensor | None,
        activations: ActivationFormat | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        rows = len(x) if isinstance(x, Tensor) else len(x.codes)
        for_library = activations is None or x.dtype == torch.bfloat16
        if self.adds_residual(weight, activations, rows) or not for_library:
            return self._quantized.quantized_linear(
                x, weight, bias, activations, residual=residual, one_order=self.invariant
            )
        if activations is None:
            assert isinstance(x, Tensor)
            y = self.linear(x, self._quantized.dequantize_weight(weight, x.dtype), bias)
        else:
            tokens = self.quantize_tokens(x, activations) if isinstance(x, Tensor) else x
            y = self._quantized.library_product(tokens, weight, bias)
        return y if residual is None else residual + y

    def outlier_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x, weight, None)

    def quantized_gemv(
        self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int, dtype: torch.dtype
    ) -> Callable[..., Tensor] | None:
        fits = self._quantized_gemv.worth_it(weight, activations, rows, dtype)
        return self._quantized_gemv.quant_gemv if fits else None

    def adds_residual(self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int) -> bool:
        """Not where a library computes the product."""
        return rows <= self._quantized.own_rows(weight, activations)

    def quantize_tokens(self, x: Tensor, form: ActivationFormat, silu_mul: bool = False) -> QuantizedTokens:
        return self._quantize_tokens(x, form, silu_mul)

    def quantized_refusal(self, form: WeightFormat, activations: ActivationFormat | None, in_size: int) -> str | None:
        if form.number is Number.fp8 and torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_GPUS:
            return f"fp8 takes GPUs of compute capability {FP8_GPUS[0]}.{FP8_GPUS[1]} and above"
        try:
            self._quantized.check(form, activations, in_size)
        except ValueError as error:
            return str(error)
        return None

    def quantized_norm(self, stream: Stream, form: ActivationFormat) -> tuple[QuantizedTokens, Tensor]:
        x, residual, norm = stream
        if isinstance(x, Part):
            return super().quantized_norm(stream, form)
        return self._quantized_norm(x, residual, *norm, form)

    def add_rms_norm(self, stream: Stream, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, residual, norm = stream
        if isinstance(x, Part):
            if residual is not None and x.more is not None:
                return self._add_rms_norm(x.own, residual, *norm, value, x.more)
            summed = None
            if residual is not None and not (x.ordered or x.halves):
                summed = x.ranks.add_rms_norm(x.own, residual, norm)
            return self.add_rms_norm(Stream(x.sum(), residual, norm)) if summed is None else summed
        if residual is None:
            return self._rms_norm(x, *norm), x
        return self._add_rms_norm(x, residual, *norm, value)

    def rope_and_store(self, qkv: Tensor, qk_norm: QKNorm | None, places: Places, more: Tensor | None = None) -> Tensor:
        return self._rope_and_store(qkv, qk_norm, places, more, one_shape=self.invariant)

    def rope_and_store_latent(self, q: Tensor, kv: Tensor, norm: Norm, places: LatentPlaces) -> Tensor:
        return self._rope_and_store_latent(q, kv, norm, places)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        gated, fits = self._gated_linear, x.is_contiguous() and weight.is_contiguous()
        if gated is None or not fits or not gated.worth_it(len(x), len(weight) // 2, x.shape[1], x.dtype, x.device):
            return None
        return gated.gated_linear(x, weight)

    def silu_mul(self, gate_up: Tensor, more: Tensor | None = None) -> Tensor:
        return self._silu_mul(gate_up, more)

    def route(self, logits: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces) -> Routes:
        return self._router.route(logits, bias, router, tokens)

    def norm_and_route(
        self, stream: Stream, gate: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces
    ) -> tuple[Tensor, Tensor, Routes] | None:
        x = stream.x
        if isinstance(x, Part) or not self._few_tokens or not self._router.worth_it(len(x), gate.dtype):
            return None
        return self._router.norm_and_route(stream, gate, bias, router, tokens)

    def experts(
        self,
        x: Tensor,
        routes: Routes,
        weights: ExpertWeights,
        residual: Tensor | None = None,
        *,
        elsewhere: bool = False,
    ) -> Tensor:
        return self._experts(x, routes, weights, residual, elsewhere=elsewhere, few_tokens=self._few_tokens)

    def experts_and_shared(
        self, x: Tensor, routes: Routes, weights: ExpertWeights, shared: tuple[Tensor, Tensor], residual: Tensor
    ) -> Tensor | None:
        if len(x) != 1 or not self._few_tokens or not self._can_share(weights, shared):
            return None  # of more tokens each would read the shared weights anew
        return self._experts(x, routes, weights, residual, shared=shared)

    def expert_results(self, x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        return self._expert_results(x, routes, weights, torch.float32)

    def add_experts(self, results: Tensor, shares: Tensor) -> Tensor:
        return self._add_experts(results, shares)

    def check(self, device: torch.device) -> None:
        """Compiles and runs one small kernel, whatever error that raises."""
        out = self.silu_mul(torch.zeros(1, 32, device=device))
        if out.any():
            raise RuntimeError(f"silu_mul of zeros gave {out.tolist()}")


class InvariantKernels(TritonKernels):
    """Those of TritonKernels that compute a token alike in any company, and products that do."""

    invariant = True

    def __init__(self) -> None:
        super().__init__()
        from mini_infer.kernels.invariant_linear import invariant_linear, num_chunks

        self.gemv = self._gated_linear = None  # they sum in other orders than products of more rows
        self._few_tokens = 0  # one way for all
        self._linear, self._num_chunks = invariant_linear, num_chunks

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, *, chunks: int = 1
    ) -> Tensor:
        return self._linear(x, weight.contiguous(), bias, out, chunks=chunks)  # a copy on a CPU alone, for tests

    def num_chunks(self, in_size: int, dtype: torch.dtype) -> int | None:
        return self._num_chunks(in_size, dtype.itemsize)

    def quantized_gemv(
        self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int, dtype: torch.dtype
    ) -> Callable[..., Tensor] | None:
        return None  # for the same reason

    def adds_residual(self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int) -> bool:
        return True  # one kernel for all


def select_kernels(choice: KernelChoice, device: torch.device, numerics: Numerics = Numerics.fast) -> Kernels:
    """The chosen kernels; `auto` takes Triton's on CUDA where they work, and else torch, with the reason in `fallback`.

    Raises:
        ConfigError: triton is chosen, or needed for the numerics, and cannot be had.
    """
    invariant = numerics is Numerics.batch_invariant
    if choice is KernelChoice.torch and invariant:
        raise ConfigError(
            "numerics=batch_invariant needs our own kernels, not model.kernels=torch: set model.kernels=auto"
        )
    if not invariant and (choice is KernelChoice.torch or (choice is KernelChoice.auto and device.type != "cuda")):
        return TorchKernels()
    try:
        kernels = InvariantKernels() if invariant else TritonKernels()
        if device.type == "cuda" or _interpreted():
            kernels.check(device)
            return kernels
        reason = f"it runs on CUDA, not on {device.type} (unless TRITON_INTERPRET=1 is set: for tests, and slow)"
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    except Exception as error:  # Triton's own errors, the C compiler's, the driver's
        message = str(error).strip().partition("\n")[0]
        reason = f"Triton cannot compile a kernel here ({type(error).__name__}: {message})"
    if invariant:
        raise ConfigError(f"numerics=batch_invariant needs our own kernels: {reason}. Set numerics=fast")
    if choice is KernelChoice.auto:
        return TorchKernels(fallback=f"triton: {reason}")
    raise ConfigError(f"model.kernels=triton: {reason}. Set model.kernels=auto or torch")


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
