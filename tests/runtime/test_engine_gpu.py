"""The engine on a GPU: captured against eager, overlapped against not, every backend against every other, and all of
them against the fp32 reference."""

from __future__ import annotations

import dataclasses
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from integrity import check_scheduler
from model_shapes import SHAPES

from experiments.lab.judge.logit_gate import probe_batch, probe_logits
from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import AttentionConfig, GraphsConfig, KernelChoice, ModelConfig, When
from mini_infer.core.errors import ConfigError
from mini_infer.runtime.graphs import capture

pytestmark = pytest.mark.gpu

REFERENCE = {"attention": AttentionConfig("sdpa", "sdpa"), "graphs": GraphsConfig(When.never)}  # type: ignore[arg-type]


def make(
    shape: str = "qwen2",
    *,
    kernels: str = "auto",
    dtype: str = "bfloat16",
    quantization: str = "none",
    **changes: Any,
) -> LLMEngine:
    model = ModelConfig(
        path=shape,
        load_format="dummy",  # type: ignore[arg-type]
        hf_config=SHAPES[shape],
        dtype=dtype,  # type: ignore[arg-type]
        device="cuda",  # type: ignore[arg-type]
        kernels=KernelChoice(kernels),
        quantization=quantization,  # type: ignore[arg-type]
    )
    base = EngineConfig.from_dict({"cache": {"memory_gib": 1.0}, "scheduler": {"max_num_seqs": 24}})
    return LLMEngine(dataclasses.replace(base, model=model, **changes))


def prompts(count: int, longest: int = 300) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 5003, (length,), generator=generator).tolist() for length in lengths]


def params(count: int) -> list[SamplingParams]:
    """Greedy, random and truncated rows, and now and then the rare things."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.05, "logprobs": 2},
        {"temperature": 0, "min_tokens": 5, "stop_token_ids": (7, 8, 9)},
    ]
    return [
        SamplingParams(max_tokens=10 + i % 30, ignore_eos=True, seed=i, **kinds[i % len(kinds)]) for i in range(count)
    ]


def tokens(engine: LLMEngine, count: int = 40) -> list[list[int]]:
    outputs = [output.outputs[0].token_ids for output in engine.generate(prompts(count), params(count))]
    check_scheduler(engine.scheduler)
    assert engine.scheduler.usage().used_blocks == 0
    engine.close()
    return outputs


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    torch.cuda.empty_cache()


def test_to_launch_a_step_waits_for_nothing(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are under way included: what waits for them in the middle of a launch tells their tokens late."""
    engine = make(shape)
    engine.generate(prompts(12), params(12))  # whatever compiles may wait
    launch, launched = engine.executor.launch, []

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched.append(plan.num_prefill_tokens)
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine.executor, "launch", watched)
    engine.generate(prompts(12), params(12))
    engine.close()
    assert any(launched)
    assert not all(launched)


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of requests that gave the very same tokens. In bf16 two orders of a sum may tip a close choice."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_overlap_changes_no_token(shape: str) -> None:
    """In fp32: overlap moves requests to other steps, and in bf16 the shape of a batch may tip a close choice."""
    base = EngineConfig.from_dict({"scheduler": {"max_num_seqs": 24}}).scheduler
    graphs, dtype = GraphsConfig(When.never), "float32"
    without = tokens(make(shape, dtype=dtype, graphs=graphs, scheduler=dataclasses.replace(base, overlap=When.never)))
    overlapped = dataclasses.replace(base, overlap=When.always)
    assert tokens(make(shape, dtype=dtype, graphs=graphs, scheduler=overlapped)) == without


@pytest.mark.parametrize("split", [1, 77, 300])
def test_captured_steps_give_the_logits_of_eager_steps(shape: str, split: int) -> None:
    captured = make(shape, graphs=GraphsConfig(max_prefill_tokens=0))  # pieces are padded, which rounds otherwise
    eager = make(shape, graphs=GraphsConfig(When.never))
    assert captured.startup.graphs.batch_sizes == (1, 2, 4, 8, 16, 24)
    assert not eager.startup.graphs.batch_sizes
    ids = torch.randint(0, 5003, (split + 20,), generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(probe_logits(captured, ids, split), probe_logits(eager, ids, split))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_captured_batches_give_the_logits_of_eager_ones(shape: str, dtype: str, bound: float) -> None:
    """Three rows and then two, of other lengths, in graphs of four and two. In bf16 padding to four rows takes other
    kernels, which do not round the norm between two operations: there both may differ as much as from fp32."""
    captured, eager = make(shape, dtype=dtype), make(shape, dtype=dtype, graphs=GraphsConfig(When.never))
    generator = torch.Generator().manual_seed(7)
    rows = [
        (torch.randint(0, 5003, (split + more,), generator=generator).tolist(), split)
        for split, more in ((1, 20), (77, 12), (300, 20))
    ]
    for found, expected in zip(probe_batch(captured, rows), probe_batch(eager, rows), strict=True):
        assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < bound


def test_captured_engine_gives_the_tokens_of_the_eager_one(shape: str) -> None:
    """Padding changes the shapes of matrix products, and with them now and then the last bit."""
    assert agreement(tokens(make(shape)), tokens(make(shape, graphs=GraphsConfig(When.never)))) > 0.7


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("backend", ["sdpa", "triton", "flash_attn"])
def test_relative_logit_error_against_the_reference_in_fp32(shape: str, kernels: str, backend: str) -> None:
    if backend == "flash_attn":
        pytest.importorskip("flash_attn.cute")
    ids = torch.randint(0, 5003, (420,), generator=torch.Generator().manual_seed(2)).tolist()
    reference = make(shape, kernels="torch", dtype="float32", **REFERENCE)
    exact = probe_logits(reference, ids, 400)
    engine = make(shape, kernels=kernels, attention=AttentionConfig(backend, backend))  # type: ignore[arg-type]
    logits = probe_logits(engine, ids, 400)
    error = (logits - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 2e-2


def test_chunks_and_hits_and_preemption_compose_with_graphs(shape: str) -> None:
    """In fp32, where another cut of the same work changes a choice in hardly any request."""
    roomy = tokens(make(shape, dtype="float32", graphs=GraphsConfig(When.never), cache=EngineConfig().cache))
    tight = EngineConfig.from_dict(
        {
            "cache": {"num_blocks": 40, "prefix_caching": True},
            "scheduler": {"max_num_seqs": 24, "max_num_batched_tokens": 64, "preemption": "swap"},
            "model": {"max_model_len": 512},
        }
    )
    model = dataclasses.replace(make(shape, dtype="float32").config.model, max_model_len=512)
    engine = LLMEngine(dataclasses.replace(tight, model=model))
    assert agreement(tokens(engine), roomy) >= 0.95
    assert any(record.preempted for record in engine.records)


def replays(engine: LLMEngine) -> list[bool]:
    """Grows with every step that no decode graph takes: whether pieces took it."""
    model, taken = engine.executor.runner._model, []
    pieces = model._pieces[False]  # type: ignore[attr-defined]
    replay = pieces.replay

    def noted(*args: Any) -> Any:
        hidden = replay(*args)
        taken.append(hidden is not None)
        return hidden

    pieces.replay = noted
    return taken


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float32", 1e-5)])
def test_pieces_give_the_logits_of_eager_steps(shape: str, dtype: str, tolerance: float, kernels: str) -> None:
    """Padding changes the shapes of matrix products, and with them the order of their sums."""
    eager = make(shape, dtype=dtype, kernels=kernels, graphs=GraphsConfig(max_prefill_tokens=0))
    captured = make(shape, dtype=dtype, kernels=kernels, graphs=GraphsConfig(max_prefill_tokens=256))
    assert eager.startup.prefill_graphs.limits == ("graphs.max_prefill_tokens=0",)
    assert captured.startup.prefill_graphs.batch_sizes == (64, 128, 192, 256), "capture needs no sampler of ours"
    taken = replays(captured)
    for split in (1, 63, 64, 65, 128, 150, 192, 256, 257, 300, 40):  # the last finds what larger steps have left
        ids = torch.randint(0, 5003, (split + 2,), generator=torch.Generator().manual_seed(split)).tolist()
        expected, found = probe_logits(eager, ids, split), probe_logits(captured, ids, split)
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < tolerance, f"a prompt of {split} tokens"
    assert taken.count(False) == 2, "257 and 300 tokens are too many"


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("budget", [64, 65, 100, 300])
def test_pieces_give_the_tokens_of_eager_mixed_steps(shape: str, backend: str, budget: int) -> None:
    """Chunks of every length beside decode rows, and batches of decode rows alone that are larger than their graphs:
    in fp32, where another shape of the same work changes a choice in hardly any request."""
    scheduler = EngineConfig.from_dict({"scheduler": {"max_num_seqs": 24, "max_num_batched_tokens": budget}}).scheduler
    same: dict[str, Any] = {
        "dtype": "float32",
        "attention": AttentionConfig(backend, backend),  # type: ignore[arg-type]
        "scheduler": scheduler,
    }
    captured = make(shape, graphs=GraphsConfig(max_batch=4, max_prefill_tokens=256), **same)
    assert captured.startup.prefill_graphs.batch_sizes == tuple(range(64, min(256, -(-budget // 64) * 64) + 1, 64))
    taken = replays(captured)
    assert agreement(tokens(captured), tokens(make(shape, graphs=GraphsConfig(When.never), **same))) >= 0.95
    assert all(taken) or budget == 300
    assert taken.count(True) > 10


@pytest.mark.parametrize("quantization", ["none", "fp8", "w8a8", "w4a16"])
def test_whole_steps_give_the_tokens_of_pieces(shape: str, quantization: str) -> None:
    """Rows travel to where a graph reads them, decode rows beside prompts: the same kernels on the same numbers."""
    pytest.importorskip("flash_attn.cute")
    settings = {"cache": {"prefix_caching": False}, "scheduler": {"max_num_seqs": 24, "max_num_batched_tokens": 100}}
    config = EngineConfig.from_dict(settings)
    found = []
    for whole in (True, False):
        engine = make(shape, quantization=quantization, cache=config.cache, scheduler=config.scheduler)
        assert not engine.startup.prefill_graphs.in_pieces
        taken = takes(engine, whole)
        found.append(tokens(engine))
        assert len(taken) > 10
        assert (sum(taken) > 10) == whole
    assert found[0] == found[1]


def takes(engine: LLMEngine, whole: bool) -> list[bool]:
    """Grows with every step in pieces: whether it was taken whole, which only happens where it may."""
    mixed, taken = engine.executor.runner._model._pieces[False]._mixed, []  # type: ignore[attr-defined]
    take = mixed.take

    def noted(batch: Any) -> bool:
        taken.append(whole and take(batch))
        return taken[-1]

    mixed.take = noted
    return taken


def test_pieces_stay_right_when_the_memory_around_them_is_used_again(shape: str) -> None:
    """A graph reads addresses: whatever is not held is soon somebody else's."""
    captured = make(shape, dtype="float32", graphs=GraphsConfig(max_prefill_tokens=128))
    ids = torch.randint(0, 5003, (100,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = probe_logits(make(shape, dtype="float32", graphs=GraphsConfig(When.never)), ids, 100)
    gc.collect()
    torch.cuda.empty_cache()
    held = [torch.full((2**n,), torch.nan, device="cuda") for n in range(6, 26) for _ in range(4)]
    found = probe_logits(captured, ids, 100)
    assert ((found - expected).norm() / expected.norm()) < 1e-5
    del held


def test_refusals_name_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"graphs\.capture=always: .*sampler cannot be captured"):
        make(kernels="torch", graphs=GraphsConfig(When.always))
    engine = make(kernels="torch")
    assert "cannot be captured" in engine.startup.graphs.limits[0], "what auto left out is on record"
    with pytest.raises(ConfigError, match="KV cache of 100000000 blocks"):
        make(cache=EngineConfig.from_dict({"cache": {"num_blocks": 100_000_000}}).cache)
    huge = dict(SHAPES["qwen2"], hidden_size=896 * 64, intermediate_size=400_000, num_hidden_layers=80)
    config = dataclasses.replace(engine.config.model, hf_config=huge)
    with pytest.raises(ConfigError, match=r"the weights of qwen2 take .* GiB"):
        LLMEngine(dataclasses.replace(engine.config, model=config))


@pytest.mark.parametrize("shape", ["qwen2_moe", "qwen3"])
def test_no_step_takes_memory_from_the_driver_after_the_cache_was_emptied(shape: str) -> None:
    """Prompts that arrive together, of a vocabulary whose logits would lie in a hole that the next step needs."""
    model = {"load_format": "dummy", "hf_config": SHAPES[shape] | {"vocab_size": 151936}}
    model |= {"dtype": "bfloat16", "device": "cuda"}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "cache": {"memory_gib": 1.0}}))
    rng = np.random.default_rng(7)
    for count, shortest, longest in ((8, 2000, 2000), (32, 500, 500), (100, 500, 500), (256, 128, 128), (256, 20, 400)):
        lengths = rng.integers(shortest, longest, count, endpoint=True)
        batch = [rng.integers(0, 5003, length).tolist() for length in lengths]
        each = [
            SamplingParams(temperature=0, max_tokens=int(n) // 8, ignore_eos=True) for n in rng.permutation(lengths)
        ]
        gc.collect()
        torch.cuda.empty_cache()
        engine.executor.reserve_memory()
        before = torch.cuda.memory_reserved()
        engine.generate(batch, each)
        assert torch.cuda.memory_reserved() <= before, f"{count} prompts of {shortest} to {longest} tokens"


# Another process: it takes a GiB when it is told to.
PEER = """
import torch
held = [torch.zeros(1, device="cuda")]
print("ready", flush=True)
input()
held.append(torch.zeros(2**30, dtype=torch.uint8, device="cuda"))
torch.cuda.synchronize()
print("taken", flush=True)
input()
"""

UNKNOWN = (
    r"what the driver took for \d+ of (6|32) sizes is not known: "
    "other processes took or gave back GPU memory meanwhile"
)


def test_graphs_take_the_memory_of_the_largest_and_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts of 32 sizes: of memory of its own each would make some 20 MiB at most, all of them 330."""
    attempt, grown = capture._try, []
    peer = subprocess.Popen([sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    told = iter([True])

    def noted(*args: Any) -> Any:
        if next(told, False):
            print(file=peer.stdin, flush=True)
            assert peer.stdout.readline() == "taken\n"
        before = torch.cuda.memory_reserved()
        captured = attempt(*args)
        grown.append(torch.cuda.memory_reserved() - before)
        return captured

    monkeypatch.setattr(capture, "_try", noted)
    try:
        assert peer.stdout.readline() == "ready\n"
        started = make("qwen2_moe", graphs=GraphsConfig(max_prefill_tokens=2048)).startup
    finally:
        peer.kill()
        peer.wait()
    assert len(grown) == 6 + 32, "rows up to 24, tokens up to 2048"
    assert sum(grown[1:6] + grown[7:]) <= 2 * 20 * 2**20, "beside the largest, two segments of torch's"
    assert started.graphs.memory_bytes < 2**28
    limits = (*started.graphs.limits, *started.prefill_graphs.limits)
    assert 1 <= len(limits) <= 2, "of decode steps, and where other tests share the GPU also of prompts"
    assert all(re.fullmatch(UNKNOWN, limit) for limit in limits)
