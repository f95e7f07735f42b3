"""Attention to a cache of latents: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

All that is kept of a token is its latent c [rank] and r [rope_dim], the part of its key that is rotated and that all
heads share. Two ways lead from there to what attention of heads gives:

    expanded    k = [W_UK c | r], v = W_UV c    of each head and cached token; then any backend attends to them
    absorbed    q' = [W_UK^T q_nope | q_rope]   attends to [c | r] as to one KV head, whose values are c;
                out = W_UV (weighted sum of c)  no cached token is expanded

To expand takes rank * (nope_dim + value_dim) products for each head and cached token, however many queries see it. To
absorb makes each score and sum longer, 2 rank + rope_dim against head_dim + value_dim. With DeepSeek's sizes both take
as many where 171 tokens of a row are new, whatever the row's length and the number of heads. So prompts expand, and
decode and a prompt's short rests absorb.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.attention.backend import (
    BACKENDS,
    AttentionBackend,
    AttentionStep,
    Kind,
    Latent,
    Requirements,
    Selection,
    select_backend,
)
from mini_infer.attention.context import AttentionBatch, ModelAttention, UpProjections
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import AttentionChoice, MLAForm
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.pinned import to_device

LATENT = "latent"  # the plane's name: [rank + rope_dim] of each token, c and then r
EXPANDED_BYTES = 256 * 2**20  # of latents, keys and values at a time; or one head's of one row
_HEAD_PRODUCTS = 1024  # tokens times heads, up to which our kernel is faster than a batched product and what it needs

_MakeStep = Callable[[AttentionBatch, ModelAttention], AttentionStep]

# Who attends to latents as they are.
ABSORBED = {
    AttentionChoice.triton: "mini_infer.attention.mla_triton:LatentTritonBackend",
    AttentionChoice.sdpa: BACKENDS[AttentionChoice.sdpa],
    AttentionChoice.batch_invariant: "mini_infer.attention.mla_triton:LatentInvariantBackend",
}


def select_latent_backend(choice: AttentionChoice, kind: Kind, needs: Requirements, latent: Latent) -> Selection:
    """As select_backend, for a cache of latents."""
    (kept,) = needs.layout.layers[0]
    form, layouts = latent.form, (latent.absorbed(kept.dtype), latent.expanded(needs.dtype))
    if needs.batch_invariant and form is MLAForm.auto:
        raise ConfigError("numerics=batch_invariant takes one form for prompts and decode: naive, latent or absorbed")
    if form is MLAForm.latent and needs.graphs and kind == "decode":
        raise ConfigError(
            "attention.mla=latent expands as many tokens as a step's rows have, which a CUDA graph cannot: set "
            "attention.mla=auto, or graphs.capture=auto or never"
        )
    linear: Callable[..., Tensor] = F.linear
    if needs.batch_invariant:
        from mini_infer.kernels.ops import InvariantKernels  # of Triton

        linear = InvariantKernels().linear
    heads, latents = (replace(needs, layout=layout, latent=None) for layout in reversed(layouts))
    by_length = form is MLAForm.auto and kind == "prefill"
    if form is MLAForm.latent:
        selection = select_backend(choice, kind, heads)
        return replace(selection, backend=Expanded(selection.backend, linear), what=", latents expanded")
    # Whoever is chosen for prompts that expand need not be able to absorb.
    absorbing = AttentionChoice.auto if by_length and choice not in ABSORBED else choice
    selection = select_backend(absorbing, kind, latents, ABSORBED)
    products = _HEAD_PRODUCTS if selection.choice is AttentionChoice.triton else 0
    absorbed = Absorbed(selection.backend, sys.maxsize if needs.batch_invariant else products)
    if not by_length:
        return replace(selection, backend=absorbed, what=", absorbed")
    expanding = select_backend(choice, kind, heads)
    both = ByNewTokens(absorbed, Expanded(expanding.backend, linear), latent.crossover)
    few = f"absorbed by {selection.choice.value} where no more than {latent.crossover} tokens are new"
    return replace(expanding, backend=both, what=f", latents expanded, and {few}")


class Absorbed(AttentionBackend):
    """Through a backend that attends to the latents as to one KV head.

    Args:
        few: up to so many tokens times heads a Triton kernel makes the products; a token's are the same in any company.
    """

    def __init__(self, inner: AttentionBackend, few: int) -> None:
        self._inner, self._few = inner, few
        self.variants = inner.variants  # type: ignore[method-assign]

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return self._around(self._inner.decode(batch, _of_latents(attention)), attention)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return self._around(self._inner.prefill(batch, _of_latents(attention)), attention)

    def _around(self, attend: AttentionStep, attention: ModelAttention) -> AttentionStep:
        up = _up(attention)

        def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
            w_uk, w_uv = up.weights[layer].tensor_split((-up.value_dim,), dim=1)
            (tokens, heads, head_dim), (_, nope_dim, rank) = q.shape, w_uk.shape
            absorbed = q.new_empty(tokens, heads, rank + head_dim - nope_dim)
            self._products(q[..., :nope_dim], w_uk.transpose(1, 2), absorbed, q[..., nope_dim:])
            attended = attend(layer, absorbed)
            out = q.new_empty(tokens, heads, up.value_dim) if out is None else out
            self._products(attended, w_uv, out)
            return out

        return step

    def _products(self, x: Tensor, weights: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
        """Fills out [T, heads, N + R] from x [T, heads, K] and weights [heads, N, K], and from rest [T, heads, R]."""
        if x.shape[0] * x.shape[1] <= self._few:
            from mini_infer.kernels.head_products import head_products  # of Triton

            head_products(x, weights, out, rest)
            return
        outs = weights.shape[1]
        torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out[..., :outs].transpose(0, 1))
        if rest is not None:
            out[..., outs:] = rest


class Expanded(AttentionBackend):
    """Through a backend that attends to keys and values of heads, which are made of a step's cached latents first: of
    some rows and heads at a time, so that many rows or a long context take no more memory."""

    def __init__(self, inner: AttentionBackend, linear: Callable[..., Tensor]) -> None:
        self._inner, self._linear = inner, linear
        self.variants = inner.variants  # type: ignore[method-assign]

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return self._by_rows(self._inner.decode, batch.only_decode(), attention)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return self._by_rows(self._inner.prefill, batch.only_prefill(), attention)

    def _by_rows(self, inner: _MakeStep, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        groups = _groups_of_rows(batch, attention)
        if not groups.any():
            return self._of_heads(inner, batch, attention)
        parts = (_some_rows(batch, groups == group) for group in range(groups[-1] + 1))
        # Made anew in each layer, for what one group expands is to be free when the next one comes.
        return _in_parts([(tokens, partial(self._once, inner, own, attention)) for own, tokens in parts], attention)

    def _once(
        self,
        inner: _MakeStep,
        batch: AttentionBatch,
        attention: ModelAttention,
        layer: int,
        q: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._of_heads(inner, batch, attention)(layer, q, out)

    def _of_heads(self, inner: _MakeStep, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        heads = _ExpandedHeads(batch, attention)
        return self._around(inner(heads.batch, replace(attention, store=heads, up=None)), heads, attention)

    def _around(self, attend: AttentionStep, heads: _ExpandedHeads, attention: ModelAttention) -> AttentionStep:
        up = _up(attention)

        def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
            latents, num_heads, at_once = heads.gathered(layer), q.shape[1], heads.at_once
            out = q.new_empty(*q.shape[:2], up.value_dim) if out is None else out
            for first in range(0, num_heads, at_once):
                own = slice(first, first + at_once)
                heads.fill(latents, up.weights[layer][own], self._linear)
                if at_once == num_heads:
                    return attend(layer, q, out)
                out[:, own] = attend(layer, q[:, own])
            return out

        return step


class ByNewTokens(AttentionBackend):
    """Prompts of which few tokens are new absorb, the others expand."""

    def __init__(self, absorbed: Absorbed, expanded: Expanded, crossover: int) -> None:
        self._absorbed, self._expanded, self._crossover = absorbed, expanded, crossover

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return self._absorbed.decode(batch, attention)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        batch = batch.only_prefill()
        assert batch.host_query_starts is not None, "captured steps have decode rows alone"
        few = np.diff(batch.host_query_starts) <= self._crossover
        if few.all() or not few.any():
            return (self._absorbed if few.all() else self._expanded).prefill(batch, attention)
        parts = []
        for backend, chosen in ((self._absorbed, few), (self._expanded, ~few)):
            own, tokens = _some_rows(batch, chosen)
            parts.append((tokens, backend.prefill(own, attention)))
        return _in_parts(parts, attention)

    def warm_up(self, kind: Kind, attention: ModelAttention, num_heads: int, max_rows: int) -> None:
        self._absorbed.warm_up(kind, attention, num_heads, max_rows)
        self._expanded.warm_up(kind, attention, num_heads, max_rows)


def _some_rows(batch: AttentionBatch, chosen: np.ndarray) -> tuple[AttentionBatch, Tensor]:
    """Some of the rows, which are of one kind, as a batch of their own, and where their tokens are in the whole."""
    starts, device = batch.host_query_starts, batch.positions.device
    counts = np.full(batch.num_rows, batch.decode_query_len) if starts is None else np.diff(starts)
    tokens = to_device(np.flatnonzero(np.repeat(chosen, counts)), device)
    rows = to_device(np.flatnonzero(chosen), device)
    own_starts = np.concatenate(([0], np.cumsum(counts[chosen])))
    own = AttentionBatch.of_rows(
        batch.positions[tokens],
        batch.slot_mapping[tokens],
        batch.block_tables[rows],
        to_device(own_starts.astype(np.int32), device),
        batch.seq_lens[rows],
        num_decode_rows=len(rows) if batch.num_decode_rows else 0,
        host_query_starts=own_starts,
        host_seq_lens=_lens(batch)[chosen],
    )
    return own, tokens


def _in_parts(parts: Sequence[tuple[Tensor, AttentionStep]], attention: ModelAttention) -> AttentionStep:
    """One part of a step's tokens after the other: which, and who attends."""

    def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        out = q.new_empty(*q.shape[:2], attention.value_dim) if out is None else out
        for tokens, attend in parts:
            out[tokens] = attend(layer, q[tokens])
        return out

    return step


def _groups_of_rows(batch: AttentionBatch, attention: ModelAttention) -> np.ndarray:
    """[R] which group of rows each is in, from 0 on: a group's latents and one head's keys and values take no more than
    EXPANDED_BYTES, or it is a single row."""
    block_size, (latent, head) = attention.store.block_size, _token_bytes(_up(attention))
    most, group, taken, groups = EXPANDED_BYTES // ((latent + head) * block_size), 0, 0, []
    for blocks in (-(-_lens(batch) // block_size)).tolist():
        if taken and taken + blocks > most:
            group, taken = group + 1, 0
        taken += blocks
        groups.append(group)
    return np.array(groups)


def _lens(batch: AttentionBatch) -> np.ndarray:
    return batch.seq_lens.cpu().numpy() if batch.host_seq_lens is None else batch.host_seq_lens


def _token_bytes(up: UpProjections) -> tuple[int, int]:
    """Of a token's latent, and of what is made of it for a head: key, value, and what they are copied from."""
    _, made, rank = up.weights[0].shape
    itemsize = up.weights[0].dtype.itemsize
    return (rank + up.rope_dim) * itemsize, (up.head_dim + up.value_dim + made) * itemsize


def expand(latents: Tensor, up: Tensor, keys: Tensor, values: Tensor, linear: Callable[..., Tensor] = F.linear) -> None:
    """Fills keys [N, heads, nope_dim + rope_dim] and values [N, heads, value_dim] from latents [N, rank + rope_dim] and
    up [heads, nope_dim + value_dim, rank]."""
    c, r = latents.tensor_split((up.shape[2],), dim=1)
    made = linear(c, up.flatten(0, 1), None).unflatten(1, up.shape[:2])
    nope_dim = up.shape[1] - values.shape[2]
    keys[..., :nope_dim] = made[..., :nope_dim]
    keys[..., nope_dim:] = r[:, None]
    values.copy_(made[..., nope_dim:])


def _up(attention: ModelAttention) -> UpProjections:
    assert attention.up is not None, "a model whose cache holds latents has it"
    return attention.up


def _of_latents(attention: ModelAttention) -> ModelAttention:
    """The latents as one KV head."""
    store = attention.store
    assert isinstance(store, KVStore), "latents are stored"
    return replace(attention, store=_Latents(store, _up(attention).rank), up=None)


class _Latents:
    """A KV store's latents as keys of one head, and their first `rank` numbers as values."""

    def __init__(self, store: KVStore, rank: int) -> None:
        self.num_blocks, self.block_size, self.device = store.num_blocks, store.block_size, store.device
        self._store, self._rank = store, rank
        in_8_bits = store.layout.layers[0][0].scaled
        self._ones = torch.ones(2, 1, device=store.device) if in_8_bits else None

    def keys(self, layer: int) -> Tensor:
        return self._store.plane(layer, LATENT)[:, :, None]

    def values(self, layer: int) -> Tensor:
        return self.keys(layer)[..., : self._rank]

    def blocks(self, layer: int) -> None:
        return None

    def scales(self, layer: int) -> Tensor | None:
        return self._ones


class _ExpandedHeads:
    """Keys and values of some heads, made of the latents of a step's rows: blocks of the same size, one row's after the
    other's, in memory that layers share.

    Attributes:
        batch: for a backend that is to attend to them.
        at_once: of how many heads there is room.
    """

    def __init__(self, batch: AttentionBatch, attention: ModelAttention) -> None:
        store, tables = attention.store, batch.block_tables
        assert isinstance(store, KVStore), "latents are stored"
        self._store, self.device, self.block_size = store, store.device, store.block_size
        counts = -(-_lens(batch) // self.block_size)
        self.num_blocks = int(counts.sum())
        used = np.arange(counts.max()) < counts[:, None]  # [R, blocks of the longest]
        places = np.flatnonzero(used)
        own = np.minimum(np.cumsum(used.ravel()).reshape(used.shape) - 1, self.num_blocks - 1)
        self._blocks = tables[:, : used.shape[1]].flatten()[to_device(places, self.device)]
        up = _up(attention)
        num_heads, dtype = up.weights[0].shape[0], up.weights[0].dtype
        latent, head = (self.num_blocks * self.block_size * size for size in _token_bytes(up))
        divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
        self.at_once = max((d for d in divisors if latent + d * head <= EXPANDED_BYTES), default=1)
        shape = self.num_blocks, self.block_size, self.at_once
        self._keys = torch.empty(*shape, up.head_dim, dtype=dtype, device=self.device)
        self._values = torch.empty(*shape, up.value_dim, dtype=dtype, device=self.device)
        self.batch = batch._replace(block_tables=to_device(own.astype(np.int32), self.device))

    def gathered(self, layer: int) -> Tensor:
        """The latents of all blocks, [num_blocks * block_size, rank + rope_dim]."""
        kept = self._store.plane(layer, LATENT)
        if kept.dtype is self._keys.dtype:
            return kept.index_select(0, self._blocks).flatten(0, 1)
        codes = kept.view(torch.uint8).index_select(0, self._blocks)  # whose float8 no CPU selects
        return codes.view(kept.dtype).flatten(0, 1).to(self._keys.dtype)

    def fill(self, latents: Tensor, up: Tensor, linear: Callable[..., Tensor]) -> None:
        expand(latents, up, self._keys.flatten(0, 1), self._values.flatten(0, 1), linear)

    def keys(self, layer: int) -> Tensor:
        return self._keys

    def values(self, layer: int) -> Tensor:
        return self._values

    def blocks(self, layer: int) -> None:
        return None

    def scales(self, layer: int) -> None:
        return None
