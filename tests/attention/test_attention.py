from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from mini_infer.attention import backend as backends
from mini_infer.attention import torch_sdpa
from mini_infer.attention.backend import AttentionBackend, Capabilities, Requirements, select_backend
from mini_infer.attention.context import AttentionBatch, AttentionContext
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import AttentionChoice
from mini_infer.core.errors import ConfigError

DEVICES = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
BLOCK, HEADS, DIM = 4, 4, 8
SCALE = DIM**-0.5
# The last window of two is wider than any sequence.
WINDOWS = (None, 5, 1, 1000)


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


def test_rows_of_like_lengths_share_a_call() -> None:
    def groups(*lens: int) -> list[list[int]]:
        return [rows.tolist() for rows in torch_sdpa._alike(np.array(lens))]

    assert groups(10, 12, 9) == [[1, 0, 2]]
    assert groups(32, 2000, 30, 1900) == [[1, 3], [0, 2]]
    assert groups(600, 32) == [[0, 1]], "too little to save"
    assert groups(100, 3000, 1400, *[90] * 20) == [[1], [2], [0, *range(3, 23)]]


def make_store(device: torch.device, kv_heads: int, dtype: torch.dtype = torch.float32) -> KVStore:
    return KVStore(
        num_layers=len(WINDOWS),
        num_kv_heads=kv_heads,
        head_dim=DIM,
        num_blocks=64,
        block_size=BLOCK,
        dtype=dtype,
        device=device,
    )


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """One sequence, the queries being its last tokens, in float64, by the formula."""
    n, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    queries = torch.arange(length - n, length, device=q.device)[:, None]
    keys = torch.arange(length, device=q.device)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


# (tokens already in the cache, tokens of this step) of each row, and how many are decode rows
BATCHES = {
    "one decode": ([(9, 1)], 1),
    "first token": ([(0, 1)], 1),
    "decodes of one length": ([(11, 1), (11, 1), (11, 1)], 3),
    "decodes of many lengths": ([(0, 1), (22, 1), (3, 1), (4, 1)], 4),
    "decodes of three tokens": ([(8, 3), (21, 3)], 2),
    "prompt": ([(0, 13)], 0),
    "prompts": ([(0, 13), (0, 1), (0, 24)], 0),
    "chunks": ([(4, 9), (13, 1), (1, 20)], 0),
    "everything": ([(7, 1), (16, 1), (0, 10), (5, 8)], 2),
    "drafts and chunks": ([(7, 2), (16, 2), (0, 10), (5, 8)], 2),
}


@pytest.mark.parametrize("worth_a_call", [1, 1024])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_formula(
    name: str,
    kv_heads: int,
    worth_a_call: int,
    device: torch.device,
    step_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_sdpa, "_WORTH_A_CALL", worth_a_call)
    rows, num_decode_rows = BATCHES[name]
    torch.manual_seed(0)
    store = make_store(device, kv_heads)
    blocks = iter(torch.randperm(64).tolist())
    tables = [[next(blocks) for _ in range(-(-(start + count) // BLOCK))] for start, count in rows]
    lengths = [start + count for start, count in rows]
    # Sequences as they will be when the step is done; each layer stores its own k and v.
    keys = [[torch.randn(n, kv_heads, DIM, device=device) for n in lengths] for _ in WINDOWS]
    values = [[torch.randn(n, kv_heads, DIM, device=device) for n in lengths] for _ in WINDOWS]
    for layer in range(len(WINDOWS)):
        for (start, _), table, k, v in zip(rows, tables, keys[layer], values[layer], strict=True):
            slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start)]
            store.write(layer, k[:start], v[:start], torch.tensor(slots, dtype=torch.int64, device=device))

    ranges = [(start, count, table) for (start, count), table in zip(rows, tables, strict=True)]
    batch = AttentionBatch.build(step_rows(ranges, num_decode_rows, BLOCK), device)
    context = AttentionContext(batch, store, SdpaBackend(), SdpaBackend(), WINDOWS, SCALE)
    for layer, window in enumerate(WINDOWS):
        q = torch.randn(batch.num_tokens, HEADS, DIM, device=device)
        k = torch.cat([k[start:] for (start, _), k in zip(rows, keys[layer], strict=True)])
        v = torch.cat([v[start:] for (start, _), v in zip(rows, values[layer], strict=True)])
        out = context.attend(layer, q, k, v)
        assert out.shape == q.shape
        parts = out.split([count for _, count in rows])
        questions = q.split([count for _, count in rows])
        for row, part in enumerate(parts):
            expected = plain_attention(questions[row], keys[layer][row], values[layer][row], window)
            torch.testing.assert_close(part.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device, step_rows: Any) -> None:
    torch.manual_seed(0)
    store = make_store(device, 2, dtype)
    store.kv.normal_()
    tables = [[3, 9, 1, 5], [2, 8], [0, 4, 6]]
    rows = [(14, 1, tables[0]), (6, 1, tables[1]), (3, 8, tables[2])]
    batch = AttentionBatch.build(step_rows(rows, 2, BLOCK), device)
    context = AttentionContext(batch, store, SdpaBackend(), SdpaBackend(), WINDOWS, SCALE)
    q = torch.randn(10, HEADS, DIM, dtype=dtype, device=device)
    k, v = torch.randn(2, 10, 2, DIM, dtype=dtype, device=device)
    out = context.attend(1, q, k, v)
    assert out.dtype is dtype
    start = 0
    for (first, count, table), part in zip(rows, out.split([1, 1, 8]), strict=True):
        keys, values = (side[table].flatten(0, 1)[: first + count] for side in (store.keys(1), store.values(1)))
        expected = plain_attention(q[start : start + count], keys, values, WINDOWS[1])
        torch.testing.assert_close(part.double(), expected, atol=0.02, rtol=0.02)
        start += count


def test_scratch_memory_is_shared_between_steps_of_growing_length(device: torch.device, step_rows: Any) -> None:
    """A context made earlier still computes the right thing after a later one took a larger buffer."""
    torch.manual_seed(0)
    store, backend = make_store(device, 2), SdpaBackend()
    store.kv.normal_()
    contexts = []
    for length in (3, 30, 90):
        table = list(range(-(-length // BLOCK)))
        batch = AttentionBatch.build(step_rows([(length - 1, 1, table)], 1, BLOCK), device)
        contexts.append((length, table, AttentionContext(batch, store, backend, backend, WINDOWS, SCALE)))
    q = torch.randn(1, HEADS, DIM, device=device)
    k, v = torch.randn(2, 1, 2, DIM, device=device)
    for length, table, context in contexts:
        out = context.attend(0, q, k, v)
        keys, values = (side[table].flatten(0, 1)[:length] for side in (store.keys(0), store.values(0)))
        torch.testing.assert_close(out.double(), plain_attention(q, keys, values, None), atol=1e-5, rtol=1e-5)


class TestBatch:
    def test_is_complete_when_built(self, step_rows: Any) -> None:
        step = step_rows([(9, 1, [5, 2, 7]), (0, 1, [1]), (4, 6, [3, 0, 8])], 2, BLOCK)
        batch = AttentionBatch.build(step, torch.device("cpu"))
        assert batch.positions.tolist() == [9, 0, 4, 5, 6, 7, 8, 9]
        assert batch.slot_mapping.tolist() == [29, 4, 0, 1, 2, 3, 32, 33]
        assert batch.block_tables.tolist() == [[5, 2, 7], [1, 0, 0], [3, 0, 8]]
        assert batch.query_starts.tolist() == batch.host_query_starts.tolist() == [0, 1, 2, 8]
        assert batch.seq_lens.tolist() == batch.host_seq_lens.tolist() == [10, 1, 10]
        assert (batch.num_rows, batch.num_tokens, batch.num_decode_tokens, batch.decode_query_len) == (3, 8, 2, 1)
        assert (batch.max_decode_seq_len, batch.max_prefill_query_len, batch.max_prefill_seq_len) == (10, 6, 10)
        assert batch.slot_mapping.dtype is torch.int64
        assert {t.dtype for t in (batch.block_tables, batch.query_starts, batch.seq_lens)} == {torch.int32}

    def test_without_decodes(self, step_rows: Any) -> None:
        batch = AttentionBatch.build(step_rows([(0, 3, [0])], 0, BLOCK), torch.device("cpu"))
        assert (batch.num_decode_tokens, batch.max_decode_seq_len, batch.max_prefill_query_len) == (0, 0, 3)

    def test_decode_rows_must_agree(self, step_rows: Any) -> None:
        step = step_rows([(3, 1, [0]), (3, 2, [1, 2])], 2, BLOCK)
        with pytest.raises(ValueError, match=r"same number of tokens, got \[1, 2\]"):
            AttentionBatch.build(step, torch.device("cpu"))


class Picky(AttentionBackend):
    """Decodes on a GPU only, and little else."""

    capabilities = Capabilities(
        prefill=False,
        decode=True,
        head_sizes=frozenset({64, 128}),
        block_sizes=frozenset({16}),
        dtypes=frozenset({torch.bfloat16}),
        devices=frozenset({"cuda"}),
        sliding_window=False,
        graph_safe=True,
    )

    def decode(self, *args: Any) -> Any:
        raise NotImplementedError

    def prefill(self, *args: Any) -> Any:
        raise NotImplementedError


class Extra(str, Enum):
    picky = "picky"


class TestSelection:
    needs = Requirements(
        head_size=128, block_size=16, dtype=torch.bfloat16, device=torch.device("cuda"), sliding_window=False
    )

    def test_auto_takes_the_first_that_can(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            backends,
            "BACKENDS",
            {Extra.picky: f"{__name__}:Picky", AttentionChoice.sdpa: "mini_infer.attention.torch_sdpa:SdpaBackend"},
        )
        assert isinstance(select_backend(AttentionChoice.auto, "decode", self.needs), Picky)
        assert isinstance(select_backend(AttentionChoice.auto, "prefill", self.needs), SdpaBackend)

    @pytest.mark.parametrize(
        ("kind", "changes", "reason"),
        [
            ("prefill", {}, "it has no prefill"),
            ("decode", {"head_size": 96}, "head sizes 128, 64, not 96"),
            ("decode", {"block_size": 32}, "block sizes 16, not 32"),
            ("decode", {"dtype": torch.float32}, r"torch\.bfloat16, not torch\.float32"),
            ("decode", {"device": torch.device("cpu")}, "runs on cuda, not cpu"),
            ("decode", {"sliding_window": True}, "no sliding window"),
        ],
    )
    def test_a_choice_that_cannot(
        self, monkeypatch: pytest.MonkeyPatch, kind: Any, changes: dict[str, Any], reason: str
    ) -> None:
        monkeypatch.setattr(backends, "BACKENDS", {AttentionChoice.sdpa: f"{__name__}:Picky"})
        needs = dataclasses.replace(self.needs, **changes)
        with pytest.raises(ConfigError, match=rf"attention\.{kind}=sdpa cannot serve.*{reason}.*Others: auto"):
            select_backend(AttentionChoice.sdpa, kind, needs)

    def test_a_backend_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "BACKENDS", {AttentionChoice.sdpa: "not_installed.anywhere:Backend"})
        with pytest.raises(ConfigError, match="No module named 'not_installed'"):
            select_backend(AttentionChoice.auto, "decode", self.needs)

    def test_sdpa_serves_what_the_models_need(self) -> None:
        for kind in ("prefill", "decode"):
            needs = dataclasses.replace(self.needs, head_size=80, block_size=1, sliding_window=True)
            assert isinstance(select_backend(AttentionChoice.sdpa, kind, needs), SdpaBackend)
