"""Our own Triton kernels: Flash Decoding for decode rows and FlashAttention-2 over the paged cache for prompts."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend, AttentionStep, Capabilities, Kind, step_of
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.kernels import flash_decode, paged_decode, paged_prefill
from mini_infer.kernels.ops import TritonKernels

# Triton itself reads this variable: its interpreter runs kernels on a CPU, slowly, for tests.
DEVICES = frozenset({"cuda", "cpu"} if os.environ.get("TRITON_INTERPRET") == "1" else {"cuda"})


class TritonBackend(AttentionBackend):
    capabilities = Capabilities(
        prefill=paged_prefill.LIMITS,
        decode=paged_decode.LIMITS,
        devices=DEVICES,
        sliding_window=True,
        graph_safe=True,
    )
    mixed_graphs = ("decode",)

    def check(self, device: torch.device) -> None:
        TritonKernels().check(device)

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        store, windows = attention.store, attention.windows_within(batch.max_decode_seq_len)
        block_tables, _, seq_lens = batch.decode_rows()
        parts: dict[int | None, Any] = {}  # by window: layers with the same one split their rows alike

        def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
            q, keys, values = q.contiguous(), store.keys(layer), store.values(layer)
            rows: dict[str, Any] = {"window": windows[layer], "query_len": batch.decode_query_len}
            if windows[layer] not in parts:
                parts[windows[layer]] = flash_decode.split_rows(q, keys, values, seq_lens, **rows)
            if (scales := store.scales(layer)) is not None:
                rows["kv_scales"] = scales
            rows |= {"scale": attention.scale, "parts": parts[windows[layer]], "out": out}
            return flash_decode.flash_decode(q, keys, values, block_tables, seq_lens, **rows)

        return step

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        windows, longest = attention.windows_within(batch.max_prefill_seq_len), batch.max_prefill_query_len
        return step_of(paged_prefill.paged_prefill, batch.prefill_rows(), attention, windows, max_query_len=longest)

    def variants(self, kind: Kind) -> list[tuple[int, int]]:
        if kind == "prefill":
            return [(1, 1), (1, 2**20)]  # short rows and long rows have tiles of their own
        return [(num_rows, 1) for num_rows in (1, 2, 33, 257, 1025)]  # where flash_decode and split_rows change theirs
