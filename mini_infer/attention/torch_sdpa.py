"""Attention through torch.nn.functional.scaled_dot_product_attention over gathered blocks: the reference backend.

It runs wherever torch does and defines what the kernels must compute. Grouped queries never repeat K or V in
memory: decode folds the group into the query axis, prefill expands the heads with stride 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend, Capabilities
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.cache.kv_store import KVStore
from mini_infer.kernels.limits import AttentionLimits

_LIMITS = AttentionLimits(dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}))


class SdpaBackend(AttentionBackend):
    capabilities = Capabilities(
        prefill=_LIMITS,
        decode=_LIMITS,
        devices=frozenset({"cpu", "cuda"}),
        sliding_window=True,
        graph_safe=False,
    )

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> _Step:
        """Rows of like lengths together."""
        n, device = batch.decode_query_len, batch.positions.device
        # Where only the device knows how long rows are, this waits for it: a reason why it is not graph-safe.
        seq_lens = batch.seq_lens.cpu().numpy() if batch.host_seq_lens is None else batch.host_seq_lens
        seq_lens = seq_lens[: batch.num_decode_rows]
        positions = batch.positions[: batch.num_decode_tokens].view(-1, n)
        tables = batch.block_tables[: batch.num_decode_rows]
        groups = _alike(seq_lens)
        if len(groups) == 1:  # as they are
            return _Step([_DecodeRows(positions, tables, seq_lens, attention, self._scratch)])
        parts = []
        for rows in groups:
            index = torch.from_numpy(rows).to(device)
            parts.append(_DecodeRows(positions[index], tables[index], seq_lens[rows], attention, self._scratch))
        order = np.concatenate([(rows[:, None] * n + np.arange(n)).ravel() for rows in groups])
        return _Step(parts, torch.from_numpy(order).to(device), torch.from_numpy(np.argsort(order)).to(device))

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> _Step:
        """Row by row."""
        starts, seq_lens = batch.host_query_starts, batch.host_seq_lens
        assert starts is not None, "it is not graph-safe"
        assert seq_lens is not None, "it is not graph-safe"
        parts = []
        for row in range(batch.num_decode_rows, batch.num_rows):
            num_tokens, table = int(starts[row + 1] - starts[row]), batch.block_tables[row : row + 1]
            parts.append(_Prompt(num_tokens, int(seq_lens[row]), table, attention, self._scratch))
        return _Step(parts)


class _Scratch:
    """The memory that blocks are gathered into, kept over layers and steps: malloc hands buffers of this size back to
    the system, and touching fresh pages costs a CPU ten times the copy (1.1 ms against 0.05 ms at batch 8 x 256)."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, rows: int, like: Tensor) -> Tensor:
        """[rows, like.shape[1]] of like's dtype and device. Every call gives the same memory."""
        numel = rows * like.shape[1]
        if self._buffer is None or self._buffer.numel() < numel:
            size = numel if self._buffer is None else max(numel, self._buffer.numel() * 5 // 4)
            self._buffer = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffer[:numel].view(rows, like.shape[1])


class _Gather:
    """The blocks of some rows of block tables [R, W], as K and V of shape [R, length, num_kv_heads, head_dim].

    Keys and values come in one index_select: they are rows b and num_blocks + b of the same matrix.
    """

    def __init__(self, store: KVStore, block_tables: Tensor, length: int, scratch: _Scratch) -> None:
        self._store = store
        blocks = block_tables[:, : math.ceil(length / store.block_size)].flatten()
        self._index = torch.cat((blocks, blocks + store.num_blocks))
        self._out = scratch.take(len(self._index), store.blocks(0))
        rows = block_tables.shape[0]
        self.k, self.v = self._out.view(2, rows, -1, *store.keys(0).shape[2:])[:, :, :length]

    def __call__(self, layer: int) -> None:
        """Fills k and v."""
        torch.index_select(self._store.blocks(layer), 0, self._index, out=self._out)


class _Step:
    """One part of the tokens after the other.

    order, inverse: where the tokens of the parts stand in q, and where each token of q stands in the parts; None where
    the parts follow each other as in q.
    """

    def __init__(
        self, parts: Sequence[_DecodeRows | _Prompt], order: Tensor | None = None, inverse: Tensor | None = None
    ) -> None:
        self._parts, self._order, self._inverse = parts, order, inverse
        self._num_tokens = [part.num_tokens for part in parts]

    def __call__(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        if len(self._parts) == 1:
            result = self._parts[0](layer, q)
            return result if out is None else out.copy_(result)
        q = q if self._order is None else q[self._order]
        results = [part(layer, own) for part, own in zip(self._parts, q.split(self._num_tokens), strict=True)]
        if self._inverse is None:
            return torch.cat(results, out=out)
        result = torch.cat(results)[self._inverse]
        return result if out is None else out.copy_(result)


# Padding that a further call must save to be worth its overhead, in tokens of K and V gathered for nothing.
_WORTH_A_CALL = 1024


def _alike(lens: np.ndarray) -> list[np.ndarray]:
    """Rows in groups, longest first: a group is cut where padding the rest to its longest would waste too much."""
    order = np.argsort(-lens, kind="stable")
    groups: list[np.ndarray] = []
    while True:
        shorter = np.flatnonzero(2 * lens[order] < lens[order[0]])
        if not shorter.size or (lens[order[0]] - lens[order[shorter]]).sum() < _WORTH_A_CALL:
            return [*groups, order]
        groups.append(order[: shorter[0]])
        order = order[shorter[0] :]


class _DecodeRows:
    """Decode rows in one call, padded to the longest.

    q [R * n, num_heads, head_dim] is seen as [R, num_kv_heads, n * group, head_dim], so each KV head serves its group
    of query heads as if they were further query tokens.
    """

    def __init__(
        self,
        positions: Tensor,  # [R, n]
        block_tables: Tensor,  # [R, W]
        seq_lens: np.ndarray,  # [R]
        attention: ModelAttention,
        scratch: _Scratch,
    ) -> None:
        self.num_tokens = positions.numel()
        self._rows, self._n = positions.shape
        self._scale, length = attention.scale, int(seq_lens.max())
        self._gather = _Gather(attention.store, block_tables, length, scratch)
        self._k, self._v = self._gather.k.transpose(1, 2), self._gather.v.transpose(1, 2)
        self._windows = attention.windows_within(length)
        same_length = bool((seq_lens == length).all())
        keys = torch.arange(length, device=positions.device)
        self._masks: dict[int | None, Tensor | None] = {}  # [R, 1, n, length]
        for window in set(self._windows):
            needed = window is not None or self._n > 1 or not same_length
            self._masks[window] = _mask(positions, keys, window, self._k.dtype)[:, None] if needed else None

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        self._gather(layer)
        mask = self._masks[self._windows[layer]]
        shape, n, kv_heads = q.shape, self._n, self._k.shape[1]
        group = shape[1] // kv_heads
        if n == 1:
            q = q.view(self._rows, kv_heads, group, -1)
        else:
            q = q.view(self._rows, n, kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
            mask = None if mask is None else mask.repeat_interleave(group, dim=2)
        out = F.scaled_dot_product_attention(q, self._k, self._v, attn_mask=mask, scale=self._scale)
        if n > 1:
            out = out.unflatten(2, (n, group)).transpose(1, 2)
        return out.reshape(shape)


class _Prompt:
    """One prompt, or a chunk of one.

    q [n, num_heads, head_dim] is seen as [num_kv_heads, group, n, head_dim], with K and V expanded over the group at
    stride 0.
    """

    def __init__(
        self, num_tokens: int, length: int, block_table: Tensor, attention: ModelAttention, scratch: _Scratch
    ) -> None:
        self.num_tokens, self._scale = num_tokens, attention.scale
        self._gather = _Gather(attention.store, block_table, length, scratch)
        self._windows = attention.windows_within(length)
        # By window: the first key that a query may see, and the mask [n, keys from there on], None where it is causal.
        self._views: dict[int | None, tuple[int, Tensor | None]] = {}
        start, device = length - num_tokens, block_table.device
        for window in set(self._windows):
            if window is None and start == 0:
                self._views[window] = 0, None
                continue
            first = 0 if window is None else max(0, start - window + 1)
            queries, keys = torch.arange(start, length, device=device), torch.arange(first, length, device=device)
            self._views[window] = first, _mask(queries, keys, window, self._gather.k.dtype)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        self._gather(layer)
        first, mask = self._views[self._windows[layer]]
        kv_heads = self._gather.k.shape[2]
        group = q.shape[1] // kv_heads
        q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        k = self._gather.k[0, first:].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        v = self._gather.v[0, first:].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at position p sees the key, positions (p - window, p], and -inf elsewhere.

    queries [..., n], keys [L] -> [..., n, L]. Additive, because a boolean mask is converted in every layer.
    """
    hidden = keys > queries[..., None]
    if window is not None:
        hidden |= keys <= queries[..., None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
