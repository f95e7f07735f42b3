"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one latent.

    stream --> norm, q_proj or q_a_proj, kv_a_proj --> [norm, q_b_proj] --> q: nope | rope, rotated
                                                  \\-> c, norm | r, rotated --> cache
    q, cache --> attend --> o_proj, add --> stream

What the cache holds and how it is attended to is the form: attention/mla.py, to which `up` is handed, has all but the
naive one. There keys and values of every head are made here, and cached as those of any other model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mini_infer.attention.context import AttentionContext
from mini_infer.attention.mla import LATENT, expand
from mini_infer.kernels.interface import LatentPlaces, Part, Stream
from mini_infer.modeling.layers import Linear, RMSNorm
from mini_infer.modeling.linear_methods.base import Build, Parallel
from mini_infer.modeling.linear_methods.stored import kept_plain
from mini_infer.modeling.spec import MLASpec, ModelSpec

_EPS = 1e-6  # of the latents' norms, whatever the config says of the others


class LatentAttention(nn.Module):
    def __init__(self, name: str, layer: int, model: ModelSpec, spec: MLASpec, build: Build) -> None:
        super().__init__()
        self._layer, self._spec, self._kernels = layer, spec, build.kernels
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.rank + spec.rope_dim
        # One product of the stream, of queries or of their latent and of the keys' and values'.
        parts = {"q_proj": q_size} if spec.q_rank is None else {"q_a_proj": spec.q_rank}
        self._sizes = (*parts.values(), kv_size)
        parts["kv_a_proj_with_mqa"] = kv_size
        # Ranks share heads; latents are every rank's.
        copies = {part: build.parallel.size for part in parts if part != "q_proj"}
        self.down_proj = Linear(name, model.hidden_size, parts, spec.bias, Parallel.column, build, copies)
        self.q_b_proj = None
        if spec.q_rank is not None:
            self.q_a_norm = RMSNorm(f"{name}.q_a_layernorm", spec.q_rank, _EPS, build)
            self.q_b_proj = Linear(name, spec.q_rank, {"q_b_proj": q_size}, False, Parallel.column, build)
        self.kv_a_norm = RMSNorm(f"{name}.kv_a_layernorm", spec.rank, _EPS, build)
        made = spec.num_heads * (spec.nope_dim + spec.value_dim)
        plain = replace(build, linear_method=kept_plain(build.linear_method), adapters=None)  # not always a product
        self.kv_b_proj = Linear(name, spec.rank, {"kv_b_proj": made}, False, Parallel.column, plain)
        o_parts = {"o_proj": model.hidden_size}
        self.o_proj = Linear(name, spec.num_heads * spec.value_dim, o_parts, spec.bias, Parallel.row, build)

    @property
    def up(self) -> Tensor:
        """[num_heads, nope_dim + value_dim, rank]"""
        return self.kv_b_proj.method.weights()["weight"].data.unflatten(0, (self._spec.num_heads, -1))

    def forward(
        self, stream: Stream, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> tuple[Tensor | Part, Tensor | None]:
        spec, kernels = self._spec, self._kernels
        down, residual = self.down_proj.of_stream(stream)
        q, kv = down.split(self._sizes, dim=1)
        if self.q_b_proj is not None:
            q = self.q_b_proj.of_stream(Stream(q.contiguous(), None, self.q_a_norm.norm))[0]
        q, norm = q.unflatten(1, (spec.num_heads, -1)), self.kv_a_norm.norm
        if spec.latent is not None:
            slots = context.slots(self._layer, LATENT)
            places = LatentPlaces(cos, sin, context.batch.slot_mapping, slots, spec.interleaved)
            q = kernels.rope_and_store_latent(q, kv, norm, places)
        else:
            latents = torch.empty_like(kv, memory_format=torch.contiguous_format)
            tokens = torch.arange(len(kv), device=kv.device)
            q = kernels.rope_and_store_latent(q, kv, norm, LatentPlaces(cos, sin, tokens, latents, spec.interleaved))
            keys, values = (kv.new_empty(len(kv), spec.num_heads, n) for n in (spec.head_dim, spec.value_dim))
            expand(latents, self.up, keys, values, kernels.linear)
            context.store(self._layer, keys, values)
        return self.o_proj.add_to_stream(context.attend(self._layer, q).flatten(1), residual)
