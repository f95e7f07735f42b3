"""ModelSpec: all that the runtime and the decoder know about a model, read from its config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from mini_infer.attention.backend import Latent
from mini_infer.attention.mla import LATENT
from mini_infer.cache.layout import KVLayout, Plane
from mini_infer.core.config import MLAForm
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
    latent: ClassVar[None] = None  # its cache holds keys and values

    @property
    def value_dim(self) -> int:
        """Of a head of what attention gives."""
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Of a query or a key, as much as is rotated."""
        return self.head_dim

    @property
    def activation_width(self) -> int:
        """As ModelSpec's: q, k and v merged, and q again."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def num_weights(self, hidden_size: int) -> int:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = (q + 2 * kv) * self.qkv_bias + hidden_size * self.o_bias
        norms = 2 * self.head_dim * self.qk_norm + (q + kv) * self.qk_norm_of_all
        return hidden_size * (2 * q + 2 * kv) + biases + norms

    def heads_layout(self, num_layers: int, dtype: torch.dtype) -> KVLayout:
        """Of keys and values of every KV head."""
        return KVLayout.of_heads(num_layers, self.num_kv_heads, self.head_dim, dtype)

    kv_layout = heads_layout  # what it keeps


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): modeling/mla.py."""

    num_heads: int
    rank: int  # of the latent that keys and values are made of
    nope_dim: int  # of a head of q and k, what has no position
    rope_dim: int  # ... and what is rotated, which all heads of k share
    value_dim: int
    scale: float  # of q.k
    rope: RopeSpec
    q_rank: int | None = None  # of the latent that queries are made of; None: they are made of the stream
    interleaved: bool = True  # dimensions 2i and 2i + 1 are rotated together; else i and i + rope_dim / 2
    bias: bool = False  # of all products but those that make heads
    window: int | None = None  # always None
    kv_copies: ClassVar[int] = 1  # each rank has KV heads of its own
    form: MLAForm = MLAForm.absorbed  # of the cache and of attention
    crossover: int = 0  # as AttentionConfig.mla_crossover

    @property
    def head_dim(self) -> int:
        """Of a query or a key."""
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def num_kv_heads(self) -> int:
        """Where keys and values are expanded."""
        return self.num_heads

    @property
    def latent(self) -> Latent | None:
        """Of the cache; None where it holds keys and values."""
        if self.form is MLAForm.naive:
            return None
        sizes = self.num_heads, self.head_dim, self.value_dim, self.rank, self.rope_dim
        return Latent(*sizes, self.form, self.crossover)

    @property
    def activation_width(self) -> int:
        """As ModelSpec's: q three times, k and v, and what is absorbed."""
        return self.num_heads * (4 * self.head_dim + 2 * self.value_dim + 2 * self.rank + self.rope_dim)

    def num_weights(self, hidden_size: int) -> int:
        q, kv, o = self.num_heads * self.head_dim, self.rank + self.rope_dim, self.num_heads * self.value_dim
        of_q = hidden_size * q if self.q_rank is None else self.q_rank * (hidden_size + q + 1)
        biases = ((self.q_rank or 0) + kv + hidden_size) * self.bias
        made = self.num_heads * (self.nope_dim + self.value_dim)
        return of_q + hidden_size * (kv + o) + self.rank * (made + 1) + biases

    def heads_layout(self, num_layers: int, dtype: torch.dtype) -> KVLayout:
        return KVLayout.of_heads(num_layers, self.num_heads, self.head_dim, dtype, self.value_dim)

    def kv_layout(self, num_layers: int, dtype: torch.dtype) -> KVLayout:
        if self.latent is None:
            return self.heads_layout(num_layers, dtype)
        return KVLayout.alike(num_layers, Plane(LATENT, (self.rank + self.rope_dim,), dtype))


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
    attention: AttentionSpec | MLASpec
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
    fp8_kv: bool = False  # keys and values are kept in float8_e4m3fn, with a scale a head; or latents, without
    through_transformers: bool = False  # its code runs the model; of the rest, `layers` has what attention must know
    first_layer: int = 0  # of `layers` in the whole model, of which this is one stage's part (modeling/stages.py)
    stage_of: ModelSpec | None = None  # the whole model; None: this is it
    config: Any = field(default=None, compare=False, repr=False)  # of transformers, from which all this was read

    def __post_init__(self) -> None:
        kinds = {dataclasses.replace(layer.attention, window=None) for layer in self.layers}
        if len(kinds) != 1:
            raise ModelError(f"{self.architecture}: layers whose attention differs in more than the window: {kinds}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def whole(self) -> ModelSpec:
        return self.stage_of or self

    @property
    def is_first(self) -> bool:
        """Whether it looks tokens up; else hidden states come from the stage before."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether it scores tokens; else its hidden states go to the stage behind."""
        return self.first_layer + self.num_layers == self.whole.num_layers

    @property
    def attention(self) -> AttentionSpec | MLASpec:
        """Of all layers, but for their windows."""
        return self.layers[0].attention

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def activation_width(self) -> int:
        """About how many numbers a token takes in the widest layer, counted as if none were freed before its end."""
        # The stream and its norms; attention's; the feed-forward's.
        widest = max(layer.feed_forward.activation_width(self.hidden_size) for layer in self.layers)
        return 4 * self.hidden_size + self.attention.activation_width + widest

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Of a model that computes in `dtype`."""
        return self.attention.kv_layout(self.num_layers, torch.float8_e4m3fn if self.fp8_kv else dtype)

    def heads_layout(self, dtype: torch.dtype) -> KVLayout:
        """What it would keep of keys and values of every KV head, in `dtype`: with which `kv_layout` compares."""
        return self.attention.heads_layout(self.num_layers, dtype)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An end-of-sequence entry of a config: one id, several, or none (some files say -1 for none)."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(token for token in values if token >= 0)
