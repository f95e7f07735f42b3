"""Decode attention to a paged cache of latents, absorbed (mini_infer/kernels/mla_decode.py), by batch and length.

Bytes are the latents, which are read once for keys and values of all heads, and queries and outputs. With many heads
operations bound it: 2 * (2 rank + rope_dim) for each head and cached token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from experiments.lab.kernels.attention import CHECKED_ROWS, SINGLE_PASS, SPLIT_K
from experiments.lab.kernels.case import Case, Implementation, VariantAbsent, Work, require_triton, some

FLASH_MLA = "flash_mla"


class MLADecode(Case, heads=None, batch=None, length=None, rank=512, rope_dim=64, block_size=64):
    """Of DeepSeek-V2's and V3's sizes unless said, in blocks as FlashMLA takes them. All rows have the same length."""

    name = "mla_decode"
    variants = (SINGLE_PASS, SPLIT_K, FLASH_MLA)
    needs_gpu = True
    apart = (FLASH_MLA,)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rank, self._size = self.shape["rank"], self.shape["rank"] + self.shape["rope_dim"]
        self._scale = 192**-0.5  # of the keys that latents stand for

    def work(self, variant: str = "") -> Work:
        heads, batch, length = (self.shape[key] for key in ("heads", "batch", "length"))
        both = self._size + self._rank
        moved = batch * (length * self._size + heads * both)
        return Work(moved * self.dtype.itemsize, 2.0 * batch * length * heads * both, "read_gb_s")

    def allocate(self, copies: int) -> None:
        batch, length, block_size = (self.shape[key] for key in ("batch", "length", "block_size"))
        width = -(-length // block_size)
        blocks = batch * width
        self._tables = torch.randperm(blocks, device=self.device).int().view(batch, width)
        self._lens = torch.full((batch,), length, dtype=torch.int32, device=self.device)
        latents, q = (blocks, block_size, self._size), (batch, self.shape["heads"], self._size)
        self.sets = [(self.random(*q), self.random(*latents)) for _ in range(copies)]

    def implementation(self, variant: str) -> Implementation:
        if variant == FLASH_MLA:
            return self._flash_mla()
        require_triton(self.device)
        from mini_infer.kernels.mla_decode import mla_decode, split_latent_rows

        rows = self._rank, self._tables, self._lens
        (first, latents), parts = self.sets[0], None
        if variant == SPLIT_K:
            parts = split_latent_rows(first, latents, self._rank, self._lens, query_len=1)
        options: dict[str, Any] = {"scale": self._scale, "query_len": 1, "parts": parts}
        return self.on_sets(lambda q, latents: mla_decode(q, latents, *rows, **options))

    def _flash_mla(self) -> Implementation:
        """As vLLM calls it: what it plans from the lengths in its first call, later ones share."""
        from vllm.v1.attention.ops import flashmla

        supported, why = flashmla.is_flashmla_dense_supported()
        if not supported:
            raise VariantAbsent(f"FlashMLA: {why}")
        plan, _ = flashmla.get_mla_metadata()

        def run(q: Tensor, latents: Tensor) -> Tensor:
            out, _ = flashmla.flash_mla_with_kvcache(
                q=q[:, None],
                k_cache=latents[:, :, None],
                block_table=self._tables,
                cache_seqlens=self._lens,
                head_dim_v=self._rank,
                tile_scheduler_metadata=plan,
                softmax_scale=self._scale,
            )
            return out[:, 0]

        run(*self.sets[0])
        return self.on_sets(run)

    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        q, latents = self.sets[0]
        for row in some(self.shape["batch"], CHECKED_ROWS):
            keys = latents[self._tables[row].long()].flatten(0, 1)[: self.shape["length"]].float()
            weights = (q[row].float() @ keys.T * self._scale).softmax(-1)
            yield output[row], weights @ keys[:, : self._rank]
