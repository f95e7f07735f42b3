"""Graphs of whole steps of rows on a CPU, which do again what they have captured, on the same static input."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_graphs import RecordingGraph, numbered
from model_shapes import SHAPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.attention.backend import AttentionBackend, AttentionStep
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.core.plan import NO_DRAFT, Admission, Growth, StepPlan
from mini_infer.kernels.sampling.draw import NUM_PARAMS
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.step_graphs import (
    BatchDescriptor,
    StepGraphs,
    batch_ladder,
    draft_grid,
    draft_ladder,
    query_ladder,
)
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.row_step import DoneRows, real_tokens
from mini_infer.runtime.worker.step_input import Samples, small_growths
from mini_infer.runtime.worker.torch_model import AttentionBackends
from mini_infer.speculative.draft_model import Drafter, DraftModel

BLOCK, SPARE_BLOCK = 4, 99
ROWS = [(2, 9, 3), (0, 4, 1), (3, 6, 2)]  # req_index, start, count


class DeviceOnly(AttentionBackend):
    """Decode attention that looks at nothing but tensors, as it must in a graph."""

    capabilities = SdpaBackend.capabilities

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        assert batch.host_seq_lens is None
        n = batch.decode_query_len
        tables = batch.block_tables.long()

        def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
            keys, values = (
                part[tables].flatten(1, 2) for part in (attention.store.keys(layer), attention.store.values(layer))
            )
            group = q.shape[1] // keys.shape[2]
            keys, values = (part.repeat_interleave(group, dim=2) for part in (keys, values))
            rows = q.unflatten(0, (-1, n))
            scores = torch.einsum("rqhd,rkhd->rhqk", rows, keys) * attention.scale
            seen = torch.arange(keys.shape[1]) <= (batch.seq_lens[:, None] - n + torch.arange(n))[..., None]
            weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
            result = torch.einsum("rhqk,rkhd->rqhd", weights, values).flatten(0, 1)
            return result if out is None else out.copy_(result)

        return step

    prefill = None  # type: ignore[assignment]


DeviceOnly.__abstractmethods__ = frozenset()


def filled_states(lookahead: int = 4) -> RequestStates:
    states = RequestStates(
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
    states.apply(plan, [np.array([0, 0, req_index, 0, 0, 0, 0], np.int32) for req_index in range(5)])
    return states


def plan_of(rows: list[tuple[int, int, int]], following: tuple[int, ...] = ()) -> StepPlan:
    req_indices, starts, counts = (list(column) for column in zip(*rows, strict=True))
    num_drafts = sum(counts) - len(rows)
    samples = [True] * len(rows)
    return StepPlan(0, req_indices, starts, counts, samples, len(rows), num_drafts=num_drafts, following=following)


def test_rows_are_built_as_any_step_is() -> None:
    states = filled_states()
    plan = plan_of(sorted(ROWS, key=lambda row: row[2]))
    sampled = Samples.of(plan)
    built = states.build(plan, sampled, np.full(len(sampled.rows), NO_DRAFT))
    states.pack_rows(plan, 4)
    rows = states.build_rows(4, query_len=4)
    real = torch.from_numpy(real_tokens([*plan.counts, 0], 4))
    for name in ("positions", "slot_mapping"):
        assert getattr(rows.batch, name)[real].tolist() == getattr(built.batch, name).tolist()
    for name in ("token_ids", "places", "sampled_positions", "param_rows"):
        assert getattr(rows, name)[real].tolist() == getattr(built, name).tolist(), name
    assert (rows.batch.slot_mapping[-4:] // BLOCK == SPARE_BLOCK).all(), "a row of padding"
    assert rows.batch.seq_lens.tolist() == [start + 4 for start in [*plan.starts, 0]]
    assert rows.batch.block_tables.shape == (4, 6), "a request of full length may have padding behind it"
    # Request 0 holds tokens 0, 1, 2, ...: the drafts behind token 4, 6 or 9 are the tokens that stand there.
    assert rows.drafts is not None
    assert rows.drafts.token_ids.view(4, 4).tolist() == [[-1] * 4, [307, -1, -1, -1], [210, 211, -1, -1], [-1] * 4]
    assert built.drafts is not None
    assert built.drafts.token_ids.tolist() == rows.drafts.token_ids[real].tolist()


def test_a_block_travels_with_its_row() -> None:
    """One a row; where there is more, all are entered before, and either way the state is the same."""
    rows = [(2, 8, 1), (0, 12, 1), (3, 6, 1)]
    grows_by_one = plan_of(rows)._replace(growths=[Growth(0, 3, [77]), Growth(2, 2, [88])])
    before, inside = filled_states(), filled_states()
    before.apply(grows_by_one)
    before.pack_rows(grows_by_one, 4)
    inside.pack_rows(grows_by_one, 4, growths=small_growths(grows_by_one))
    expected, got = before.build_rows(4, query_len=1), inside.build_rows(4, query_len=1)
    assert got.batch.slot_mapping.tolist() == expected.batch.slot_mapping.tolist() == [352, 308, 126, 396]
    assert got.batch.block_tables.tolist() == expected.batch.block_tables.tolist()
    assert torch.equal(before.rows, inside.rows)
    two_blocks = grows_by_one._replace(growths=[Growth(0, 3, [77, 78])])
    twice = grows_by_one._replace(growths=[Growth(0, 3, [77]), Growth(0, 4, [78])])
    assert small_growths(two_blocks) == small_growths(twice) == []


def test_what_no_block_is_there_for_goes_to_the_spare_one() -> None:
    states = filled_states()
    states.apply(StepPlan(0, [], [], [], [], 0, growths=[Growth(1, 5, [77])]))
    states.pack_rows(plan_of([(1, 19, 3), (2, 19, 3)]), 2)
    mapping = states.build_rows(2, query_len=3).batch.slot_mapping.view(2, 3)
    assert (mapping // BLOCK).tolist() == [[14, 77, 77], [24, SPARE_BLOCK, SPARE_BLOCK]]


def test_where_a_row_goes_on_is_known_to_the_device() -> None:
    states = filled_states()
    states.pack_rows(plan_of([(0, 4, 3), (3, 6, 3)]), 2)
    step = states.build_rows(2, query_len=3)
    states.settle(step, torch.tensor([5, 7, 8, 307, 308, 310]), None, 1000)  # of drafts 5, 6 and 307, 308
    assert states.history[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 8]
    states.pack_rows(plan_of([(0, 7, 2), (3, 9, 2)], following=(0, 1)), 2)
    rows = states.build_rows(2, query_len=2)
    assert rows.batch.positions.tolist() == [6, 7, 9, 10], "one of two drafts was accepted, and both"
    assert rows.token_ids.tolist() == [7, 8, 310, 310]
    states.pack_rows(plan_of([(0, 5, 2), (3, 9, 2)], following=(1,)), 2)
    assert states.build_rows(2, query_len=1).batch.positions.tolist() == [5, 9]


def test_a_step_of_any_rows_leaves_behind_what_rows_alone_do() -> None:
    """Rows with drafts, one without and a prompt whose end is not computed yet."""
    states, alone = filled_states(), filled_states()
    plan = StepPlan(0, [0, 3, 1], [4, 6, 0], [1, 3, 5], [True, True, False], num_decode_rows=2, num_drafts=2)
    step = states.build(plan, Samples.of(plan), np.full(4, NO_DRAFT))
    states.settle(step, torch.tensor([50, 307, 60, 61]), None, 1000)
    alone.pack_rows(plan_of([(0, 4, 1), (3, 6, 3)]), 2)
    rows = alone.build_rows(2, query_len=3)
    alone.settle(rows, torch.tensor([50, 0, 0, 307, 60, 61]), None, 1000)
    assert states.history[0, :6].tolist() == alone.history[0, :6].tolist() == [0, 1, 2, 3, 4, 50]
    assert states.history[3, 6:10].tolist() == alone.history[3, 6:10].tolist() == [306, 307, 60, 61]
    assert states._next_starts.tolist() == alone._next_starts.tolist() == [5, 0, 0, 8, 0, 0]


def test_a_draft_model_reads_two_tokens_first() -> None:
    states = filled_states()
    states.pack_rows(plan_of([(4, 9, 3)]), 2)
    first = states.build_rows(2, query_len=2, shift=-1, drafting=True)
    assert first.batch.positions.tolist() == [8, 9, 0, 0]
    assert first.sampled(torch.arange(4)).tolist() == [1, 3]
    assert first.batch.seq_lens.tolist() == [10, 1]
    second = states.build_rows(2, query_len=1, shift=1, drafting=True)
    assert second.batch.positions.tolist() == [10, 1]
    assert second.sampled_tokens is None


def test_what_is_captured() -> None:
    assert query_ladder(1) == []
    assert query_ladder(2) == [2]
    assert query_ladder(5) == [2, 3, 5]
    assert query_ladder(8) == [2, 3, 5, 8]
    assert draft_ladder(100) == [1, 2, 4, 8, 16, 32, 64, 96, 100]
    assert batch_ladder(20) == [1, 2, 4, 8, 16, 20]
    grid = draft_grid(256, 4)
    assert BatchDescriptor(256, 3) in grid
    assert BatchDescriptor(256, 5) not in grid, "too many tokens"


@pytest.mark.usefixtures("pretended_gpu")
def test_a_batch_takes_the_next_larger_graph() -> None:
    ran: list[tuple[int, int, bool]] = []

    def run(num_rows: int, query_len: int, draft_logits: Tensor | None = None, out: Tensor | None = None) -> DoneRows:
        ran.append((num_rows, query_len, out is not None))
        zeros = torch.zeros(num_rows * query_len, dtype=torch.int64)
        return DoneRows(states.build_rows(num_rows, query_len), zeros[:, None], zeros, torch.stack((zeros, zeros)))

    states = filled_states()
    graphs = StepGraphs(states, Drafter().chain, run, RecordingGraph)
    memory = GraphMemory(torch.device("cpu"))
    assert graphs.fit(1, 1) is None
    report = graphs.capture([BatchDescriptor(2), BatchDescriptor(5)], torch.zeros(5, 1), None, memory, "rows")
    assert report.batch_sizes == (2, 5)
    grid = [BatchDescriptor(rows, length) for rows in (2, 4) for length in (2, 3)]
    report = graphs.capture(grid, torch.zeros(12, 1), None, memory, "tokens of drafts")
    assert report.batch_sizes == (4, 6, 8, 12)
    assert graphs.with_drafts == tuple(sorted(grid))
    assert graphs.fit(1, 1) == BatchDescriptor(2)
    assert graphs.fit(3, 1) == BatchDescriptor(5), "rows without drafts pay for none"
    assert graphs.fit(6, 1) is None
    assert graphs.fit(1, 2) == BatchDescriptor(2, 2)
    assert graphs.fit(3, 2) == BatchDescriptor(4, 2)
    assert graphs.fit(2, 3) == BatchDescriptor(2, 3)
    assert graphs.fit(5, 2) is None
    assert graphs.fit(2, 4) is None
    ran.clear()
    with torch.inference_mode():
        assert graphs.run(BatchDescriptor(4, 3)).logits.shape == (12, 1)
        assert not ran, "replayed"
        states.pack_rows(plan_of(ROWS), 5)
        graphs.run(BatchDescriptor(5, 2))
    assert ran == [(5, 2, False)], "what was not captured runs eagerly"


@pytest.fixture(scope="module", params=["never", "always"])
def engine(request: pytest.FixtureRequest) -> LLMEngine:
    """The draft is its own target, so that nearly all drafts are right."""
    speculation = {"method": "draft", "num_tokens": 3, "adaptive": False, "draft": {"path": "tiny-draft"}}
    model = {"path": "tiny-draft", "device": "cpu", "max_model_len": 64}
    sections = {"cache": {"block_size": 8}, "scheduler": {"overlap": request.param}}
    return LLMEngine(EngineConfig.from_dict({"model": model, "speculation": speculation, **sections}))


class Captures:
    """Captures an engine's steps on a CPU, greedily, whose results no host looks at meanwhile."""

    def __init__(
        self, engine: LLMEngine, patch: pytest.MonkeyPatch, new_graph: Callable[[], Any] = RecordingGraph
    ) -> None:
        runner = engine.executor.runner
        drafter = runner._drafter
        models = [runner._model] + ([drafter._model] if isinstance(drafter, DraftModel) else [])
        graphs = StepGraphs(runner._states, drafter.chain, runner._rows.run, new_graph)
        with patch.context() as inner:
            for model in models:
                choice = dataclasses.replace(model._backends.decode, backend=DeviceOnly())  # type: ignore[attr-defined]
                inner.setattr(model, "_backends", AttentionBackends(choice, choice))
            inner.setattr(runner._sampler, "main", lambda logits, params, positions: logits.argmax(1))
            inner.setattr(runner._sampler, "_verify", lambda logits, *others: logits.argmax(1))
            memory = GraphMemory(torch.device("cpu"))
            logits = [model.new_logits(64) for model in models]  # type: ignore[attr-defined]
            graphs.capture([BatchDescriptor(rows) for rows in (1, 2, 4)], logits[0], None, memory, "rows")
            if len(models) > 1:
                grid = [BatchDescriptor(rows, length) for rows in (1, 2, 4) for length in (2, 3, 4)]
                graphs.capture(grid, logits[0], logits[1], memory, "tokens of drafts")
        self.replayed: list[BatchDescriptor] = []
        run = graphs.run

        def counted(descriptor: BatchDescriptor, draft_logits: Tensor | None = None) -> DoneRows:
            self.replayed.append(descriptor)
            return run(descriptor, draft_logits)

        patch.setattr(graphs, "run", counted)
        patch.setattr(runner, "graphs", graphs)


PROMPTS = [[40, 50, 60], [70] * 17, [90, 80]]


@pytest.mark.usefixtures("pretended_gpu")
def test_tokens_are_the_same_through_graphs_of_rows(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=0, max_tokens=14 + i, ignore_eos=True) for i in range(3)]
    expected = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params)]
    captures = Captures(engine, monkeypatch)
    engine.records.clear()
    assert [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params)] == expected
    assert {descriptor.query_len for descriptor in captures.replayed} >= {4}
    accepted, drafted = (sum(sum(getattr(r, name)) for r in engine.records) for name in ("accepted", "drafted"))
    assert accepted > 0.9 * drafted > 0


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("overlap", ["never", "always"])
def test_tokens_are_the_same_through_graphs_of_decode_steps(monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    """Blocks of two tokens: every other step a row grows. Penalties and log-probabilities are seen to beside."""
    model = {"path": "tiny-draft", "device": "cpu", "max_model_len": 64}
    sections = {"cache": {"block_size": 2}, "scheduler": {"overlap": overlap}}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, **sections}))
    params = [
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, frequency_penalty=1.0),
    ]

    def completions() -> list[tuple]:
        outputs = [output.outputs[0] for output in engine.generate(PROMPTS, params)]
        return [(o.token_ids, [entry.token_id for entry in o.logprobs or []]) for o in outputs]

    expected = completions()
    captures = Captures(engine, monkeypatch)
    assert completions() == expected
    assert {descriptor.num_rows for descriptor in captures.replayed} >= {1, 4}
    assert len(captures.replayed) >= 13


class Made(TorchDispatchMode):
    """Notes the memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[weakref.ref[torch.UntypedStorage], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._made.append((weakref.ref(tensor.untyped_storage()), tensor.dtype))
        return result

    def kept(self) -> list[torch.dtype]:
        """Of what is alive."""
        return [dtype for storage, dtype in self._made if storage() is not None]

    def __len__(self) -> int:
        return len(self._made)


@pytest.mark.usefixtures("pretended_gpu")
def test_captured_steps_keep_nothing_that_the_model_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a size keeps is no room for smaller ones."""
    model = {"load_format": "dummy", "hf_config": SHAPES["qwen2_moe"], "device": "cpu", "max_model_len": 64}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "cache": {"num_blocks": 8}}))
    with Made() as made:
        Captures(engine, monkeypatch, numbered([]))
    assert len(made) > 1000
    assert sum(dtype.is_floating_point for dtype in made.kept()) == 1, "the logits, which all sizes share"
