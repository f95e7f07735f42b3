"""The engine on a GPU: captured against eager, overlapped against not, every backend against every other, and all of
them against the fp32 reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import AttentionConfig, GraphsConfig, KernelChoice, ModelConfig, When
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 1808,
        "num_hidden_layers": 3,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 5003,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 5003,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
REFERENCE = {"attention": AttentionConfig("sdpa", "sdpa"), "graphs": GraphsConfig(When.never)}  # type: ignore[arg-type]


def make(shape: str = "qwen2", *, kernels: str = "auto", dtype: str = "bfloat16", **changes: Any) -> LLMEngine:
    model = ModelConfig(
        path=shape,
        load_format="dummy",  # type: ignore[arg-type]
        hf_config=SHAPES[shape],
        dtype=dtype,  # type: ignore[arg-type]
        device="cuda",  # type: ignore[arg-type]
        kernels=KernelChoice(kernels),
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
    engine.scheduler.check_integrity()
    assert engine.scheduler.usage().used_blocks == 0
    engine.close()
    return outputs


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    torch.cuda.empty_cache()


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
    captured, eager = make(shape), make(shape, graphs=GraphsConfig(When.never))
    assert captured.startup.graphs.batch_sizes == (1, 2, 4, 8, 16, 24)
    assert not eager.startup.graphs.batch_sizes
    ids = torch.randint(0, 5003, (split + 20,), generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(captured.probe_logits(ids, split), eager.probe_logits(ids, split))


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
    exact = reference.probe_logits(ids, 400)
    logits = make(shape, kernels=kernels, attention=AttentionConfig(backend, backend)).probe_logits(ids, 400)  # type: ignore[arg-type]
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
