"""Speculation on a GPU, through CUDA graphs and without: a draft with the target's own weights is nearly always right,
unless an input, a block or a sampled token is wrong somewhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams

pytestmark = pytest.mark.gpu

SHAPE = {
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
}
PROMPTS = [[(7 * i + j) % 5000 for j in range(5 + 13 * i)] for i in range(9)]
DRAFT = {"method": "draft", "draft": {"hf_config": SHAPE, "load_format": "dummy"}, "num_tokens": 3, "adaptive": False}


def make(speculation: dict[str, Any], **sections: Any) -> LLMEngine:
    model = {"path": "qwen2", "load_format": "dummy", "hf_config": SHAPE, "dtype": "float32", "device": "cuda"}
    scheduler = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **sections.pop("scheduler", {})}
    return LLMEngine(
        EngineConfig.from_dict(
            {
                "model": model,
                "cache": {"memory_gib": 0.25},
                "scheduler": scheduler,
                "speculation": speculation,
                **sections,
            }
        )
    )


def tokens(engine: LLMEngine, temperature: float = 0.0) -> list[list[int]]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40 + i, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    outputs = engine.generate(PROMPTS, params)
    engine.scheduler.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def equal_share(one: list[list[int]], other: list[list[int]]) -> float:
    equal = sum(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        for a, b in zip(one, other, strict=True)
    )
    return equal / sum(map(len, one))


def accepted_share(engine: LLMEngine) -> float:
    return sum(sum(r.accepted) for r in engine.records) / sum(sum(r.drafted) for r in engine.records)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(make({}))


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_draft_that_is_the_target_is_right(expected: list[list[int]], capture: str) -> None:
    engine = make(DRAFT, graphs={"capture": capture})
    assert equal_share(expected, tokens(engine)) > 0.97
    assert accepted_share(engine) > 0.97
    assert bool(engine.startup.draft_graphs.batch_sizes) == (capture == "always")
    assert all(r.draft_s > 0 for r in engine.records if r.drafted)


@pytest.mark.parametrize("capture", ["always", "never"])
def test_drawn_drafts_are_nearly_all_accepted(capture: str) -> None:
    engine = make(DRAFT, graphs={"capture": capture})
    first = tokens(engine, temperature=0.8)
    assert accepted_share(engine) > 0.95
    assert equal_share(first, tokens(engine, temperature=0.8)) > 0.97


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_memory_is_short(expected: list[list[int]], preemption: str) -> None:
    cache = {"num_blocks": 24, "watermark": 0.0}  # 384 tokens, and the requests have about 900
    engine = make(DRAFT, cache=cache, scheduler={"preemption": preemption})
    assert equal_share(expected, tokens(engine)) > 0.97
    assert accepted_share(engine) > 0.9
    assert any(r.preempted for r in engine.records)


def test_lookup_and_as_many_as_pay(expected: list[list[int]]) -> None:
    engine = make({"method": "ngram", "num_tokens": 4})
    assert equal_share(expected, tokens(engine)) > 0.97
    assert engine.startup.speculation == "ngram, up to 4 tokens, as many as pay"


def test_a_stated_rate() -> None:
    engine = make({**DRAFT, "method": "synthetic", "acceptance": 0.5})
    tokens(engine)
    drafting = [r for r in engine.records if r.drafted]
    first = sum(r.accepted[0] for r in drafting) / sum(r.drafted[0] for r in drafting)
    assert first == pytest.approx(0.5, abs=0.12)
