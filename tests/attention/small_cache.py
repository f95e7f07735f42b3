"""A cache with sequences in it, the batch of a step, and what attention must give: by the formula, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mini_infer.attention.backend import AttentionBackend
from mini_infer.attention.context import AttentionBatch, AttentionContext, ModelAttention
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout


@dataclass(frozen=True)
class Geometry:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, eq=False)
class Step:
    """A step's rows over a filled cache, in which they own blocks in no order."""

    geometry: Geometry
    store: KVStore
    batch: AttentionBatch
    windows: Sequence[int | None]  # of each layer
    keys: list[list[torch.Tensor]]  # [layer][row] of [seq_len, kv_heads, head_dim]
    values: list[list[torch.Tensor]]
    queries: list[torch.Tensor]  # [layer] of [T, heads, head_dim]

    def context(self, prefill: AttentionBackend, decode: AttentionBackend | None = None) -> AttentionContext:
        attention = ModelAttention(self.store, self.windows, self.geometry.scale)
        return AttentionContext(self.batch, attention, prefill, decode or prefill)

    def expected(self, layer: int) -> torch.Tensor:
        """[T, heads, head_dim] float64"""
        assert self.batch.host_query_starts is not None
        questions = self.queries[layer].split(np.diff(self.batch.host_query_starts).tolist())
        rows = zip(questions, self.keys[layer], self.values[layer], strict=True)
        return torch.cat([plain_attention(q, k, v, self.windows[layer], self.geometry.scale) for q, k, v in rows])


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """One sequence, the queries being its last tokens."""
    n, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    queries = torch.arange(length - n, length, device=q.device)[:, None]
    keys = torch.arange(length, device=q.device)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def make_step(
    rows: Sequence[tuple[int, int]],
    num_decode_rows: int,
    geometry: Geometry,
    windows: Sequence[int | None],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    blank: float = 0.0,
) -> Step:
    """
    Args:
        rows: tokens in the cache before the step, and of the step.
        blank: what fills blocks that nobody owns, to one of which the tables' ends point, and slots past a row's end.
    """
    g = geometry
    generator = torch.Generator().manual_seed(0)
    lengths = [start + count for start, count in rows]
    widths = [-(-length // g.block_size) for length in lengths]
    order = torch.randperm(sum(widths) + 2, generator=generator)
    layout = KVLayout.of_heads(len(windows), g.kv_heads, g.head_dim, dtype)
    store = KVStore(layout, num_blocks=len(order), block_size=g.block_size, device=device)
    store.tensors[0].fill_(blank)
    tables = order[-1].repeat(len(rows), max(widths) + 1)
    for row, own in enumerate(order[:-2].split(widths)):
        tables[row, : widths[row]] = own
    slots = [
        (table[:, None] * g.block_size + torch.arange(g.block_size)).flatten()[:length]
        for table, length in zip(tables, lengths, strict=True)
    ]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    keys = [[numbers(length, g.kv_heads, g.head_dim) for length in lengths] for _ in windows]
    values = [[numbers(length, g.kv_heads, g.head_dim) for length in lengths] for _ in windows]
    for layer in range(len(windows)):
        for row, own in enumerate(slots):
            store.slots(layer, "k")[own.to(device)] = keys[layer][row]
            store.slots(layer, "v")[own.to(device)] = values[layer][row]
    batch = make_batch(rows, num_decode_rows, tables, slots, device)
    # As a split of q, k and v leaves them: a token's heads together, and a gap to the next token.
    queries = [numbers(batch.num_tokens, g.heads + 2, g.head_dim)[:, : g.heads] for _ in windows]
    return Step(geometry, store, batch, windows, keys, values, queries)


def make_batch(
    rows: Sequence[tuple[int, int]],
    num_decode_rows: int,
    tables: torch.Tensor,
    slots: Sequence[torch.Tensor],
    device: torch.device,
) -> AttentionBatch:
    starts, counts = np.array(rows).T
    query_starts, seq_lens = np.concatenate(([0], np.cumsum(counts))), starts + counts
    positions = [np.arange(start, start + count) for start, count in rows]
    new_slots = [own[start : start + count] for own, (start, count) in zip(slots, rows, strict=True)]
    return AttentionBatch.of_rows(
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.cat(new_slots).to(device),
        tables.int().to(device),
        torch.from_numpy(query_starts).int().to(device),
        torch.from_numpy(seq_lens).int().to(device),
        num_decode_rows=num_decode_rows,
        host_query_starts=query_starts,
        host_seq_lens=seq_lens,
    )
