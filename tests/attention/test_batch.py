from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_infer.attention.context import AttentionContext, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout

BLOCK = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_writes_to_the_slots_of_the_step(step_rows: Any, dtype: torch.dtype) -> None:
    store = KVStore(KVLayout.of_heads(2, 2, 8, dtype), num_blocks=9, block_size=BLOCK, device=torch.device("cpu"))
    batch = step_rows([(9, 1, [5, 2, 7]), (4, 6, [3, 0, 8])], 1, BLOCK)
    backend = SdpaBackend()
    context = AttentionContext(batch, ModelAttention(store, (None, None), 1.0), backend, backend)
    k, v = torch.randn(7, 3, 2, 8).to(dtype).transpose(0, 1)[:2]  # as a split of q, k and v leaves them
    context.store(1, k, v)
    assert torch.equal(store.keys(1)[7, 1], k[0])
    assert torch.equal(store.slots(1, "k")[batch.slot_mapping], k)
    assert torch.equal(store.slots(1, "v")[batch.slot_mapping], v)
    assert torch.count_nonzero(store.tensors[0]) == torch.count_nonzero(k) + torch.count_nonzero(v)


class TestBatch:
    def test_is_complete_when_built(self, step_rows: Any) -> None:
        batch = step_rows([(9, 1, [5, 2, 7]), (0, 1, [1]), (4, 6, [3, 0, 8])], 2, BLOCK)
        assert batch.positions.tolist() == [9, 0, 4, 5, 6, 7, 8, 9]
        assert batch.slot_mapping.tolist() == [29, 4, 0, 1, 2, 3, 32, 33]
        assert batch.block_tables.tolist() == [[5, 2, 7], [1, 0, 0], [3, 0, 8]]
        assert batch.host_query_starts is not None
        assert batch.host_seq_lens is not None
        assert batch.query_starts.tolist() == batch.host_query_starts.tolist() == [0, 1, 2, 8]
        assert batch.seq_lens.tolist() == batch.host_seq_lens.tolist() == [10, 1, 10]
        assert (batch.num_rows, batch.num_tokens, batch.num_decode_tokens, batch.decode_query_len) == (3, 8, 2, 1)
        assert (batch.max_decode_seq_len, batch.max_prefill_query_len, batch.max_prefill_seq_len) == (10, 6, 10)
        assert batch.slot_mapping.dtype is torch.int64
        assert {t.dtype for t in (batch.block_tables, batch.query_starts, batch.seq_lens)} == {torch.int32}

    def test_without_decodes(self, step_rows: Any) -> None:
        batch = step_rows([(0, 3, [0])], 0, BLOCK)
        assert (batch.num_decode_tokens, batch.max_decode_seq_len, batch.max_prefill_query_len) == (0, 0, 3)

    def test_decode_rows_must_agree(self, step_rows: Any) -> None:
        with pytest.raises(ValueError, match=r"same number of tokens, got \[1, 2\]"):
            step_rows([(3, 1, [0]), (3, 2, [1, 2])], 2, BLOCK)
