"""Attention over the paged cache: decode rows by batch and length, prompts, chunks of prompts.

Blocks lie scattered over the cache. Bytes are the K and V that a step reads; operations are counted as in roofline.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from experiments.lab.kernels.case import Case, Implementation, VariantAbsent, Work, heads, prepare, require_triton, some
from mini_infer.attention.backend import Kind, Requirements, select_backend
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout
from mini_infer.core.config import AttentionChoice
from mini_infer.core.errors import ConfigError

CHECKED_ROWS = 4  # sequences whose output is compared with the reference's
CHECKED_QUERIES = 8  # of each
SINGLE_PASS, SPLIT_K, FA4, FA3 = "single_pass", "split_k", "fa4", "fa3"
KV_FP8 = "fp8"
FA3_SPLITS = (0, 32)  # FA3 chooses the number of splits; vLLM's bound where it captures CUDA graphs


class _Attention(Case, heads=None, batch=None, length=None, head_dim=128, block_size=16):
    """One new token of each sequence. A set of inputs is a layer of one KV store, and queries."""

    kind: Kind = "decode"

    apart: ClassVar[tuple[str, ...]] = (FA3,)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._heads, self._kv_heads = heads(self.shape["heads"], self.name)
        self._scale = self.shape["head_dim"] ** -0.5
        self.count, self.length = self.shape["batch"], self.shape["length"]
        self.queries = self.shape.get("queries", 1)  # tokens of each sequence that are computed
        self._held: list[Any] = []  # what graphs know nothing of but the address
        if self.queries > self.length:
            raise ConfigError(f"the case {self.name}: {self.queries} queries of a sequence of {self.length} tokens")

    def work(self, variant: str = "") -> Work:
        kv_bytes = 1 if variant == KV_FP8 else self.dtype.itemsize
        kv = 2 * self.count * self.length * self._kv_heads * self.shape["head_dim"]
        moved = 2 * self.count * self.queries * self._heads * self.shape["head_dim"]
        pairs = self.count * (self.queries * self.length - self.queries * (self.queries - 1) // 2)
        flops = 4.0 * self.shape["head_dim"] * self._heads * pairs
        return Work(kv * kv_bytes + moved * self.dtype.itemsize, flops, "read_gb_s")

    def allocate(self, copies: int) -> None:
        block_size, query = self.shape["block_size"], (self.count * self.queries, self._heads, self.shape["head_dim"])
        width = math.ceil(self.length / block_size)
        self.sets = [(layer, self.random(*query)) for layer in range(copies)]
        self._store = self._stored(self.count * width, self.dtype)
        self._store.tensors[0].normal_()
        order = np.random.default_rng(0).permutation(self.count * width).reshape(self.count, width)
        self._batch = self._batch_of(order)

    def _stored(self, num_blocks: int, dtype: torch.dtype) -> KVStore:
        layout = KVLayout.of_heads(len(self.sets), self._kv_heads, self.shape["head_dim"], dtype)
        return KVStore(layout, num_blocks=num_blocks, block_size=self.shape["block_size"], device=self.device)

    def _batch_of(self, block_tables: np.ndarray) -> AttentionBatch:
        """`count` sequences of `length` tokens, the last `queries` of which are computed. block_tables [count, W]"""
        places, size = np.arange(self.length - self.queries, self.length), self.shape["block_size"]
        slots = block_tables[:, places // size] * size + places % size
        starts, lens = np.arange(self.count + 1) * self.queries, np.full(self.count, self.length)
        long = [torch.from_numpy(each).to(self.device) for each in (np.tile(places, self.count), slots.ravel())]
        short = [torch.from_numpy(each).to(self.device, torch.int32) for each in (block_tables, starts, lens)]
        decoded = self.count if self.kind == "decode" else 0
        return AttentionBatch.of_rows(
            *long, *short, num_decode_rows=decoded, host_query_starts=starts, host_seq_lens=lens
        )

    def _backend(self, choice: AttentionChoice) -> Implementation:
        layout, size = self._store.layout, self.shape["block_size"]
        needs = Requirements(layout, size, self.dtype, self.device, sliding_window=False)
        try:
            backend = select_backend(choice, self.kind, needs).backend
        except ConfigError as error:
            reason = str(error).partition(f": {choice.value}: ")[2].partition(". Others:")[0]
            raise VariantAbsent(reason or str(error)) from error
        begin = backend.decode if self.kind == "decode" else backend.prefill
        step = begin(self._batch, ModelAttention(self._store, [None] * len(self.sets), self._scale))
        self._held.append(step)
        return self.on_sets(step, backend.capabilities.graph_safe)

    def _fa3(self) -> Implementation:
        """FlashAttention-3 as vLLM calls it, planned once for all layers of a step."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        store, batch = self._store, self._batch
        starts = torch.arange(self.count + 1, dtype=torch.int32, device=self.device) * self.queries
        outputs = [torch.empty_like(q) for _, q in self.sets]
        plan: dict[str, Any] = {"max_seqlen_q": self.queries, "max_seqlen_k": self.length, "cu_seqlens_q": starts}

        def with_splits(splits: int) -> Implementation:
            metadata = get_scheduler_metadata(
                batch_size=self.count,
                num_heads_q=self._heads,
                num_heads_kv=self._kv_heads,
                headdim=self.shape["head_dim"],
                cache_seqlens=batch.seq_lens,
                qkv_dtype=self.dtype,
                page_size=self.shape["block_size"],
                causal=True,
                num_splits=splits,
                **plan,
            )
            self._held.append(metadata)
            return self.on_sets(
                lambda layer, q: flash_attn_varlen_func(
                    q=q,
                    k=store.keys(layer),
                    v=store.values(layer),
                    out=outputs[layer],
                    seqused_k=batch.seq_lens,
                    block_table=batch.block_tables,
                    softmax_scale=self._scale,
                    causal=True,
                    scheduler_metadata=metadata,
                    num_splits=splits,
                    fa_version=3,
                    **plan,
                )
            )

        candidates = [with_splits(splits) for splits in FA3_SPLITS]
        return min(candidates, key=lambda candidate: prepare(candidate, len(self.sets), self.device).sample().us)

    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        """Of some queries softmax(q k^T) v over the keys that each sees, in fp32."""
        sides = self._store.keys(0), self._store.values(0)
        for row, query in product(some(self.count, CHECKED_ROWS), some(self.queries, CHECKED_QUERIES)):
            seen, place = self.length - self.queries + query + 1, row * self.queries + query
            blocks = self._batch.block_tables[row].long()
            keys, values = (side[blocks].flatten(0, 1)[:seen].float() for side in sides)
            q = self.sets[0][1][place].float().unflatten(0, (self._kv_heads, -1))  # [KV heads, group, head_dim]
            weights = (torch.einsum("hgd,lhd->hgl", q, keys) * self._scale).softmax(-1)
            yield output[place], torch.einsum("hgl,lhd->hgd", weights, values).flatten(0, 1)


class FlashDecode(_Attention):
    """By the kernel: one pass over the keys, Flash Decoding, FlashAttention-4."""

    name = "flash_decode"
    variants: ClassVar[tuple[str, ...]] = (SINGLE_PASS, SPLIT_K, FA4, FA3)
    needs_gpu = True

    def implementation(self, variant: str) -> Implementation:
        if variant == FA4:
            return self._backend(AttentionChoice.flash_attn)
        if variant == FA3:
            return self._fa3()
        require_triton(self.device)
        from mini_infer.kernels.paged_decode import paged_decode

        return self._with(paged_decode, self._store) if variant == SINGLE_PASS else self._split(self._store)

    def _split(self, store: KVStore) -> Implementation:
        from mini_infer.kernels.flash_decode import flash_decode, split_rows

        (_, q), lens = self.sets[0], self._batch.seq_lens
        parts = split_rows(q, store.keys(0), store.values(0), lens, window=None, query_len=1)
        self._held.append(parts)
        return self._with(partial(flash_decode, parts=parts), store)

    def _with(self, kernel: Callable[..., Tensor], store: KVStore) -> Implementation:
        places = self._batch.block_tables, self._batch.seq_lens
        query: dict[str, Any] = {"scale": self._scale, "window": None, "query_len": 1}

        def run(layer: int, q: Tensor) -> Tensor:
            side = store.keys(layer), store.values(layer)
            return kernel(q, *side, *places, kv_scales=store.scales(layer), **query)

        return self.on_sets(run)


class DecodeOfFp8(FlashDecode):
    """Flash Decoding over keys and values in the model's dtype, and over the same numbers in fp8."""

    name = "kv_fp8"
    variants = (SPLIT_K, KV_FP8)
    apart = ()

    def allocate(self, copies: int) -> None:
        super().allocate(copies)
        whole = self._store.tensors[0]
        self._eight = self._stored(self._store.num_blocks, torch.float8_e4m3fn)
        self._eight.tensors[0].copy_(whole)
        whole.copy_(self._eight.tensors[0])

    def implementation(self, variant: str) -> Implementation:
        require_triton(self.device)
        return self._split(self._eight if variant == KV_FP8 else self._store)


class DecodeAttention(_Attention):
    """By the engine's backend."""

    name = "decode"
    variants = (*(choice.value for choice in AttentionChoice if choice is not AttentionChoice.auto), FA3)

    def implementation(self, variant: str) -> Implementation:
        return self._fa3() if variant == FA3 else self._backend(AttentionChoice(variant))


class PrefillAttention(DecodeAttention, batch=1, queries=None):
    """The last `queries` tokens of each sequence, such as a whole prompt or a chunk at its end."""

    name = "prefill"
    kind = "prefill"
