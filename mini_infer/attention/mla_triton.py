"""Our Triton kernel for latents that are attended to as they are, for decode rows and prompts alike."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend, AttentionStep, Capabilities, Kind
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.attention.triton import DEVICES
from mini_infer.kernels.flash_decode import Parts
from mini_infer.kernels.mla_decode import LIMITS, mla_decode, split_latent_rows
from mini_infer.kernels.ops import TritonKernels


class LatentTritonBackend(AttentionBackend):
    capabilities = Capabilities(prefill=LIMITS, decode=LIMITS, devices=DEVICES, sliding_window=False, graph_safe=True)
    _few_tokens = 32  # of prompts; more have a program each, and up to 131 leave SMs idle: splitting them was not tried

    def check(self, device: torch.device) -> None:
        TritonKernels().check(device)

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        block_tables, _, seq_lens = batch.decode_rows()
        return _step(block_tables, seq_lens, batch.decode_query_len, attention, split=True)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        tables, starts, _ = batch.prefill_rows()
        positions = batch.positions[batch.num_decode_tokens :]
        return _by_token(tables, starts.diff(), positions, attention, split=len(positions) <= self._few_tokens)

    def variants(self, kind: Kind) -> list[tuple[int, int]]:
        if kind == "prefill":
            return [(num_rows, 1) for num_rows in (1, 2, self._few_tokens + 1)]
        return [(num_rows, 1) for num_rows in (1, 2, 33, 257, 1025)]  # where split_latent_rows changes its own


class LatentInvariantBackend(LatentTritonBackend):
    """Each token's latents in one order, from the first to the last, whatever it is in company of."""

    capabilities = replace(LatentTritonBackend.capabilities, batch_invariant=True)
    _few_tokens = 0

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        count, positions = batch.decode_query_len, batch.positions[: batch.num_decode_tokens]
        return _by_token(batch.decode_rows().block_tables, count, positions, attention, split=False)


def _by_token(
    tables: Tensor, counts: Tensor | int, positions: Tensor, attention: ModelAttention, split: bool
) -> AttentionStep:
    """Each token as a row of its own: the heads alone fill a tile, and there is nothing to mask. Rows of `counts`
    tokens, whose block tables are given."""
    tables = tables.repeat_interleave(counts, dim=0, output_size=len(positions))
    return _step(tables, positions.int() + 1, 1, attention, split)


def _step(
    block_tables: Tensor, seq_lens: Tensor, query_len: int, attention: ModelAttention, split: bool
) -> AttentionStep:
    store, rank = attention.store, attention.value_dim
    parts: list[Parts | None] = []  # which layers share

    def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        q, latents = q.contiguous(), store.keys(layer)[:, :, 0]
        if not parts:
            parts.append(split_latent_rows(q, latents, rank, seq_lens, query_len=query_len) if split else None)
        rows, scale = (rank, block_tables, seq_lens), attention.scale
        return mla_decode(q, latents, *rows, scale=scale, query_len=query_len, out=out, parts=parts[0])

    return step
