"""ModelSpec: all that the runtime and the decoder know about a model, read from its config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from mini_infer.cache.layout import KVLayout
from mini_infer.core.errors import ModelError
from mini_infer.kernels.interface import RouterSpec
from mini_infer.modeling.rope import RopeSpec
from mini_infer.quantization.checkpoints import ModelFormat


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention whose query heads share KV heads in groups (Ainslie et al. 2023, arXiv:2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q.k
    window: int | None = None  # a query at position p sees (p - window, p]; None: all before it
    rope: RopeSpec | None = None  # None: transformers' code turns q and k, or nobody
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's q and k
    qk_norm_of_all: bool = False  # RMSNorm over q, all heads together, and over k (OLMoE)
    kv_copies: int = 1  # ranks that have the same KV heads (modeling/sharding.py)


@dataclass(frozen=True)
class MLPSpec:
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020, arXiv:2002.05202)."""

    intermediate_size: int
    bias: bool = False

    def activation_width(self, hidden_size: int) -> int:
        """Numbers that a token takes in it: gate, up and their product."""
        return 3 * self.intermediate_size


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture of experts, below "model.layers.0"."""

    block: str = "mlp"  # which has gate (the router's weight) and experts
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088): each token's
    result is the weighted sum of those of the few experts, SwiGLU without bias, to which the router sends it. Shared
    experts, side by side in one MLP, take every token (Dai et al. 2024, arXiv:2401.06066)."""

    router: RouterSpec
    intermediate_size: int  # of one expert
    shared: MLPSpec | None = None
    shared_gate: bool = False  # their result is multiplied by the sigmoid of a product of x (Qwen2-MoE)
    names: ExpertNames = ExpertNames()

    def activation_width(self, hidden_size: int) -> int:
        """Numbers that a token takes in it, of which each of its experts makes some."""
        own = self.router.top_k * (self.intermediate_size + hidden_size) + 2 * self.router.num_experts
        return own + (0 if self.shared is None else self.shared.activation_width(hidden_size))


FeedForwardSpec = MLPSpec | MoESpec


@dataclass(frozen=True)
class LayerSpec:
    attention: AttentionSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True)
class ModelSpec:
    """Raises ModelError where layers' attention differs in more than the window."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_model_len: int  # tokens of prompt + output
    dtype: torch.dtype | None  # what config.json says of the checkpoint, if anything
    eos_token_ids: tuple[int, ...]
    quantization: ModelFormat | None = None  # of linear layers; None: all in the model's dtype
    fp8_kv: bool = False  # keys and values are kept in float8_e4m3fn, with a scale a head
    through_transformers: bool = False  # its code runs the model; of the rest, `layers` has what attention must know
    config: Any = field(default=None, compare=False, repr=False)  # of transformers, from which all this was read

    def __post_init__(self) -> None:
        kinds = {dataclasses.replace(layer.attention, window=None) for layer in self.layers}
        if len(kinds) != 1:
            raise ModelError(f"{self.architecture}: layers whose attention differs in more than the window: {kinds}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Of all layers, but for their windows."""
        return self.layers[0].attention

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def activation_width(self) -> int:
        """About how many numbers a token takes in the widest layer, counted as if none were freed before its end."""
        heads, head_dim = self.attention.num_heads + self.attention.num_kv_heads, self.attention.head_dim
        # The stream and its norms; q, k and v merged, and q again.
        widest = max(layer.feed_forward.activation_width(self.hidden_size) for layer in self.layers)
        return 4 * self.hidden_size + 2 * heads * head_dim + widest

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Of a model that computes in `dtype`."""
        attention = self.attention
        dtype = torch.float8_e4m3fn if self.fp8_kv else dtype
        return KVLayout.of_heads(self.num_layers, attention.num_kv_heads, attention.head_dim, dtype)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An end-of-sequence entry of a config: one id, several, or none (some files say -1 for none)."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(token for token in values if token >= 0)
