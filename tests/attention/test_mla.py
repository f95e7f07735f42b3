"""Attention to a cache of latents: each form and backend gives what keys and values give that are made of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_cache import plain_attention

from mini_infer.attention import mla
from mini_infer.attention.backend import Kind, Latent, Requirements, select_backend
from mini_infer.attention.context import AttentionContext, ModelAttention, UpProjections
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout, Plane
from mini_infer.core.config import AttentionChoice, MLAForm
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, VALUES, RANK, BLOCK = 4, 10, 6, 12, 20, 4
LATENT = Latent(HEADS, NOPE + ROPE, VALUES, RANK, ROPE, MLAForm.auto, crossover=3)
LAYOUT = KVLayout.alike(2, Plane(mla.LATENT, (RANK + ROPE,), torch.float32))
NEEDS = Requirements(LAYOUT, BLOCK, torch.float32, CPU, sliding_window=False, latent=LATENT)
FORMS = ["latent", "absorbed", "auto"]


def needs(form: str, **changes: Any) -> Requirements:
    return replace(NEEDS, latent=replace(LATENT, form=MLAForm(form)), **changes)


def run(prefill: AttentionChoice, decode: AttentionChoice, form: str, step_rows: Any) -> None:
    """Two decode rows of two tokens each, and prompts of few and of many new tokens, in two layers."""
    starts_counts = [(9, 2), (30, 2), (0, 7), (21, 3), (5, 11), (0, 1)]
    generator = torch.Generator().manual_seed(0)
    order, rows = torch.randperm(80, generator=generator).tolist(), []
    for start, count in starts_counts:
        need = -(-(start + count) // BLOCK)
        rows.append((start, count, order[:need]))
        order = order[need:]
    batch = step_rows(rows, 2, BLOCK, unused_block=order[0])
    store = KVStore(LAYOUT, num_blocks=80, block_size=BLOCK, device=CPU)
    weights = torch.randn(2, HEADS, NOPE + VALUES, RANK, generator=generator) * RANK**-0.5
    attention = ModelAttention(store, [None, None], 0.3, torch.float32, UpProjections(list(weights), ROPE, VALUES))
    own = needs(form)
    backends = select_backend(prefill, "prefill", own).backend, select_backend(decode, "decode", own).backend
    context = AttentionContext(batch, attention, *backends)
    for layer in range(2):
        context.slots(layer, mla.LATENT).normal_(generator=generator)
        q = torch.randn(batch.num_tokens, HEADS, NOPE + ROPE, generator=generator)
        got, at = context.attend(layer, q), 0
        assert got.shape == (batch.num_tokens, HEADS, VALUES)
        for start, count, blocks in rows:
            slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start + count)]
            latents = context.slots(layer, mla.LATENT)[slots]
            made = torch.einsum("tr,her->the", latents[:, :RANK], weights[layer])
            keys = torch.cat((made[..., :NOPE], latents[:, None, RANK:].expand(-1, HEADS, -1)), dim=2)
            expected = plain_attention(q[at : at + count], keys, made[..., NOPE:], None, 0.3)
            torch.testing.assert_close(got[at : at + count].double(), expected, atol=2e-5, rtol=2e-5)
            at += count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["sdpa", "triton", "batch_invariant"])
def test_equals_attention_of_heads(form: str, backend: str, step_rows: Any) -> None:
    if backend != "sdpa":
        pytest.importorskip("triton")
    run(AttentionChoice(backend), AttentionChoice(backend), form, step_rows)


@pytest.mark.parametrize("room", [0, 3 * 20_000])
def test_some_heads_at_a_time_are_expanded_where_memory_is_short(
    room: int, step_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "EXPANDED_BYTES", room)
    run(AttentionChoice.sdpa, AttentionChoice.sdpa, "latent", step_rows)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_rows_that_share_a_prefix_are_expanded_in_groups_that_fit(
    kind: Kind, step_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as all rows at once; and what a group expands is free when the next one comes."""
    generator = torch.Generator().manual_seed(0)
    num_rows, prefix, new = 60, 40, 5 if kind == "prefill" else 1
    shared = list(range(prefix // BLOCK))
    rows = [(prefix, new, [*shared, *range(10 + 2 * row, 12 + 2 * row)]) for row in range(num_rows)]
    batch = step_rows(rows, num_rows if kind == "decode" else 0, BLOCK, unused_block=139)
    store = KVStore(LAYOUT, num_blocks=140, block_size=BLOCK, device=CPU)
    store.slots(0, mla.LATENT).normal_(generator=generator)
    weights = torch.randn(2, HEADS, NOPE + VALUES, RANK, generator=generator) * RANK**-0.5
    attention = ModelAttention(store, [None, None], 0.3, torch.float32, UpProjections(list(weights), ROPE, VALUES))
    q = torch.randn(batch.num_tokens, HEADS, NOPE + ROPE, generator=generator)
    backend = select_backend(AttentionChoice.sdpa, kind, needs("latent")).backend
    alive: weakref.WeakSet[mla._ExpandedHeads] = weakref.WeakSet()
    fill, taken = mla._ExpandedHeads.fill, []

    def counted(heads: mla._ExpandedHeads, latents: torch.Tensor, up: torch.Tensor, linear: Any) -> None:
        alive.add(heads)
        tokens, made = sum(h.num_blocks * BLOCK for h in alive), up.shape[0] * (NOPE + ROPE + VALUES + up.shape[1])
        taken.append(tokens * (RANK + ROPE + made) * latents.itemsize)
        fill(heads, latents, up, linear)

    monkeypatch.setattr(mla._ExpandedHeads, "fill", counted)
    gc.disable()
    try:
        room = num_rows * 12 * BLOCK * (RANK + ROPE + NOPE + ROPE + VALUES + NOPE + VALUES) * 4  # for one head
        monkeypatch.setattr(mla, "EXPANDED_BYTES", room)
        at_once = getattr(backend, kind)(batch, attention)(0, q)
        assert max(taken) <= room
        room //= 7
        monkeypatch.setattr(mla, "EXPANDED_BYTES", room)
        taken.clear()
        in_groups = getattr(backend, kind)(batch, attention)(0, q)
    finally:
        gc.enable()
    assert torch.equal(in_groups, at_once)
    assert room // 2 < max(taken) <= room


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention\.mla=latent expands as many tokens as a step's rows have"):
        select_backend(AttentionChoice.auto, "decode", needs("latent", graphs=True))
    with pytest.raises(ConfigError, match="one form for prompts and decode"):
        select_backend(AttentionChoice.auto, "decode", needs("auto", batch_invariant=True))
    with pytest.raises(ConfigError, match=r"flash_attn cannot serve this model: .* as they are\. Others: auto, triton"):
        select_backend(AttentionChoice.flash_attn, "decode", needs("absorbed"))
