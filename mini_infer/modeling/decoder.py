"""The decoder of Llama 2/3, Qwen2/2.5, Qwen3, Mistral, DeepSeek-V2/V3 and of mixtures of experts: what differs between
them is in ModelSpec.

Each half of a layer reads the residual stream through a norm and a product, and adds a product to it:

    stream --> norm, qkv_proj, rotary embedding --> attend --> o_proj, add --> stream
                                     |                 ^
                                     '--- KV cache ----'
    stream --> norm, gate_up_proj, SiLU-mul --> down_proj, add --> stream

The stream is a pair (x, residual), and what stands between two arrows is one operation of a Linear
(modeling/layers.py): which kernels it is made of, and who adds x to residual, depends on its number format and on the
number of tokens.

`forward` is called by name: Module.__call__ would look for hooks, which take longer than a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from mini_infer.attention.context import AttentionContext, ModelAttention, UpProjections
from mini_infer.cache.kv_store import KVStore
from mini_infer.kernels.interface import Part, Places, QKNorm, Stream, TokenPlaces
from mini_infer.modeling.kv_scales import KVScales
from mini_infer.modeling.layers import Layer, Linear, RMSNorm, VocabularyTable
from mini_infer.modeling.linear_methods.base import Build, Parallel
from mini_infer.modeling.mla import LatentAttention
from mini_infer.modeling.mlp import MLP
from mini_infer.modeling.model import CheckpointTensor, Model
from mini_infer.modeling.moe import Experts, MoE
from mini_infer.modeling.rope import RotaryTable
from mini_infer.modeling.spec import AttentionSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from mini_infer.parallel.expert_copies import HotExperts
from mini_infer.parallel.expert_meter import Meter


class Attention(nn.Module):
    def __init__(self, name: str, layer: int, model: ModelSpec, spec: AttentionSpec, build: Build) -> None:
        super().__init__()
        self._layer = layer
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        copies = {"k_proj": spec.kv_copies, "v_proj": spec.kv_copies}
        self.qkv_proj = Linear(name, model.hidden_size, qkv, spec.qkv_bias, Parallel.column, build, copies)
        self.o_proj = Linear(name, q_size, {"o_proj": model.hidden_size}, spec.o_bias, Parallel.row, build)
        self._qk_norm, self._norms_of_all = None, False
        if spec.qk_norm or spec.qk_norm_of_all:
            q_width, k_width = spec.head_dim, spec.head_dim
            if spec.qk_norm_of_all:
                ranks = build.parallel.size
                q_width, k_width = q_size * ranks, kv_size * ranks // spec.kv_copies
            self.q_norm = RMSNorm(f"{name}.q_norm", q_width, model.norm_eps, build)
            self.k_norm = RMSNorm(f"{name}.k_norm", k_width, model.norm_eps, build)
            self._norms_of_all = spec.qk_norm_of_all
            if spec.qk_norm:
                self._qk_norm = QKNorm(self.q_norm.weight, self.k_norm.weight, model.norm_eps)
        self._kernels, self._parallel, self._sizes = build.kernels, build.parallel, (q_size, kv_size, kv_size)
        self._kv_copies = spec.kv_copies

    def forward(
        self, stream: Stream, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> tuple[Tensor | Part, Tensor | None]:
        key_slots, value_slots = context.key_slots(self._layer), context.value_slots(self._layer)
        scales = context.kv_scales(self._layer)
        places = Places(cos, sin, context.batch.slot_mapping, key_slots, value_slots, scales)
        if self._norms_of_all:
            qkv, residual = self.qkv_proj.of_stream(stream)
            q = self._kernels.rope_and_store(self._normed(qkv), None, places)
        else:
            q, residual = self.qkv_proj.heads_of_stream(stream, self._qk_norm, places)
        return self.o_proj.add_to_stream(context.attend(self._layer, q).flatten(1), residual)

    def _normed(self, qkv: Tensor) -> Tensor:
        """With the norms over all heads of q, and over all of k."""
        q, k, v = qkv.split(self._sizes, dim=1)
        return torch.cat((self._own_normed(q, self.q_norm, 1), self._own_normed(k, self.k_norm, self._kv_copies), v), 1)

    def _own_normed(self, x: Tensor, norm: RMSNorm, copies: int) -> Tensor:
        """x [T, size], this rank's heads, which `copies` ranks have alike, with the norm over those of all ranks."""
        every = self._parallel.all_gather(x)[::copies].transpose(0, 1).flatten(1).contiguous()
        normed, _ = self._kernels.add_rms_norm(Stream(every, None, norm.norm))
        return normed[:, self._parallel.part(every.shape[1], x.shape[1])]


# A kind of attention or feed-forward, and who computes it.
ATTENTION = {AttentionSpec: Attention, MLASpec: LatentAttention}
FEED_FORWARD: dict[type, Callable[..., MLP | MoE]] = {MLPSpec: MLP, MoESpec: MoE}


class DecoderLayer(nn.Module):
    def __init__(self, name: str, layer: int, model: ModelSpec, build: Build) -> None:
        super().__init__()
        spec, size, eps = model.layers[layer], model.hidden_size, model.norm_eps
        attention, feed_forward = ATTENTION[type(spec.attention)], FEED_FORWARD[type(spec.feed_forward)]
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", size, eps, build)
        self.self_attn = attention(f"{name}.self_attn", layer, model, spec.attention, build)
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, build)
        self.mlp = feed_forward(f"{name}.mlp", model, spec.feed_forward, build)
        self._norms = self.input_layernorm.norm, self.post_attention_layernorm.norm

    def forward(
        self,
        x: Tensor | Part,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        context: AttentionContext,
        tokens: TokenPlaces,
    ) -> tuple[Tensor | Part, Tensor | None]:
        before_attention, before_mlp = self._norms
        x, residual = self.self_attn.forward(Stream(x, residual, before_attention), cos, sin, context)
        return self.mlp.forward(Stream(x, residual, before_mlp), tokens)


class Decoder(Model):
    """Parameters are empty until the loader fills them. Positions are below max_len. `spec` says which layers this rank
    computes, and what of each; hidden states and logits are whole on every rank."""

    _counted: Tensor | None = None  # expert_counts and rank_counts side by side, which ranks add up at once

    def __init__(self, spec: ModelSpec, max_len: int, build: Build) -> None:
        super().__init__(spec, build.dtype, build.device)
        self.embed_tokens = VocabularyTable("model.embed_tokens", spec, build) if spec.is_first else None
        attention = spec.attention
        assert attention.rope is not None, "the architectures of the registry have one"
        self.rotary = RotaryTable(attention.rope, attention.rotary_dim, max_len, build.dtype, build.device)
        names = [f"model.layers.{spec.first_layer + i}" for i in range(spec.num_layers)]
        layers = [DecoderLayer(name, i, spec, build) for i, name in enumerate(names)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm("model.norm", spec.hidden_size, spec.norm_eps, build) if spec.is_last else None
        self._end = (self.norm or layers[-1].input_layernorm).norm  # the stream's value comes with any norm of it
        self.lm_head = self.embed_tokens if spec.is_last and spec.tie_word_embeddings else None
        if spec.is_last and self.lm_head is None:
            table = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
            self.lm_head = VocabularyTable(table, spec, build)
        self._stored_scales: KVScales | None = None
        if self.kv_scales is not None:
            names = [f"{name}.self_attn" for name in names]
            brought = spec.quantization is not None and spec.quantization.fp8_kv
            whole = attention.num_kv_heads * build.parallel.size // attention.kv_copies
            self._stored_scales = KVScales(self.kv_scales, names, brought, build.parallel, whole)
        self._kernels, self._build = build.kernels, build
        copies = [module.copies for module in self.modules() if isinstance(module, MoE) and module.copies is not None]
        if copies:
            self.hot_experts = HotExperts(build.experts.context, copies)

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        cos, sin = self.rotary.forward(positions)
        real = None if self.expert_counts is None else context.real_tokens().int()
        tokens = TokenPlaces(token_ids, positions, real)
        x: Tensor | Part
        if self.embed_tokens is not None:
            x = self.embed_tokens.look_up(token_ids)
        else:
            assert self.inbox is not None, "somebody has sent hidden states"
            x = self.inbox[: len(token_ids)]
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer.forward(x, residual, cos, sin, context, tokens)
        if self._counted is not None:
            self._counted.copy_(self._build.experts.context.all_reduce(self._counted))
        normed, value = self._kernels.add_rms_norm(Stream(x, residual, self._end))
        return value if self.norm is None else normed

    def attention(self, store: KVStore) -> ModelAttention:
        attention, spec = super().attention(store), self.spec.attention
        if spec.latent is None:
            return attention
        weights = [module.up for module in self.modules() if isinstance(module, LatentAttention)]
        return replace(attention, up=UpProjections(weights, spec.latent.rope_dim, spec.value_dim))

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        assert self.lm_head is not None, "the last stage scores"
        return self.lm_head.score(hidden, out)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        tensors: dict[str, CheckpointTensor] = {}
        for layer in self._weighted():
            tensors |= layer.checkpoint_tensors()
        if self._stored_scales is not None:
            tensors |= self._stored_scales.checkpoint_tensors()
        return tensors

    def elsewhere(self) -> tuple[str, ...]:
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        return tuple(name for layer in experts for name in layer.elsewhere())

    def loaded(self) -> None:
        for layer in self._weighted():
            layer.loaded()
        if self._stored_scales is not None:
            self._stored_scales.loaded()

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        for part in self._parts_of_whole():
            for layer in dict.fromkeys(module for module in part.modules() if isinstance(module, Layer)):
                layer.fill_dummy(draw)

    def _parts_of_whole(self) -> Iterator[nn.Module]:
        """In order. Those of other stages are made to be drawn and forgotten, so that own weights are what they are in
        one piece."""
        spec, whole, own = self.spec, self.spec.whole, range(self.spec.num_layers)
        build = replace(self._build, adapters=None)
        tied = self.lm_head if whole.tie_word_embeddings else None
        yield self.embed_tokens or tied or VocabularyTable("model.embed_tokens", whole, build)
        if not whole.tie_word_embeddings:
            yield self.lm_head or VocabularyTable("lm_head", whole, build)
        for i in range(whole.num_layers):
            at = i - spec.first_layer
            yield self.layers[at] if at in own else DecoderLayer(f"model.layers.{i}", i, whole, build)
        if self.norm is not None:
            yield self.norm

    def count_experts(self) -> None:
        """In `expert_counts` and `rank_counts`, from now on. There must be layers with experts."""
        layers = [module for module in self.modules() if isinstance(module, MoE)]
        experts, ranks = layers[0].num_experts, self._build.experts.context
        shape = len(layers), experts + (ranks.size if ranks.size > 1 else 0)
        self._counted = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.expert_counts = self._counted[:, :experts]
        if ranks.size > 1:
            self.rank_counts = self._counted[:, experts:]
            self.expert_meter = Meter(self.device, self._build.kernels)
        for layer, counts in zip(layers, self._counted, strict=True):
            layer.counts, layer.meter = counts[:experts], self.expert_meter
            layer.rank_counts = None if self.rank_counts is None else counts[experts:]

    def _weighted(self) -> list[Layer]:
        """Tables of tokens come first."""
        tables = [table for table in (self.embed_tokens, self.lm_head) if table is not None]
        return list(dict.fromkeys([*tables, *(module for module in self.modules() if isinstance(module, Layer))]))
