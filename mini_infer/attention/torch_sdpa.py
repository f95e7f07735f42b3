"""Attention through torch.nn.functional.scaled_dot_product_attention over gathered blocks: the reference backend.

It runs wherever torch does and defines what the kernels must compute. Grouped queries never repeat K or V in
memory: decode folds the group into the query axis, prefill expands the heads with stride 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend, Capabilities, effective_windows
from mini_infer.attention.context import AttentionBatch
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

    def decode(self, batch: AttentionBatch, kv_store: KVStore, windows: Sequence[int | None], scale: float) -> _Decode:
        return _Decode(batch, kv_store, windows, scale, self._scratch)

    def prefill(
        self, batch: AttentionBatch, kv_store: KVStore, windows: Sequence[int | None], scale: float
    ) -> _Prefill:
        return _Prefill(batch, kv_store, windows, scale, self._scratch)


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
    """The blocks of some rows [R, W] of block tables, as K and V of shape [R, W * block_size, num_kv_heads, head_dim].

    Keys and values come in one index_select: they are rows b and num_blocks + b of the same matrix.
    """

    def __init__(self, kv_store: KVStore, block_tables: Tensor, scratch: _Scratch) -> None:
        self._kv_store = kv_store
        blocks = block_tables.flatten()
        self._index = torch.cat((blocks, blocks + kv_store.num_blocks))
        self._out = scratch.take(len(self._index), kv_store.blocks(0))
        rows = block_tables.shape[0]
        self.k, self.v = self._out.view(2, rows, -1, *kv_store.keys(0).shape[2:])

    def __call__(self, layer: int) -> None:
        """Fills k and v."""
        torch.index_select(self._kv_store.blocks(layer), 0, self._index, out=self._out)


# Padding that a further call must save to be worth its overhead, in tokens of K and V gathered for nothing.
_WORTH_A_CALL = 1024


class _Decode:
    """Decode rows, those of like lengths together."""

    def __init__(
        self,
        batch: AttentionBatch,
        kv_store: KVStore,
        windows: Sequence[int | None],
        scale: float,
        scratch: _Scratch,
    ) -> None:
        n = batch.decode_query_len
        # Where only the device knows how long rows are, this waits for it: a reason why it is not graph-safe.
        seq_lens = batch.seq_lens.cpu().numpy() if batch.host_seq_lens is None else batch.host_seq_lens
        seq_lens = seq_lens[: batch.num_decode_rows]
        groups = _alike(seq_lens)
        device = batch.positions.device
        self._n = n
        self._order: Tensor | None = None  # the rows, group after group
        self._tokens = [len(rows) * n for rows in groups]
        positions = batch.positions[: batch.num_decode_tokens].view(-1, n)
        tables = batch.block_tables[: batch.num_decode_rows]
        if len(groups) == 1:  # as they are
            self._parts = [_DecodePart(positions, tables, seq_lens, kv_store, windows, scale, scratch)]
            return
        order = np.concatenate(groups)
        self._order = torch.from_numpy(order).to(device)
        self._inverse = torch.from_numpy(np.argsort(order)).to(device)
        self._parts = []
        for rows in groups:
            index = torch.from_numpy(rows).to(device)
            part = _DecodePart(positions[index], tables[index], seq_lens[rows], kv_store, windows, scale, scratch)
            self._parts.append(part)

    def __call__(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        result = self._parts[0](layer, q) if self._order is None else self._by_group(layer, q)
        return result if out is None else out.copy_(result)

    def _by_group(self, layer: int, q: Tensor) -> Tensor:
        q = q.unflatten(0, (-1, self._n))[self._order].flatten(0, 1)
        results = [part(layer, own) for part, own in zip(self._parts, q.split(self._tokens), strict=True)]
        return torch.cat(results).unflatten(0, (-1, self._n))[self._inverse].flatten(0, 1)


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


class _DecodePart:
    """Decode rows in one call, padded to the longest.

    q [R * n, num_heads, head_dim] is seen as [R, num_kv_heads, n * group, head_dim], so each KV head serves its group
    of query heads as if they were further query tokens.
    """

    def __init__(
        self,
        positions: Tensor,  # [R, n]
        block_tables: Tensor,  # [R, W]
        seq_lens: np.ndarray,  # [R]
        kv_store: KVStore,
        windows: Sequence[int | None],
        scale: float,
        scratch: _Scratch,
    ) -> None:
        self._rows, self._n = positions.shape
        self._kv_heads, self._scale = kv_store.keys(0).shape[2], scale
        length = int(seq_lens.max())
        self._gather = _Gather(kv_store, block_tables[:, : math.ceil(length / kv_store.block_size)], scratch)
        self._k = self._gather.k[:, :length].transpose(1, 2)
        self._v = self._gather.v[:, :length].transpose(1, 2)
        self._windows = effective_windows(windows, length)
        same_length = bool((seq_lens == length).all())
        keys = torch.arange(length, device=positions.device)
        self._masks: dict[int | None, Tensor | None] = {}  # [R, 1, n, length]
        for window in set(self._windows):
            needed = window is not None or self._n > 1 or not same_length
            self._masks[window] = _mask(positions, keys, window, kv_store.keys(0).dtype)[:, None] if needed else None

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        self._gather(layer)
        mask = self._masks[self._windows[layer]]
        shape, n = q.shape, self._n
        group = shape[1] // self._kv_heads
        if n == 1:
            q = q.view(self._rows, self._kv_heads, group, -1)
        else:
            q = q.view(self._rows, n, self._kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
            mask = None if mask is None else mask.repeat_interleave(group, dim=2)
        out = F.scaled_dot_product_attention(q, self._k, self._v, attn_mask=mask, scale=self._scale)
        if n > 1:
            out = out.unflatten(2, (n, group)).transpose(1, 2)
        return out.reshape(shape)


@dataclass(frozen=True, eq=False)
class _Row:
    """One prompt, or a chunk of one. Tokens [begin, end) of the step's prefill tokens."""

    begin: int
    end: int
    length: int  # of the sequence up to `end`
    gather: _Gather
    views: dict[int | None, _View]  # of each window


@dataclass(frozen=True, eq=False)
class _View:
    """The keys [first, length) that a row's queries may see, and which query sees which."""

    first: int
    is_causal: bool  # query i sees keys [0, i]; no mask
    mask: Tensor | None  # [end - begin, length - first]


class _Prefill:
    """Row by row. q [n, num_heads, head_dim] is seen as [num_kv_heads, group, n, head_dim], with K and V expanded
    over the group at stride 0."""

    def __init__(
        self,
        batch: AttentionBatch,
        kv_store: KVStore,
        windows: Sequence[int | None],
        scale: float,
        scratch: _Scratch,
    ) -> None:
        self._scale = scale
        self._windows = effective_windows(windows, batch.max_prefill_seq_len)
        distinct = set(self._windows)
        assert batch.host_seq_lens is not None, "it is not graph-safe"
        assert batch.host_query_starts is not None, "it is not graph-safe"
        self._rows = []
        for row in range(batch.num_decode_rows, batch.num_rows):
            begin, end = (int(x) - batch.num_decode_tokens for x in batch.host_query_starts[row : row + 2])
            length = int(batch.host_seq_lens[row])
            start = length - (end - begin)
            width = math.ceil(length / kv_store.block_size)
            table = batch.block_tables[row : row + 1, :width]
            gather = _Gather(kv_store, table, scratch)
            views = {window: _view(start, length, window, kv_store.keys(0).dtype, table.device) for window in distinct}
            self._rows.append(_Row(begin, end, length, gather, views))

    def __call__(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        outs = []
        for row in self._rows:
            row.gather(layer)
            keys, values = row.gather.k[0, : row.length], row.gather.v[0, : row.length]
            outs.append(self._attend(q[row.begin : row.end], keys, values, row.views[self._windows[layer]]))
        return outs[0] if len(outs) == 1 and out is None else torch.cat(outs, out=out)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, view: _View) -> Tensor:
        group = q.shape[1] // keys.shape[1]
        q = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        k = keys[view.first :].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        v = values[view.first :].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=view.mask, is_causal=view.is_causal, scale=self._scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _view(start: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> _View:
    if window is None or window >= length:
        if start == 0:
            return _View(0, is_causal=True, mask=None)
        window = None
    first = 0 if window is None else max(0, start - window + 1)
    queries = torch.arange(start, length, device=device)
    keys = torch.arange(first, length, device=device)
    return _View(first, is_causal=False, mask=_mask(queries, keys, window, dtype))


def _mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at position p sees the key, positions (p - window, p], and -inf elsewhere.

    queries [..., n], keys [L] -> [..., n, L]. Additive, because a boolean mask is converted in every layer.
    """
    hidden = keys > queries[..., None]
    if window is not None:
        hidden |= keys <= queries[..., None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
