"""The kernels before and after a step with drafts against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_infer.core.plan import NO_DRAFT
from mini_infer.core.request import SamplingParams
from mini_infer.kernels.draw import encode
from mini_infer.speculative import draft_rows as definition
from mini_infer.speculative.draft_rows import GatheredRows

draft_rows = pytest.importorskip("mini_infer.kernels.draft_rows")

SLOTS, HISTORY, TABLE, BLOCK, VOCAB = 6, 41, 1030, 4, 50  # a table of more than one tile


def make_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(temperature=0, seed=1),
        SamplingParams(temperature=0),
    ]
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.cat(
            (
                torch.randint(VOCAB, (HISTORY,), generator=generator, dtype=torch.int32),
                torch.randint(100, (TABLE,), generator=generator, dtype=torch.int32),
                torch.from_numpy(encode(own, 17 + slot, VOCAB)),
            )
        )
        for slot, own in enumerate(params)
    ]
    return torch.stack(rows).to(device), torch.tensor([9, 0, 30, 12, 7, 1], dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("query_len", "shift", "drafting"), [(1, 2, True), (2, -1, True), (4, 0, False), (5, 0, False)]
)
def test_gathered_as_defined(device: torch.device, query_len: int, shift: int, drafting: bool) -> None:
    state, next_starts = make_state(device)
    packed = torch.tensor([[3, 1, 5, 0, 2], [8, -1, 0, -1, 20], [1, 2, 0, 4, 3]], dtype=torch.int32).to(device)
    layout = {"shift": shift, "drafting": drafting, "table": HISTORY, "params": HISTORY + TABLE, "block_size": BLOCK}
    expected = definition.gather_rows(state.cpu(), next_starts.cpu(), packed.cpu(), query_len, **layout)
    got = GatheredRows(*draft_rows.gather_rows(state, next_starts, packed, query_len, **layout))
    for name, wanted in expected._asdict().items():
        if not (drafting and name in ("drafts", "sources")):  # nothing is verified there
            assert getattr(got, name).tolist() == wanted.tolist(), name


@pytest.mark.parametrize("rate", [None, 0.0, 0.6, 1.0])
@pytest.mark.parametrize("query_len", [2, 5])
def test_settled_as_defined(device: torch.device, rate: float | None, query_len: int) -> None:
    state, next_starts = make_state(device)
    packed = torch.tensor([[3, 1, 0, 2, 4], [8, 2, 0, -1, 20], [2, 1, 5, 4, 5]], dtype=torch.int32).to(device)
    packed[2].clamp_(max=query_len)
    layout = {"shift": 0, "drafting": False, "table": HISTORY, "params": HISTORY + TABLE, "block_size": BLOCK}
    rows = GatheredRows(*draft_rows.gather_rows(state, next_starts, packed, query_len, **layout))
    picked = torch.where(rows.drafts == NO_DRAFT, 7, rows.drafts)
    picked[1::3] = 49
    results = []
    for settle, where in ((definition.settle_rows, "cpu"), (draft_rows.settle_rows, device)):
        own, starts, tokens = state.to(where, copy=True), next_starts.to(where, copy=True), picked.to(where, copy=True)
        some = [getattr(rows, name).to(where) for name in ("param_rows", "places", "sampled_positions", "drafts")]
        settle(own, starts, packed.to(where), *some, tokens, rate, VOCAB)
        results.append((own.tolist(), starts.tolist(), tokens.tolist()))
    assert results[0] == results[1]
    accepted = np.array(results[0][1])[[3, 1, 0, 2, 4]] - (rows.sampled_positions.view(5, -1)[:, 0].cpu().numpy())
    assert (accepted >= 0).all()
    assert (accepted < packed[2].cpu().numpy()).all()
    if rate == 1.0:
        assert accepted.tolist() == (packed[2] - 1).tolist()
    if rate == 0.0:
        assert not accepted.any()
