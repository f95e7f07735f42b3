"""One kernel for prompts and decode rows, whose sums do not depend on what else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend, AttentionStep, Capabilities
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.attention.triton import DEVICES
from mini_infer.kernels import invariant_attention
from mini_infer.kernels.ops import TritonKernels


class InvariantBackend(AttentionBackend):
    capabilities = Capabilities(
        prefill=invariant_attention.LIMITS,
        decode=invariant_attention.LIMITS,
        devices=DEVICES,
        sliding_window=True,
        graph_safe=True,
        batch_invariant=True,
    )

    def check(self, device: torch.device) -> None:
        TritonKernels().check(device)

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        n = batch.num_decode_rows
        rows = batch.block_tables[:n], batch.query_starts[: n + 1], batch.seq_lens[:n]
        return _step(attention, *rows, query_len=batch.decode_query_len)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        n = batch.num_decode_rows
        return _step(
            attention, batch.block_tables[n:], batch.prefill_query_starts(), batch.seq_lens[n:], query_len=None
        )


def _step(
    attention: ModelAttention, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor, query_len: int | None
) -> AttentionStep:
    store, windows = attention.store, attention.windows

    def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        return invariant_attention.invariant_attention(
            q,
            store.keys(layer),
            store.values(layer),
            block_tables,
            query_starts,
            seq_lens,
            scale=attention.scale,
            window=windows[layer],
            query_len=query_len,
            out=out,
        )

    return step
