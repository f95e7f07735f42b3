"""The kernels before and after a step of rows against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_infer.core.plan import NO_DRAFT
from mini_infer.core.request import SamplingParams
from mini_infer.kernels import rows as definition
from mini_infer.kernels.rows import GatheredRows
from mini_infer.kernels.sampling.draw import encode

row_kernels = pytest.importorskip("mini_infer.kernels.row_kernels")

HISTORY, TABLE, BLOCK, VOCAB = 41, 1030, 4, 50  # a table of more than one tile
PARAMS = HISTORY + TABLE
OWNERS = [3, 1, 5, 0, 2]


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
                torch.from_numpy(encode(own, 17 + number, VOCAB)),
            )
        )
        for number, own in enumerate(params)
    ]
    return torch.stack(rows).to(device), torch.tensor([9, 0, 30, 12, 7, 1], dtype=torch.int32, device=device)


def packed_rows(counts: list[int], device: torch.device) -> torch.Tensor:
    """Rows of which two grow: one where a token of this step lies, one in the second tile."""
    starts, grown, blocks = [8, -1, 0, -1, 20], [-1, 0, 1028, -1, 5], [7, 501, 502, 7, 503]
    return torch.tensor([OWNERS, starts, counts, grown, blocks], dtype=torch.int32).to(device)


@pytest.mark.parametrize(
    ("query_len", "shift", "drafting"),
    [(1, 2, True), (2, -1, True), (1, 0, False), (2, 0, False), (4, 0, False), (5, 0, False), (9, 0, False)],
)
def test_gathered_as_defined(device: torch.device, query_len: int, shift: int, drafting: bool) -> None:
    state, next_starts = make_state(device)
    packed = packed_rows([min(count, query_len) for count in (1, 2, 0, 4, 3)], device)
    layout = {"shift": shift, "drafting": drafting, "table": HISTORY, "params": PARAMS, "block_size": BLOCK}
    before = state.cpu().clone()
    expected_state = before.clone()
    expected = definition.gather_rows(expected_state, next_starts.cpu(), packed.cpu(), query_len, **layout)
    got = GatheredRows(*row_kernels.gather_rows(state, next_starts, packed, query_len, **layout))
    for name, wanted in expected._asdict().items():
        if not (drafting and name in ("drafts", "sources")):  # nothing is verified there
            assert getattr(got, name).tolist() == wanted.tolist(), name
            assert getattr(got, name).dtype == wanted.dtype, name
    assert torch.equal(state.cpu(), expected_state)
    changed = (expected_state != before).nonzero().tolist()
    assert changed == [[1, HISTORY], [2, HISTORY + 5], [5, HISTORY + 1028]], "the grown blocks, and nothing else"
    assert got.block_tables[1, 0] == 501
    if not shift:
        assert got.slot_mapping[query_len] == 501 * BLOCK, "row 1 goes on at 0, in the block that it has just got"


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 37), (9, 1500)])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_a_decode_step_of_any_shape(device: torch.device, rows: int, width: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    table = width * block_size + 1
    params = table + width
    state = torch.randint(1000, (rows + 3, params + 7), dtype=torch.int32, generator=generator)
    starts = torch.randint(0, width * block_size, (rows,), generator=generator)
    grown = torch.where(torch.arange(rows) % 2 == 0, starts // block_size, -1)
    blocks = torch.randint(1000, (rows,), generator=generator)
    owners = torch.randperm(rows + 3, generator=generator)[:rows]
    packed = torch.stack((owners, starts, torch.ones_like(starts), grown, blocks)).int()
    layout = {"shift": 0, "drafting": False, "table": table, "params": params, "block_size": block_size}
    next_starts = torch.zeros(rows + 3, dtype=torch.int32)
    own = state.to(device)
    expected = definition.gather_rows(state, next_starts, packed, 1, **layout)
    got = GatheredRows(*row_kernels.gather_rows(own, next_starts.to(device), packed.to(device), 1, **layout))
    for name, wanted in expected._asdict().items():
        assert torch.equal(getattr(got, name).cpu(), wanted), name
    assert torch.equal(own.cpu(), state)
    assert (got.drafts == NO_DRAFT).all()


@pytest.mark.parametrize("rate", [None, 0.0, 0.6, 1.0])
@pytest.mark.parametrize("counts", [[2, 1, 2, 2, 1], [2, 1, 5, 4, 5], [1, 1, 1, 1, 1], [1, 9, 2, 1, 3]])
@pytest.mark.parametrize("padded", [True, False])
def test_settled_as_defined(device: torch.device, rate: float | None, counts: list[int], padded: bool) -> None:
    """Rows of as many tokens each, some of them padding, or of as many as they have drafts for."""
    state, next_starts = make_state(device)
    generator = torch.Generator().manual_seed(sum(counts))
    most = max(counts)
    widths = torch.tensor([most] * 5 if padded else counts)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), widths.cumsum(0)))
    row = torch.repeat_interleave(torch.arange(5), widths)
    place = torch.arange(len(row)) - starts[row]
    positions = torch.tensor([8, 0, 21, 12, 20])[row] + place + 1
    has_draft = place < torch.tensor(counts)[row] - 1
    drafts = torch.randint(VOCAB, (len(row),), generator=generator).where(has_draft, NO_DRAFT)
    picked = torch.where(drafts == NO_DRAFT, 7, drafts)
    picked[1::3] = 49
    results = []
    for settle, where in ((definition.settle_rows, torch.device("cpu")), (row_kernels.settle_rows, device)):
        own, ends, tokens = state.to(where, copy=True), next_starts.to(where, copy=True), picked.to(where, copy=True)
        owners = torch.tensor(OWNERS, dtype=torch.int32, device=where)
        stands = None if most == 1 else drafts.to(where)
        arguments = {"most": most, "params": PARAMS, "rate": rate, "vocab_size": VOCAB}
        settle(own, ends, owners, starts.int().to(where), positions.to(where), stands, tokens, **arguments)
        results.append((own.tolist(), ends.tolist(), tokens.tolist()))
    assert results[0] == results[1]
    accepted = np.array(results[0][1])[OWNERS] - positions[starts[:-1]].numpy()
    assert (accepted >= 0).all()
    assert (accepted < np.array(counts)).all()
    if rate == 1.0:
        assert accepted.tolist() == [count - 1 for count in counts]
    if rate == 0.0:
        assert not accepted.any()
