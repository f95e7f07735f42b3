"""Small steps for the sake of what they compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_infer.attention.backend import AttentionBackend, Kind
from mini_infer.attention.context import AttentionBatch
from mini_infer.cache.kv_store import KVStore


@torch.inference_mode()
def run_small_steps(
    backend: AttentionBackend,
    kind: Kind,
    kv_store: KVStore,
    num_heads: int,
    windows: Sequence[int | None],
    scale: float,
    *,
    num_rows: int = 1,
    max_query_len: int = 1,
) -> None:
    """Steps of one-token rows at the start of block 0: with every window in force, and with none.

    max_query_len is what the step says of its longest row.
    """
    keys = kv_store.keys(0)
    device = keys.device
    long = 1 + max((window for window in windows if window is not None), default=0)
    decode_rows = num_rows if kind == "decode" else 0
    q = torch.zeros(num_rows, num_heads, keys.shape[-1], dtype=keys.dtype, device=device)
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    for length in {1, long}:
        batch = AttentionBatch(
            positions=zeros,
            slot_mapping=zeros,
            block_tables=zeros.int()[:, None],
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
            num_decode_rows=decode_rows,
            max_decode_seq_len=length,
            max_prefill_query_len=max_query_len,
            max_prefill_seq_len=length,
        )
        step = (backend.decode if decode_rows else backend.prefill)(batch, kv_store, windows, scale)
        for window in set(windows):
            step(windows.index(window), q)
