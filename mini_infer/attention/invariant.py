"""One kernel for prompts and decode rows, whose sums do not depend on what else is in the batch."""

from __future__ import annotations

import torch

from mini_infer.attention.backend import AttentionBackend, AttentionStep, Capabilities, step_of
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.attention.triton import DEVICES
from mini_infer.kernels.invariant_attention import LIMITS, invariant_attention
from mini_infer.kernels.ops import TritonKernels


class InvariantBackend(AttentionBackend):
    capabilities = Capabilities(
        prefill=LIMITS, decode=LIMITS, devices=DEVICES, sliding_window=True, graph_safe=True, batch_invariant=True
    )

    def check(self, device: torch.device) -> None:
        TritonKernels().check(device)

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        rows, query_len = batch.decode_rows(), batch.decode_query_len
        return step_of(invariant_attention, rows, attention, attention.windows, query_len=query_len)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return step_of(invariant_attention, batch.prefill_rows(), attention, attention.windows)
