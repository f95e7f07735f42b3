"""What attention knows of a step (AttentionBatch), of the model (ModelAttention), and of both (AttentionContext)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore, PagedHeads
from mini_infer.quantization.formats import as_stored

if TYPE_CHECKING:
    from mini_infer.attention.backend import AttentionBackend


class Rows(NamedTuple):
    """R rows of one kind, each of any number of tokens, which are the last of its sequence."""

    block_tables: Tensor  # [R, W] int32
    query_starts: Tensor  # [R + 1] int32, from 0
    seq_lens: Tensor  # [R] int32


class AttentionBatch(NamedTuple):
    """The rows of one step, complete when constructed: R rows, T tokens.

        tokens        | a | b | c | d d d d d | e e e |      rows [0, num_decode_rows) come first
        query_starts  0   1   2   3           8       11
        seq_lens        90  17  41  5           512          cached tokens and this step's together

    Tensors live on the model's device; the host copies serve backends that need shapes or loop over rows, and are
    None in a batch whose lengths change under it, as a captured graph's do.
    Columns of block_tables beyond a row's own blocks may hold any block of the store.
    """

    positions: Tensor  # [T] int64, each token's place in its sequence
    slot_mapping: Tensor  # [T] int64, where its K and V are stored
    block_tables: Tensor  # [R, W] int32
    query_starts: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32
    num_decode_rows: int
    decode_query_len: int = 1  # tokens of each decode row: 1, or 1 + k where k drafts are verified
    max_decode_seq_len: int = 0  # 0 where there are no such rows
    max_prefill_query_len: int = 0
    max_prefill_seq_len: int = 0
    host_query_starts: np.ndarray | None = None  # [R + 1]
    host_seq_lens: np.ndarray | None = None  # [R]
    real_counts: Tensor | None = None  # [R]: of decode rows alone, the tokens that are not padding; None: all

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode_rows * self.decode_query_len

    def decode_rows(self) -> Rows:
        n = self.num_decode_rows
        return Rows(self.block_tables[:n], self.query_starts[: n + 1], self.seq_lens[:n])

    def prefill_rows(self) -> Rows:
        n, starts = self.num_decode_rows, self.query_starts
        return Rows(self.block_tables[n:], starts[n:] - self.num_decode_tokens if n else starts, self.seq_lens[n:])

    def only_decode(self) -> AttentionBatch:
        """Its decode rows, as a batch of their own."""
        n, t, starts, lens = self.num_decode_rows, self.num_decode_tokens, self.host_query_starts, self.host_seq_lens
        return self._replace(
            positions=self.positions[:t],
            slot_mapping=self.slot_mapping[:t],
            **self.decode_rows()._asdict(),
            host_query_starts=None if starts is None else starts[: n + 1],
            host_seq_lens=None if lens is None else lens[:n],
        )

    def only_prefill(self) -> AttentionBatch:
        """Its prefill rows, as a batch of their own, of a step whose lengths the host knows."""
        n, t, starts, lens = self.num_decode_rows, self.num_decode_tokens, self.host_query_starts, self.host_seq_lens
        assert starts is not None, "captured steps have decode rows alone"
        assert lens is not None, "captured steps have decode rows alone"
        return self._replace(
            positions=self.positions[t:],
            slot_mapping=self.slot_mapping[t:],
            **self.prefill_rows()._asdict(),
            num_decode_rows=0,
            host_query_starts=starts[n:] - t,
            host_seq_lens=lens[n:],
        )

    @classmethod
    def of_rows(
        cls, *tensors: Tensor, num_decode_rows: int, host_query_starts: np.ndarray, host_seq_lens: np.ndarray
    ) -> AttentionBatch:
        """Rows whose lengths the host knows; `tensors` are the first five fields. Raises ValueError where decode rows
        differ in their number of tokens."""
        n, counts = num_decode_rows, host_query_starts[1:] - host_query_starts[:-1]
        if n and (counts[:n] != counts[0]).any():
            raise ValueError(f"decode rows must have the same number of tokens, got {counts[:n].tolist()}")
        positions, slot_mapping, block_tables, query_starts, seq_lens = tensors
        return cls(positions, slot_mapping, block_tables, query_starts, seq_lens, n)._replace(
            decode_query_len=int(counts[0]) if n else 1,
            max_decode_seq_len=int(host_seq_lens[:n].max()) if n else 0,
            max_prefill_query_len=int(counts[n:].max()) if n < len(counts) else 0,
            max_prefill_seq_len=int(host_seq_lens[n:].max()) if n < len(counts) else 0,
            host_query_starts=host_query_starts,
            host_seq_lens=host_seq_lens,
        )


@dataclass(frozen=True, eq=False)
class UpProjections:
    """From a cached latent [rank + rope_dim] to a head's key and value (attention/mla.py)."""

    weights: Sequence[Tensor]  # of each layer: [num_heads, nope_dim + value_dim, rank], W_UK above W_UV
    rope_dim: int
    value_dim: int

    @property
    def rank(self) -> int:
        return self.weights[0].shape[2]

    @property
    def head_dim(self) -> int:
        """Of queries and keys: nope_dim + rope_dim."""
        return self.weights[0].shape[1] - self.value_dim + self.rope_dim


@dataclass(frozen=True, eq=False)
class ModelAttention:
    """The same in every step: the cache of a model, and how its layers attend.

    windows[layer] is the layer's sliding window: a query at position p sees (p - window, p]; None sees [0, p].
    scale multiplies q.k.

    Of a cache of latents, `up` is what makes keys and values of them.
    """

    store: PagedHeads
    windows: Sequence[int | None]
    scale: float
    dtype: torch.dtype | None = None  # of queries; None: that of keys
    up: UpProjections | None = None

    @property
    def head_dim(self) -> int:
        """Of queries."""
        return self.store.keys(0).shape[-1] if self.up is None else self.up.head_dim

    @property
    def value_dim(self) -> int:
        """Of what attention gives."""
        return self.store.values(0).shape[-1] if self.up is None else self.up.value_dim

    def windows_within(self, length: int) -> list[int | None]:
        """A window that covers every sequence of a step, the longest of `length` tokens, is none."""
        return [None if window is None or window >= length else window for window in self.windows]


class AttentionContext:
    """The argument through which a model's attention layers reach the KV cache in one step.

    A layer first stores its K and V, by `store` or, fused with other operations, in key_slots and value_slots at
    batch.slot_mapping; and then it attends. `on_layer` is called in between.
    """

    def __init__(
        self,
        batch: AttentionBatch,
        attention: ModelAttention,
        prefill_backend: AttentionBackend,
        decode_backend: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.batch = batch
        self._on_layer = on_layer
        assert isinstance(attention.store, KVStore), "other stores are views of one, for kernels"
        self._kv_store, self._attention = attention.store, attention
        # A backend derives here, once a step, what all layers share.
        self._decode = decode_backend.decode(batch, attention) if batch.num_decode_rows else None
        has_prefill = batch.num_decode_rows < batch.num_rows
        self._prefill = prefill_backend.prefill(batch, attention) if has_prefill else None

    def key_slots(self, layer: int) -> Tensor:
        """[num_blocks * block_size, num_kv_heads, head_dim], where batch.slot_mapping points."""
        return self.slots(layer, "k")

    def value_slots(self, layer: int) -> Tensor:
        """[num_blocks * block_size, num_kv_heads, head_dim], where batch.slot_mapping points."""
        return self.slots(layer, "v")

    def real_tokens(self) -> Tensor:
        """[T] bool: not those of padding. Rows of it write to the last block of the store; tokens of it behind a row's
        own, where others have more drafts, to that row's blocks."""
        store, batch = self._kv_store, self.batch
        real = batch.slot_mapping < (store.num_blocks - 1) * store.block_size
        if batch.real_counts is not None:
            place = torch.arange(batch.decode_query_len, device=real.device)
            real &= (place < batch.real_counts[:, None]).flatten()
        return real

    def kv_scales(self, layer: int) -> Tensor | None:
        """As KVStore.scales."""
        return self._kv_store.scales(layer)

    def slots(self, layer: int, name: str) -> Tensor:
        """[num_blocks * block_size, *shape] of a plane, where batch.slot_mapping points."""
        return self._kv_store.slots(layer, name)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v [T, num_kv_heads, head_dim] of the model's dtype, of any strides."""
        keys, values, places = self.key_slots(layer), self.value_slots(layer), self.batch.slot_mapping
        if (scales := self.kv_scales(layer)) is not None:
            k, v = as_stored(k, v, keys.dtype, scales)
        keys.view(k.dtype).index_copy_(0, places, k)
        values.view(v.dtype).index_copy_(0, places, v)

    def attend(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Attends with q [T, num_heads, head_dim] to what is stored so far, this step's among it -> [T, num_heads,
        value_dim] of q's dtype, in `out`, contiguous, where it is given."""
        if self._on_layer is not None:
            self._on_layer(layer)
        if self._decode is None:
            assert self._prefill is not None, "a batch has rows"
            return self._prefill(layer, q, out)
        if self._prefill is None:
            return self._decode(layer, q, out)
        n = self.batch.num_decode_tokens
        out = q.new_empty(*q.shape[:2], self._attention.value_dim) if out is None else out
        self._decode(layer, q[:n], out[:n])
        self._prefill(layer, q[n:], out[n:])
        return out
