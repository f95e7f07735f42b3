"""numerics=batch_invariant: a request's tokens and log-probabilities are those it gets alone, to the bit, under every
mechanism. The CPU's runs are small, in Triton's interpreter; those on a GPU cross every tile, chunk and graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from integrity import check_scheduler
from model_shapes import SHAPES, SMALL

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.plan import StepRecord
from mini_infer.runtime.scheduler.prefix_loads import LoadCosts

pytestmark = [
    pytest.mark.usefixtures("plain_sampler", "loads_always_pay"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
]

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
PLAIN: dict[str, Any] = {
    "numerics": "batch_invariant",
    "cache": {"prefix_caching": False},
    "scheduler": {"overlap": "never", "max_num_seqs": 16},
    "graphs": {"capture": "never"},
}


@pytest.fixture
def loads_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What host memory holds comes from there, even where so small a model would compute it sooner."""
    monkeypatch.setattr(LoadCosts, "loading_pays", lambda *_: True)


class Request(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def dummy(shape: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {"path": "made up", "load_format": "dummy", "hf_config": shape, **model}


def requests(vocab_size: int, lengths: list[int], shared: int, max_tokens: int) -> list[Request]:
    """Greedy, random and truncated, some with penalties or a bias, all with log-probabilities; half begin alike."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(vocab_size, size=shared).tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "seed": 4},
        {"temperature": 1.0, "top_k": 9, "min_p": 0.01, "seed": 5},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0, "logit_bias": {7: 100.0}},  # the same token again and again, of which there are drafts
    ]
    made = []
    for i, length in enumerate(lengths):
        own = rng.integers(vocab_size, size=length).tolist()
        more: dict[str, Any] = {"logprobs": 3, "max_tokens": max_tokens + i % 3, "ignore_eos": True}
        if i % 4 == 3:
            more["prompt_logprobs"] = 2
        made.append(Request(beginning + own if i % 2 else own, SamplingParams(**kinds[i % len(kinds)], **more)))
    return made


def make(model: dict[str, Any], changes: dict[str, Any]) -> LLMEngine:
    sections = {name: {**PLAIN.get(name, {}), **values} for name, values in changes.items()}
    return LLMEngine(EngineConfig.from_dict({**PLAIN, "model": model, **sections}))


def answers(engine: LLMEngine, asked: list[Request], alone: bool = False) -> list[Any]:
    """Tokens and all log-probabilities of each request."""
    groups = [[request] for request in asked] if alone else [asked]
    outputs = [o for group in groups for o in engine.generate([r.prompt for r in group], [r.params for r in group])]
    check_scheduler(engine.scheduler)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def check(
    model: dict[str, Any], asked: list[Request], expected: list[Any], changes: dict[str, Any]
) -> list[StepRecord]:
    """The engine's steps."""
    engine = make(model, changes)
    try:
        for _ in range(2):  # the second time prefixes hit
            for index, (got, want) in enumerate(zip(answers(engine, asked), expected, strict=True)):
                assert got == want, f"request {index}"
        return list(engine.records)
    finally:
        engine.close()


TOOK_PLACE: dict[str, list[Callable[[StepRecord], object]]] = {  # what some step shows of a mechanism of that name
    "": [lambda step: step.decode_rows > 1],
    "chunks": [lambda step: step.num_prefilling],  # behind a step: a prompt of which a part is computed
    "prefix hits": [lambda step: step.prefix_hit_tokens],
    "prefixes in host memory": [lambda step: step.host_hit_tokens],
    "short of memory": [lambda step: step.preempted],
    "swap": [lambda step: step.swapped_out_blocks, lambda step: step.swapped_in_blocks],
    "draft": [lambda step: step.drafted],
}


def require_all_took_place(mechanism: str, steps: list[StepRecord]) -> None:
    for name, shows in TOOK_PLACE.items():
        assert name not in mechanism or all(any(map(show, steps)) for show in shows), f"no step shows {name!r}"


# --- on a CPU -----------------------------------------------------------------------------------------------------

MECHANISMS: dict[str, dict[str, Any]] = {
    "chunks, prefix hits, short of memory, overlap": {
        "cache": {"prefix_caching": True, "block_size": 8, "num_blocks": 6, "watermark": 0.0},
        "scheduler": {"overlap": "always", "max_num_batched_tokens": 13, "max_num_seqs": 3},
    },
    "short of memory, prefixes in host memory": {
        "cache": {
            **{"prefix_caching": True, "block_size": 8, "num_blocks": 6, "watermark": 0.0},
            "host_prefix_gib": 2**-12,
        },
        "scheduler": {"overlap": "always", "max_num_batched_tokens": 13, "max_num_seqs": 3},
    },
    "drafts, short of memory, swap": {
        "cache": {"block_size": 4, "num_blocks": 8, "watermark": 0.0},
        "scheduler": {"preemption": "swap", "max_num_seqs": 3, "max_num_batched_tokens": 30},
        "speculation": {"method": "suffix", "num_tokens": 3, "adaptive": False},
    },
}


@pytest.fixture(scope="module")
def small() -> list[Any]:
    asked = requests(101, [15, 7, 1, 9], shared=16, max_tokens=3)
    engine = make(dummy(SMALL, device="cpu", dtype="float32"), {"cache": {"memory_gib": 0.01}})
    expected = answers(engine, asked, alone=True)
    engine.close()
    return [asked, expected]


@pytest.mark.slow
def test_so_it_is_with_experts() -> None:
    model = dummy(SMALL | EXPERTS, device="cpu", dtype="float32")
    asked = requests(101, [5, 1, 9], shared=8, max_tokens=2)
    engine = make(model, {"cache": {"memory_gib": 0.01}})
    expected = answers(engine, asked, alone=True)
    engine.close()
    check(model, asked, expected, MECHANISMS["chunks, prefix hits, short of memory, overlap"])


SCHEMES: dict[str, dict[str, Any]] = {  # model's settings, and the cache's dtype
    "w8a8": {},
    "w8a16": {},
    "mixed": {},
    "fp8": {"cache": "fp8"},
    "fp8_block": {},
    "w4a16": {"cache": "fp8"},
    "w4a16 with zeros": {"quantization": "w4a16", "quantization_symmetric": False},
    "none": {"cache": "fp8"},
}


def quantized(scheme: str, shape: dict[str, Any], **model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a model and of its cache."""
    made = dummy(shape, **model, **({"quantization": scheme} | SCHEMES[scheme]))
    return made, {"dtype": made.pop("cache", "auto")}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "mixed", "w4a16"])
def test_so_it_is_in_fewer_bits(scheme: str) -> None:
    """Of weights and activations, and of keys and values. Products of the other schemes are rows of their own in
    tests/modeling/test_quantized.py, and all are in engines on a GPU."""
    wide = SMALL | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    model, cache = quantized(scheme, wide, device="cpu", dtype="float32")
    asked = requests(101, [5, 6], shared=8, max_tokens=2)
    engine = make(model, {"cache": {"memory_gib": 0.01, **cache}})
    expected = answers(engine, asked, alone=True)
    engine.close()
    changes = MECHANISMS["chunks, prefix hits, short of memory, overlap"]
    check(model, asked, expected, changes | {"cache": changes["cache"] | cache})


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_gives_what_a_request_gets_alone(small: list[Any], mechanism: str) -> None:
    steps = check(dummy(SMALL, device="cpu", dtype="float32"), *small, MECHANISMS[mechanism])
    require_all_took_place(mechanism, steps)


def test_what_cannot_be_had_says_so() -> None:
    narrow = SMALL | {"hidden_size": 128, "intermediate_size": 128}  # 4 heads of 16
    for changes, why in (
        (
            {"model": dummy(narrow, device="cpu", quantization="w4a16", quantization_group=64)},
            r"numerics=batch_invariant: model\.layers\.0\.self_attn: .* multiple of 128 .* Set numerics=fast",
        ),
        ({"attention": {"decode": "sdpa"}}, "sdpa: it is not batch-invariant"),
        ({"model": dummy(SMALL, device="cpu", kernels="torch")}, "not model.kernels=torch"),
        ({"model": dummy(SMALL, device="cpu", implementation="transformers")}, "runs through transformers' code"),
    ):
        with pytest.raises(ConfigError, match=why):
            LLMEngine(EngineConfig.from_dict({**PLAIN, "model": dummy(SMALL, device="cpu"), **changes}))


# --- on a GPU -----------------------------------------------------------------------------------------------------

DRAFT = {"method": "draft", "num_tokens": 3, "adaptive": False}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "graphs, overlap, prefix hits": {
        "cache": {"prefix_caching": True},
        "scheduler": {"overlap": "always"},
        "graphs": {"capture": "auto"},
    },
    "chunks of 100 tokens": {"scheduler": {"max_num_batched_tokens": 100}},
    "chunks of 777 tokens, blocks of 32": {"scheduler": {"max_num_batched_tokens": 777}, "cache": {"block_size": 32}},
    "whole prompts, static batches": {
        "scheduler": {"chunked_prefill": False, "batching": "static", "max_num_batched_tokens": 4096}
    },
    "short of memory, recompute": {
        "cache": {"num_blocks": 250, "prefix_caching": True, "watermark": 0.0},
        "scheduler": {"overlap": "always"},
        "graphs": {"capture": "auto"},
    },
    "short of memory, swap": {
        "cache": {"num_blocks": 250, "prefix_caching": True, "watermark": 0.0},
        "scheduler": {"overlap": "always", "preemption": "swap"},
        "graphs": {"capture": "auto"},
    },
    "short of memory, prefixes in host memory": {
        "cache": {"num_blocks": 250, "prefix_caching": True, "watermark": 0.0, "host_prefix_gib": 1.0},
        "scheduler": {"overlap": "always"},
        "graphs": {"capture": "auto"},
    },
    "n-gram drafts": {
        "speculation": {"method": "ngram", "num_tokens": 4, "adaptive": False},
        "graphs": {"capture": "auto"},
    },
    "suffix drafts, few blocks": {  # whether anybody gives way depends on the drafts that are accepted
        "cache": {"num_blocks": 250, "watermark": 0.0},
        "speculation": {"method": "suffix", "num_tokens": 5, "adaptive": False},
    },
    "a draft model": {"speculation": DRAFT, "graphs": {"capture": "auto"}, "scheduler": {"overlap": "always"}},
    "a draft model without graphs": {"speculation": DRAFT},
}


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "qwen2_moe", "shipped"])
def on_a_gpu(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[Request], list[Any]]]:
    """(target, draft, requests, what each gets alone, eagerly)"""
    if request.param == "shipped":
        model = {"path": "tiny-target", "device": "cuda", "dtype": "bfloat16"}
        draft = {"path": "tiny-draft", "dtype": "bfloat16"}
        lengths, vocab_size = [3, 170, 640, 61, 1200, 16, 350, 33, 90, 1] * 2, 2048
    else:
        model = dummy(SHAPES[request.param], device="cuda", dtype="bfloat16")
        small = {**SHAPES[request.param], "num_hidden_layers": 1}
        draft = {"path": "made up", "load_format": "dummy", "hf_config": small, "dtype": "bfloat16"}
        lengths, vocab_size = [3, 170, 1040, 61, 2200, 16, 350, 33, 90, 1] * 2, 5003
    asked = requests(vocab_size, lengths, shared=300, max_tokens=24)
    engine = make(model, {"cache": {"memory_gib": 1.0}})
    expected = answers(engine, asked, alone=True)
    engine.close()
    yield model, draft, asked, expected
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", ON_A_GPU)
def test_every_mechanism_gives_what_a_request_gets_alone_on_a_gpu(on_a_gpu: Any, mechanism: str) -> None:
    model, draft, asked, expected = on_a_gpu
    changes = {name: dict(values) for name, values in ON_A_GPU[mechanism].items()}
    if changes.get("speculation", {}).get("method") == "draft":
        changes["speculation"]["draft"] = draft
    if "num_blocks" not in changes.setdefault("cache", {}):
        changes["cache"]["memory_gib"] = 1.0
    require_all_took_place(mechanism, check(model, asked, expected, changes))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_gives_what_a_request_gets_alone_on_a_gpu(scheme: str) -> None:
    shape = SHAPES["qwen2"] | {"intermediate_size": 1792}  # int4 takes whole groups of 128
    model, cache = quantized(scheme, shape, device="cuda", dtype="bfloat16")
    asked = requests(5003, [3, 170, 1040, 61, 350, 16, 33, 1] * 2, shared=300, max_tokens=12)
    engine = make(model, {"cache": {"memory_gib": 1.0, **cache}})
    expected = answers(engine, asked, alone=True)
    engine.close()
    for mechanism, room in {
        "graphs, overlap, prefix hits": {"memory_gib": 1.0},
        "short of memory, swap": {"num_blocks": 120},
        "n-gram drafts": {"memory_gib": 1.0},
    }.items():
        changes = ON_A_GPU[mechanism]
        steps = check(model, asked, expected, changes | {"cache": changes.get("cache", {}) | room | cache})
        assert any(step.swapped_out_blocks for step in steps) == ("swap" in mechanism)
