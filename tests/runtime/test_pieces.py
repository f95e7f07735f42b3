"""Piecewise CUDA graphs on a CPU: what is captured and when, with graphs that record operations and repeat them."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fake_graphs import RecordingGraph, numbered
from torch import Tensor

from experiments.lab.judge.logit_gate import probe_logits
from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.attention.backend import AttentionBackend, AttentionStep
from mini_infer.attention.context import AttentionBatch, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.modeling.loader import load_spec
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.mixed import MixedAttention
from mini_infer.runtime.graphs.pieces import PiecewiseGraphs, graph_bytes, token_ladder
from mini_infer.runtime.worker.step_input import Samples

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def test_sizes_are_steps_of_64_as_far_as_a_step_goes() -> None:
    assert token_ladder(256, 8192) == [64, 128, 192, 256]
    assert token_ladder(1024, 100) == [64, 128], "no step has more than 100 tokens"
    assert token_ladder(64, 1) == [64]
    assert token_ladder(100, 8192) == [64, 128], "as asked for, and a little more"
    assert token_ladder(0, 8192) == []
    assert token_ladder(2048, 8192)[-2:] == [1984, 2048]
    assert token_ladder(2049, 8192)[-2:] == [2048, 2304], "beyond, in steps of 256"
    assert token_ladder(8192, 8192)[-2:] == [7936, 8192]
    assert len(token_ladder(8192, 8192)) == 32 + 24


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (-64, "graphs.max_prefill_tokens must be at least 0"),
        (1.5, "graphs.max_prefill_tokens must be int"),
    ],
)
def test_impossible_settings_are_refused(tokens: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict({"graphs": {"max_prefill_tokens": tokens}})


def test_memory_that_is_kept_for_graphs_grows_with_them() -> None:
    spec = load_spec(EngineConfig.from_dict({"model": {"load_format": "dummy", "hf_config": SHAPE}}).model)
    one, two = (graph_bytes(spec, torch.bfloat16, token_ladder(largest, 8192)) for largest in (64, 128))
    assert graph_bytes(spec, torch.bfloat16, []) == 0
    assert one < two
    assert two - one > 5 * 2**18, "three layers are cut into four graphs, and have one of all"


def make(**sections: dict[str, Any]) -> LLMEngine:
    model = {"load_format": "dummy", "hf_config": SHAPE, "device": "cpu", "tokenizer": None}
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 129} | sections.pop("scheduler", {})
    return LLMEngine(EngineConfig.from_dict({"model": model, "scheduler": scheduler, **sections}))


class MaskedBackend(AttentionBackend):
    """What a captured kernel does, in operations whose shapes do not depend on lengths: rows without tokens are left
    as they are, and so is what stands between the rows."""

    capabilities = dataclasses.replace(SdpaBackend.capabilities, graph_safe=True)
    mixed_graphs = ("prefill", "decode")

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        rows = batch.decode_rows()
        return partial(self._attend, attention, rows.block_tables, rows.seq_lens[:, None] - 1, rows.seq_lens > 0)

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        tables, starts, lens = batch.prefill_rows()
        tokens = torch.arange(batch.num_tokens, dtype=starts.dtype)

        def step(layer: int, q: Tensor, out: Tensor) -> Tensor:
            owner = (tokens[:, None] >= starts[1:]).sum(1)
            own = owner.clamp(max=len(lens) - 1)
            places = (lens[own] - starts[1:][own] + tokens)[:, None]
            there = (tokens >= starts[0]) & (owner < len(lens))
            return self._attend(attention, tables[own], places, there, layer, q, out)

        return step

    def _attend(
        self,
        attention: ModelAttention,
        tables: Tensor,
        places: Tensor,
        there: Tensor,
        layer: int,
        q: Tensor,
        out: Tensor,
    ) -> Tensor:
        keys, values = (plane(layer)[tables].flatten(1, 2) for plane in (attention.store.keys, attention.store.values))
        group = q.shape[1] // keys.shape[2]
        keys, values = (part.repeat_interleave(group, 2) for part in (keys, values))
        scores = torch.einsum("thd,tkhd->thk", q, keys) * attention.scale
        hidden = torch.arange(keys.shape[1]) > places
        weights = scores.masked_fill(hidden[:, None], -1e30).softmax(-1)
        return out.copy_(torch.where(there[:, None, None], torch.einsum("thk,tkhd->thd", weights, values), out))


def with_pieces(engine: LLMEngine, sizes: list[int], mixed: bool = False) -> PiecewiseGraphs:
    """Puts recorded graphs where a GPU's would be; `mixed`: of whole steps too."""
    model = engine.executor.runner._model
    limits = engine.config.scheduler.max_num_seqs, engine.max_model_len
    attention = MixedAttention(model._attention, MaskedBackend(), MaskedBackend(), *limits) if mixed else None
    pieces = PiecewiseGraphs(model._model, model.store, sizes, RecordingGraph, attention)
    with torch.inference_mode():
        for size in sizes[::-1]:
            pieces._pieces[size] = pieces.capture_size(size)
    model._pieces[False] = pieces
    return pieces


@pytest.fixture(scope="module")
def eager() -> Iterator[LLMEngine]:
    engine = make()
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["pieces", "whole"])
def captured(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine = make()
    with_pieces(engine, [64, 128], mixed=request.param == "whole")
    yield engine
    engine.close()


# Of a budget of 129: less than a size, a size, a token more, the largest, a token more, and with chunks to follow.
@pytest.mark.parametrize("split", [1, 63, 64, 65, 128, 129, 300])
def test_pieces_give_the_logits_of_an_eager_step(eager: LLMEngine, captured: LLMEngine, split: int) -> None:
    ids = torch.randint(0, 301, (split + 3,), generator=torch.Generator().manual_seed(split)).tolist()
    expected, found = probe_logits(eager, ids, split), probe_logits(captured, ids, split)
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-5


def test_mixed_steps_give_the_tokens_of_eager_ones(eager: LLMEngine, captured: LLMEngine) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (20,), generator=generator).tolist()
    prompts = [torch.randint(0, 301, (length,), generator=generator).tolist() for length in lengths]
    params = [SamplingParams(temperature=0, max_tokens=4 + i % 20, ignore_eos=True) for i in range(20)]
    expected, found = ([out.outputs[0].token_ids for out in e.generate(prompts, params)] for e in (eager, captured))
    assert found == expected
    assert captured.scheduler.usage().used_blocks == 0


def test_whole_steps_are_those_of_few_prompts_and_no_drafts() -> None:
    engine = make(cache={"prefix_caching": False}, speculation={"method": "ngram", "num_tokens": 2})
    pieces = with_pieces(engine, [64, 128], mixed=True)
    take, taken = pieces._mixed.take, []

    def noted(batch: AttentionBatch) -> bool:
        prompts = batch.num_rows - batch.num_decode_rows
        taken.append((take(batch), prompts <= 4, batch.decode_query_len == 1))
        return taken[-1][0]

    pieces._mixed.take = noted
    engine.generate([[7, 8, 9] * 5] * 8, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert {whole == (few and plain) for whole, few, plain in taken} == {True}
    assert {whole for whole, _, _ in taken} == {True, False}
    engine.close()


@pytest.mark.parametrize("mixed", [False, True])
def test_padding_writes_to_the_spare_block_alone(mixed: bool) -> None:
    engine = make(cache={"num_blocks": 40, "prefix_caching": False})
    with_pieces(engine, [64], mixed)
    store = engine.executor.runner._model.store
    store.tensors[0].fill_(7.0)
    engine.generate([[5] * 40], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    touched = (store.tensors[0] != 7.0).flatten(3).any(-1)[0, 0]  # [blocks, block_size * ...] -> blocks
    assert touched.sum() == 3 + 1, "a prompt of 40 tokens, in blocks of 16, and the spare block"
    assert touched[-1]


def test_a_graph_that_was_not_captured_is_passed_over(eager: LLMEngine) -> None:
    engine = make()
    pieces = with_pieces(engine, [64, 128])
    del pieces._pieces[64]
    replayed = []
    replay = RecordingGraph.replay
    for graph, _ in pieces._pieces[128].before:
        graph.replay = lambda graph=graph: (replayed.append(128), replay(graph))  # type: ignore[method-assign, misc]
    ids = list(range(40))
    torch.testing.assert_close(probe_logits(engine, ids, 40), probe_logits(eager, ids, 40), rtol=1e-4, atol=1e-4)
    assert replayed == [128] * 3


def test_a_forward_that_fails_leaves_no_graphs() -> None:
    engine = make()
    pieces = with_pieces(engine, [64])
    log: list[str] = []
    pieces._new_graph = numbered(log)
    model = engine.executor.runner._model._model
    model.layers[1].mlp.forward = _fail
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError, match="layer 1"):
        pieces.capture_size(64, "pool")
    assert log == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]


@pytest.mark.usefixtures("pretended_gpu")
def test_a_size_whose_first_launch_finds_no_memory_is_not_used(eager: LLMEngine) -> None:
    engine = make()
    pieces = with_pieces(engine, [64, 128])
    made: list[RecordingGraph] = []

    def replay(graph: RecordingGraph) -> None:
        if made.index(graph) == 5:  # the second of the smaller size, which is captured after the larger's four
            raise RuntimeError("CUDA error: out of memory")
        RecordingGraph.replay(graph)

    def new_graph() -> RecordingGraph:
        made.append(RecordingGraph())
        made[-1].replay = partial(replay, made[-1])  # type: ignore[method-assign]
        return made[-1]

    pieces._new_graph = new_graph
    report = pieces.capture(GraphMemory(torch.device("cpu")))
    assert report.batch_sizes == (128,)
    assert report.limits == ("no graph for 64 tokens: out of GPU memory during capture",)
    ids = list(range(40))
    torch.testing.assert_close(probe_logits(engine, ids, 40), probe_logits(eager, ids, 40), rtol=1e-4, atol=1e-4)


def _fail(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("layer 1")


def test_what_graphs_read_lives_as_long_as_they_do() -> None:
    """Graphs hold addresses: the parameters, the store and the static tensors are the object's to hold."""
    engine = make()
    pieces = with_pieces(engine, [64])
    store = weakref.ref(pieces._store.tensors[0].untyped_storage())
    weight = weakref.ref(pieces._model.embed_tokens.weight)
    pieces._pieces = {}  # these recordings, unlike graphs, hold tensors themselves
    engine.close()
    del engine
    gc.collect()
    assert store() is not None
    assert weight() is not None


@pytest.mark.parametrize(
    ("graphs", "reason"),
    [
        ({"max_prefill_tokens": 128}, "CUDA graphs need a GPU, not cpu"),
        ({}, "CUDA graphs need a GPU, not cpu"),
    ],
)
def test_an_engine_without_a_gpu_says_why_it_has_none(graphs: dict[str, Any], reason: str) -> None:
    engine = make(graphs=graphs)
    assert engine.startup.prefill_graphs.limits == (reason,)
    assert engine.startup.prefill_graphs.batch_sizes == ()
    engine.close()


def test_a_dry_engine_says_so_too() -> None:
    engine = LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry"}, "graphs": {"max_prefill_tokens": 64}}))
    assert engine.startup.prefill_graphs.limits == ("the dry model runs on the CPU",)


@torch.inference_mode()
def test_a_draft_model_never_looks_up_what_is_no_token_of_its_own() -> None:
    """Beside a target with a larger vocabulary, in pieces as well as without."""
    engine = make()
    runner = engine.executor.runner
    model = runner._model
    model._last_token = 299
    outputs = []
    for prompt in ([7, 300, 9], [7, 299, 9]):
        params = SamplingParams(temperature=0)
        admission = Admission(0, "", prompt, 3, [0], params, 0, frozenset())
        plan = StepPlan(0, [0], [0], [3], [True], 0, admissions=[admission])
        runner._states.apply(plan, [runner._sampler.admit(0, params, 0, 3, frozenset())])
        step = runner._states.build(plan, Samples.of(plan))
        outputs.append(model.forward(step).clone())
        with_pieces(engine, [64])
        outputs.append(model.forward(step).clone())
        model._pieces.clear()
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
