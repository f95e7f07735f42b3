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
from mini_infer.attention.backend import AttentionBackend, AttentionStep, PagedKV
from mini_infer.attention.context import AttentionBatch
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.runtime.capture import GraphMemory
from mini_infer.runtime.graphs import BatchDescriptor
from mini_infer.runtime.row_graphs import RowGraphs, descriptors, fits, query_ladder
from mini_infer.runtime.slots import Samples, SlotState
from mini_infer.runtime.torch_model import AttentionBackends, TorchModel

BLOCK, SPARE_BLOCK = 4, 99
ROWS = [(2, 9, 3), (0, 4, 1), (3, 6, 2)]  # slot, start, count


class DeviceOnly(AttentionBackend):
    """Decode attention that looks at nothing but tensors, as it must in a graph."""

    capabilities = SdpaBackend.capabilities

    def decode(
        self, batch: AttentionBatch, kv_store: PagedKV, windows: Sequence[int | None], scale: float
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


def filled_slots(lookahead: int = 4) -> SlotState:
    slots = SlotState(5, 20, BLOCK, 2, torch.device("cpu"), spare_block=SPARE_BLOCK, lookahead=lookahead)
    tables = [[10 * slot + i for i in range(5)] for slot in range(5)]
    admissions = [
        Admission(slot, "", list(range(100 * slot, 100 * slot + 20)), 5, tables[slot], SamplingParams(), 0, frozenset())
        for slot in range(5)
    ]
    plan = StepPlan(0, [], [], [], [], 0, admissions=admissions)
    slots.apply(plan, [np.array([slot, 7], np.int32) for slot in range(5)])
    return slots


def plan_of(rows: list[tuple[int, int, int]]) -> StepPlan:
    slots, starts, counts = (list(column) for column in zip(*rows, strict=True))
    return StepPlan(
        0, slots, starts, counts, [True] * len(rows), num_decode_rows=len(rows), num_drafts=sum(counts) - len(rows)
    )


def test_rows_are_built_as_any_step_is() -> None:
    slots = filled_slots()
    plan = plan_of(sorted(ROWS, key=lambda row: row[2]))
    built = slots.build(plan, Samples.of(plan))
    packed = torch.tensor([plan.slots, plan.starts, plan.counts], dtype=torch.int32)
    rows = slots.build_rows(packed, query_len=4)
    real = torch.tensor([place < count for count in plan.counts for place in range(4)])
    for name in ("positions", "slot_mapping"):
        assert getattr(rows.batch, name)[real].tolist() == getattr(built.batch, name).tolist()
    assert rows.token_ids[real].tolist() == built.token_ids.tolist()
    assert rows.places[real].tolist() == built.places.tolist()
    assert rows.sampled_positions[real].tolist() == built.sampled_positions.tolist()
    assert rows.param_rows[real].tolist() == built.param_rows.tolist()
    assert (rows.batch.slot_mapping[~real] // BLOCK == SPARE_BLOCK).all()
    assert rows.batch.seq_lens.tolist() == [start + 4 for start in plan.starts]
    assert rows.batch.block_tables.shape == (3, 6), "a request of full length may have padding behind it"


@pytest.mark.usefixtures("pretended_gpu")
def test_a_forward_gives_the_real_tokens_in_order() -> None:
    slots = filled_slots()
    graphs = RowGraphs(slots, lambda step: step.token_ids[:, None] * 1, descriptors([2, 4], [2, 3]), RecordingGraph)
    report = graphs.capture(GraphMemory(torch.device("cpu")))
    assert report.batch_sizes == (4, 6, 8, 12)
    found = graphs.forward(plan_of(ROWS))
    assert found is not None
    assert found[:, 0].tolist() == [209, 210, 211, 4, 306, 307]
    whole = graphs.forward(plan_of([(1, 0, 2), (4, 3, 2)]))
    assert whole is not None
    assert whole[:, 0].tolist() == [100, 101, 403, 404]
    assert graphs.forward(plan_of([(2, 9, 4)])) is None, "more tokens than any graph has"
    assert graphs.forward(plan_of([(slot, 2, 2) for slot in range(5)])) is None, "more rows"


def test_what_is_captured() -> None:
    assert query_ladder(1) == []
    assert query_ladder(2) == [2]
    assert query_ladder(5) == [2, 3, 5]
    assert query_ladder(8) == [2, 3, 5, 8]
    assert BatchDescriptor(256, 5) not in descriptors([1, 256], [5])
    assert fits(BatchDescriptor(4, 2), 3, 2)
    assert not fits(BatchDescriptor(4, 2), 3, 1), "a step of one token a row is not computed as one of two"


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """The draft is its own target, so that nearly all drafts are right."""
    speculation = {"method": "draft", "num_tokens": 3, "adaptive": False, "draft": {"path": "tiny-draft"}}
    model = {"path": "tiny-draft", "device": "cpu", "max_model_len": 64}
    return LLMEngine(EngineConfig.from_dict({"model": model, "speculation": speculation, "cache": {"block_size": 8}}))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_the_same_through_graphs_of_rows(
    engine: LLMEngine, pretended_gpu: object, temperature: float
) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=14 + i, ignore_eos=True) for i in range(3)]
    prompts = [[40, 50, 60], [70] * 17, [90, 80]]
    expected = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
    runner = engine._parts.runner
    drafter = runner._drafter
    eager = runner._row_graphs, drafter._graphs
    runner._row_graphs = capture(runner._slots, runner._model, [2, 3, 4])
    drafter._graphs = capture(runner._slots, drafter._model, [1, 2])
    assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == expected
    runner._row_graphs, drafter._graphs = eager
    accepted, drafted = (sum(sum(getattr(r, name)) for r in engine.records) for name in ("accepted", "drafted"))
    assert accepted > 0.9 * drafted > 0


def capture(slots: SlotState, model: TorchModel, query_lens: list[int]) -> RowGraphs:
    choice = dataclasses.replace(model._backends.decode, backend=DeviceOnly())

    def forward(step):
        usual, model._backends = model._backends, AttentionBackends(choice, choice)
        hidden = model.forward_eagerly(step)
        model._backends = usual
        return hidden

    graphs = RowGraphs(slots, forward, descriptors([1, 2, 4], query_lens), RecordingGraph)
    graphs.capture(GraphMemory(torch.device("cpu")))
    return graphs
