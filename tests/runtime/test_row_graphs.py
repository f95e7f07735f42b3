"""Graphs of rows on a CPU, which do again what they have captured, on the same static input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fake_graphs import RecordingGraph
from torch import Tensor

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.attention.backend import AttentionBackend, AttentionStep
from mini_infer.attention.context import AttentionBatch
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.plan import Admission, Growth, StepPlan
from mini_infer.kernels.draw import NUM_PARAMS
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.decode_graphs import BatchDescriptor
from mini_infer.runtime.graphs.row_graphs import RowGraphs, VerifiedRows, query_ladder, row_grid, row_ladder
from mini_infer.runtime.worker.request_states import RequestStates, Samples
from mini_infer.runtime.worker.torch_model import AttentionBackends
from mini_infer.speculative.drafter import NoDrafter

BLOCK, SPARE_BLOCK = 4, 99
ROWS = [(2, 9, 3), (0, 4, 1), (3, 6, 2)]  # slot, start, count


class DeviceOnly(AttentionBackend):
    """Decode attention that looks at nothing but tensors, as it must in a graph."""

    capabilities = SdpaBackend.capabilities

    def decode(
        self, batch: AttentionBatch, kv_store: KVStore, windows: Sequence[int | None], scale: float
    ) -> AttentionStep:
        assert batch.host_seq_lens is None
        n = batch.decode_query_len
        tables = batch.block_tables.long()

        def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
            keys, values = (part[tables].flatten(1, 2) for part in (kv_store.keys(layer), kv_store.values(layer)))
            group = q.shape[1] // keys.shape[2]
            keys, values = (part.repeat_interleave(group, dim=2) for part in (keys, values))
            rows = q.unflatten(0, (-1, n))
            scores = torch.einsum("rqhd,rkhd->rhqk", rows, keys) * scale
            seen = torch.arange(keys.shape[1]) <= (batch.seq_lens[:, None] - n + torch.arange(n))[..., None]
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
            result = torch.einsum("rhqk,rkhd->rqhd", weights, values).flatten(0, 1)
            return result if out is None else out.copy_(result)

        return step

    prefill = None  # type: ignore[assignment]


DeviceOnly.__abstractmethods__ = frozenset()


def filled_slots(lookahead: int = 4) -> RequestStates:
    req_indices = RequestStates(
        5, 20, BLOCK, NUM_PARAMS, torch.device("cpu"), padding_block=SPARE_BLOCK, lookahead=lookahead
    )
    tables = [[10 * req_index + i for i in range(5)] for req_index in range(5)]
    admissions = [
        Admission(
            req_index,
            "",
            list(range(100 * req_index, 100 * req_index + 20)),
            5,
            tables[req_index],
            SamplingParams(),
            0,
            frozenset(),
        )
        for req_index in range(5)
    ]
    plan = StepPlan(0, [], [], [], [], 0, admissions=admissions)
    req_indices.apply(plan, [np.array([0, 0, req_index, 0, 0, 0, 0], np.int32) for req_index in range(5)])
    return req_indices


def plan_of(rows: list[tuple[int, int, int]], following: tuple[int, ...] = ()) -> StepPlan:
    req_indices, starts, counts = (list(column) for column in zip(*rows, strict=True))
    num_drafts = sum(counts) - len(rows)
    samples = [True] * len(rows)
    return StepPlan(0, req_indices, starts, counts, samples, len(rows), num_drafts=num_drafts, following=following)


def test_rows_are_built_as_any_step_is() -> None:
    req_indices = filled_slots()
    plan = plan_of(sorted(ROWS, key=lambda row: row[2]))
    built = req_indices.build(plan, Samples.of(plan))
    req_indices.pack_rows(plan, 4)
    rows = req_indices.build_rows(4, query_len=4)
    real = torch.tensor([place < count for count in [*plan.counts, 0] for place in range(4)])
    for name in ("positions", "slot_mapping"):
        assert getattr(rows.step.batch, name)[real].tolist() == getattr(built.batch, name).tolist()
    assert rows.step.token_ids[real].tolist() == built.token_ids.tolist()
    assert rows.step.places[real].tolist() == built.places.tolist()
    assert rows.step.sampled_positions[real].tolist() == built.sampled_positions.tolist()
    assert rows.step.param_rows[real].tolist() == built.param_rows.tolist()
    assert (rows.step.batch.slot_mapping[-4:] // BLOCK == SPARE_BLOCK).all(), "a row of padding"
    assert rows.step.batch.seq_lens.tolist() == [start + 4 for start in [*plan.starts, 0]]
    assert rows.step.batch.block_tables.shape == (4, 6), "a request of full length may have padding behind it"
    # Slot 0 holds tokens 0, 1, 2, ...: the drafts behind token 4, 6 or 9 are the tokens that stand there.
    assert rows.rows.drafts.view(4, 4).tolist() == [[-1] * 4, [307, -1, -1, -1], [210, 211, -1, -1], [-1] * 4]


def test_what_no_block_is_there_for_goes_to_the_spare_one() -> None:
    req_indices = filled_slots()
    req_indices.apply(StepPlan(0, [], [], [], [], 0, growths=[Growth(1, 5, [77])]), [])
    req_indices.pack_rows(plan_of([(1, 19, 3), (2, 19, 3)]), 2)
    mapping = req_indices.build_rows(2, query_len=3).step.batch.slot_mapping.view(2, 3)
    assert (mapping // BLOCK).tolist() == [[14, 77, 77], [24, SPARE_BLOCK, SPARE_BLOCK]]


def test_where_a_row_goes_on_is_known_to_the_device() -> None:
    req_indices = filled_slots()
    req_indices.pack_rows(plan_of([(0, 4, 3), (3, 6, 3)]), 2)
    built = req_indices.build_rows(2, query_len=3)
    req_indices.settle(built, torch.tensor([5, 7, 8, 307, 308, 310]), None, 1000)  # of drafts 5, 6 and 307, 308
    assert req_indices.history[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 8]
    req_indices.pack_rows(plan_of([(0, 7, 2), (3, 9, 2)], following=(0, 1)), 2)
    rows = req_indices.build_rows(2, query_len=2)
    assert rows.step.batch.positions.tolist() == [6, 7, 9, 10], "one of two drafts was accepted, and both"
    assert rows.step.token_ids.tolist() == [7, 8, 310, 310]
    req_indices.pack_rows(plan_of([(0, 5, 2), (3, 9, 2)], following=(1,)), 2)
    assert req_indices.build_rows(2, query_len=1).step.batch.positions.tolist() == [5, 9]


def test_a_draft_model_reads_two_tokens_first() -> None:
    req_indices = filled_slots()
    req_indices.pack_rows(plan_of([(4, 9, 3)]), 2)
    first = req_indices.build_rows(2, query_len=2, shift=-1, drafting=True).step
    assert first.batch.positions.tolist() == [8, 9, 0, 0]
    assert first.sampled(torch.arange(4)).tolist() == [1, 3]
    assert first.batch.seq_lens.tolist() == [10, 1]
    second = req_indices.build_rows(2, query_len=1, shift=1, drafting=True).step
    assert second.batch.positions.tolist() == [10, 1]
    assert second.sampled_tokens is None


def test_what_is_captured() -> None:
    assert query_ladder(1) == []
    assert query_ladder(2) == [2]
    assert query_ladder(5) == [2, 3, 5]
    assert query_ladder(8) == [2, 3, 5, 8]
    assert row_ladder(100) == [1, 2, 4, 8, 16, 32, 64, 96, 100]
    grid = row_grid(256, 4)
    assert BatchDescriptor(256, 3) in grid
    assert BatchDescriptor(256, 5) not in grid, "too many tokens"


@pytest.mark.usefixtures("pretended_gpu")
def test_a_batch_takes_the_next_larger_graph() -> None:
    ran: list[tuple[int, int, bool]] = []

    def verify(num_rows: int, query_len: int, draft_logits: Tensor | None, out: Tensor | None = None) -> VerifiedRows:
        ran.append((num_rows, query_len, out is not None))
        zeros = torch.zeros(num_rows * query_len, dtype=torch.int64)
        return VerifiedRows(
            req_indices.build_rows(num_rows, query_len), zeros[:, None], zeros, torch.stack((zeros, zeros))
        )

    req_indices = filled_slots()
    graphs = RowGraphs(req_indices, NoDrafter().chain, verify, RecordingGraph)
    grid = [BatchDescriptor(rows, length) for rows in (2, 4) for length in (2, 3)]
    report = graphs.capture(grid, lambda rows: torch.zeros(rows, 1), None, GraphMemory(torch.device("cpu")))
    assert report.batch_sizes == (4, 6, 8, 12)
    assert graphs.captured == tuple(sorted(grid))
    assert graphs.fit(1, 2) == BatchDescriptor(2, 2)
    assert graphs.fit(3, 2) == BatchDescriptor(4, 2)
    assert graphs.fit(2, 3) == BatchDescriptor(2, 3)
    assert graphs.fit(5, 2) is None
    assert graphs.fit(2, 4) is None
    ran.clear()
    with torch.inference_mode():
        assert graphs.verify(BatchDescriptor(4, 3), None).logits.shape == (12, 1)
        assert not ran, "replayed"
        req_indices.pack_rows(plan_of(ROWS), 5)
        graphs.verify(BatchDescriptor(5, 2), None)
    assert ran == [(5, 2, False)], "what was not captured runs eagerly"


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """The draft is its own target, so that nearly all drafts are right."""
    speculation = {"method": "draft", "num_tokens": 3, "adaptive": False, "draft": {"path": "tiny-draft"}}
    model = {"path": "tiny-draft", "device": "cpu", "max_model_len": 64}
    return LLMEngine(EngineConfig.from_dict({"model": model, "speculation": speculation, "cache": {"block_size": 8}}))


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_the_same_through_graphs_of_rows(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Greedily, whose results no host looks at while they are captured; rows of a seed take the way without graphs."""
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=14 + i, ignore_eos=True) for i in range(3)]
    prompts = [[40, 50, 60], [70] * 17, [90, 80]]
    expected = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
    steps = engine.executor.runner._drafts
    draft_model = steps._drafter._model
    graphs = RowGraphs(steps._states, steps._drafter.chain, steps.verify, RecordingGraph)
    with monkeypatch.context() as patch:
        for model in (steps._model, draft_model):
            choice = dataclasses.replace(model._backends.decode, backend=DeviceOnly())
            patch.setattr(model, "_backends", AttentionBackends(choice, choice))
        patch.setattr(steps._sampler, "_main", lambda logits, params, positions: logits.argmax(1))
        patch.setattr(steps._sampler, "_verify", lambda logits, *others: logits.argmax(1))
        grid = [BatchDescriptor(rows, length) for rows in (1, 2, 4) for length in (2, 3, 4)]
        new_logits = steps._model.new_logits, draft_model.new_logits
        graphs.capture(grid, *new_logits, GraphMemory(torch.device("cpu")))
    if temperature:
        graphs._pairs.clear()
    monkeypatch.setattr(steps, "graphs", graphs)
    engine.records.clear()
    assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == expected
    accepted, drafted = (sum(sum(getattr(r, name)) for r in engine.records) for name in ("accepted", "drafted"))
    assert accepted > (0.2 if temperature else 0.9) * drafted > 0
