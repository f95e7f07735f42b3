"""The decoder of Llama 2/3, Qwen2/2.5, Qwen3 and Mistral: what differs between them is in ModelSpec."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_infer.attention.context import AttentionContext
from mini_infer.modeling.layers import Linear, RMSNorm, empty_parameter
from mini_infer.modeling.rope import RotaryTable, rotate
from mini_infer.modeling.spec import ModelSpec


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(spec.hidden_size, qkv, spec.qkv_bias, dtype, device)
        self.o_proj = Linear(q_size, {"o_proj": spec.hidden_size}, spec.o_bias, dtype, device)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), dim=1)
        q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
        return self.o_proj(context.attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = spec.intermediate_size
        gate_up = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(spec.hidden_size, gate_up, spec.mlp_bias, dtype, device)
        self.down_proj = Linear(size, {"down_proj": spec.hidden_size}, spec.mlp_bias, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.self_attn = Attention(spec, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.mlp = MLP(spec, dtype, device)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Parameters are empty until the loader fills them; `max_len` is one more than the last position that may come."""

    def __init__(self, spec: ModelSpec, *, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = empty_parameter(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryTable(spec.rope, spec.head_dim, max_len, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype, device) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.lm_head = self.embed_tokens
        if not spec.tie_word_embeddings:
            self.lm_head = empty_parameter(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden_size] after the last norm."""
        cos, sin = self.rotary(positions)
        hidden = F.embedding(token_ids, self.embed_tokens)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, context)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] float32."""
        return F.linear(hidden, self.lm_head).float()

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
