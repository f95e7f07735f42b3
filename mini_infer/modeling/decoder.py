"""The decoder of Llama 2/3, Qwen2/2.5, Qwen3 and Mistral: what differs between them is in ModelSpec.

Each half of a layer reads the residual stream through a norm and a product, and adds a product to it:

    stream --> norm, qkv_proj, rotary embedding --> attend --> o_proj, add --> stream
                                     |                 ^
                                     '--- KV cache ----'
    stream --> norm, gate_up_proj, SiLU-mul --> down_proj, add --> stream

The stream is a pair (x, residual), and what stands between two arrows is one operation (kernels/interface.py): which
kernels it is made of, and who adds x to residual, depends on the number of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_infer.attention.context import AttentionContext
from mini_infer.kernels.interface import Kernels, Places, QKNorm
from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.layers import Linear, RMSNorm, empty_parameter
from mini_infer.modeling.rope import RotaryTable
from mini_infer.modeling.spec import ModelSpec


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> None:
        super().__init__()
        self._layer, self._kernels = layer, kernels
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(spec.hidden_size, qkv, spec.qkv_bias, dtype, device, kernels)
        self.o_proj = Linear(q_size, {"o_proj": spec.hidden_size}, spec.o_bias, dtype, device, kernels)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device, kernels)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device, kernels)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: RMSNorm,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor | None]:
        qk_norm = None
        if self.q_norm is not None and self.k_norm is not None:
            qk_norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        key_slots, value_slots = context.key_slots(self._layer), context.value_slots(self._layer)
        places = Places(cos, sin, context.batch.slot_mapping, key_slots, value_slots)
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        q, residual = self._kernels.norm_qkv_rope(x, residual, norm.weight, norm.eps, weight, bias, qk_norm, places)
        return self.o_proj.add_to_stream(context.attend(self._layer, q).flatten(1), residual)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> None:
        super().__init__()
        size = spec.intermediate_size
        gate_up = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(spec.hidden_size, gate_up, spec.mlp_bias, dtype, device, kernels)
        self.down_proj = Linear(size, {"down_proj": spec.hidden_size}, spec.mlp_bias, dtype, device, kernels)

    def forward(self, x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor | None]:
        activated, residual = self.gate_up_proj.of_stream(norm, x, residual, silu_mul=True)
        return self.down_proj.add_to_stream(activated, residual)


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device, kernels)
        self.self_attn = Attention(spec, layer, dtype, device, kernels)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device, kernels)
        self.mlp = MLP(spec, dtype, device, kernels)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = self.self_attn(x, residual, self.input_layernorm, cos, sin, context)
        return self.mlp(x, residual, self.post_attention_layernorm)


class Decoder(nn.Module):
    """Parameters are empty until the loader fills them.

    Args:
        max_len: one more than the last position that may come.
        kernels: the operations between the matrix products; default: torch's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.kernels = kernels or TorchKernels()
        self.embed_tokens = empty_parameter(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryTable(spec.rope, spec.head_dim, max_len, dtype, device)
        layers = (DecoderLayer(spec, i, dtype, device, self.kernels) for i in range(spec.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device, self.kernels)
        self.lm_head = self.embed_tokens
        if not spec.tie_word_embeddings:
            self.lm_head = empty_parameter(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden_size] after the last norm."""
        cos, sin = self.rotary(positions)
        x, residual = F.embedding(token_ids, self.embed_tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, context)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size], of the model's dtype; in `out`, contiguous, where it is given."""
        return self.kernels.linear(hidden, self.lm_head, out=out)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the part of a parameter that it fills. Together they cover every parameter once."""
        tensors: dict[str, Tensor] = {"model.embed_tokens.weight": self.embed_tokens}
        if not self.spec.tie_word_embeddings:
            tensors["lm_head.weight"] = self.lm_head
        for path, module in self.named_modules(prefix="model"):
            parent = path.rpartition(".")[0]
            if isinstance(module, Linear):
                tensors |= {f"{parent}.{name}": part for name, part in module.checkpoint_tensors().items()}
            elif isinstance(module, RMSNorm):
                tensors[f"{path}.weight"] = module.weight
        return tensors
