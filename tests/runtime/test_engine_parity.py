"""Greedy tokens of the engine against transformers', with every mechanism switched on and memory short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrity import check_scheduler

from experiments.lab.judge.probe import probe_batch, probe_logits
from mini_infer import EngineConfig, LLMEngine, RequestError, SamplingParams

VOCAB = 200
MAX_LEN = 128
NEW_TOKENS = 24
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,  # large enough that the greedy token leads clearly
    "bos_token_id": None,
    "eos_token_id": None,
}
ARCHITECTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 20}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}
MACHINES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"cache": {"prefix_caching": False}},
    # Eight requests of up to 74 tokens on 12 blocks of 8: chunks, hits, evictions and preemptions all happen.
    "short of memory, recompute": {
        "cache": {"num_blocks": 16, "block_size": 8, "watermark": 0.0},
        "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 23},
    },
    "short of memory, swap": {
        "cache": {"num_blocks": 16, "block_size": 8, "watermark": 0.0, "prefix_caching": False},
        "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 23, "preemption": "swap"},
    },
    "static and contiguous": {
        "cache": {"num_blocks": 32, "block_size": 16, "layout": "contiguous", "prefix_caching": False},
        "scheduler": {"batching": "static", "max_num_seqs": 4},
    },
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    config_class, model_class, own = ARCHITECTURES[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**COMMON, **own)).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(0, VOCAB, (40,), generator=generator).tolist()
    tails = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (3, 10, 1, 7)]
    lone = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 17, 50, 33)]
    return [*(shared + tail for tail in tails), *lone]


def test_probed_rows_are_the_same_in_any_company(checkpoint: tuple[Path, Any]) -> None:
    engine = LLMEngine(
        EngineConfig.from_dict({"model": {"path": str(checkpoint[0]), "device": "cpu"}, **MACHINES["plain"]})
    )
    ids = prompts()
    rows = [(ids[0], 40), (ids[4] + ids[5], 1), (ids[7], 33)]
    alone = [probe_logits(engine, *row) for row in rows]
    assert [len(logits) for logits in alone] == [4, 18, 1]
    torch.testing.assert_close(probe_batch(engine, rows), alone)
    many = [([1, 2], 1)] * (engine.config.scheduler.max_num_seqs + 1)
    with pytest.raises(RequestError, match=r"a probe takes from 1 to \d+ rows \(scheduler.max_num_seqs\), not"):
        probe_batch(engine, many)
    engine.close()


def test_a_probe_of_more_than_the_cache_holds_is_refused(checkpoint: tuple[Path, Any]) -> None:
    model = {"path": str(checkpoint[0]), "device": "cpu"}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "cache": {"num_blocks": 8, "block_size": 16}}))
    with pytest.raises(RequestError, match="the rows of a probe take 9 KV blocks, and there are 8"):
        probe_batch(engine, [([1] * 40, 40)] * 3)
    engine.close()


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    _, model = checkpoint
    tokens = []
    for prompt in prompts():
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("machine", MACHINES)
def test_greedy_tokens_equal_transformers(
    checkpoint: tuple[Path, Any], expected: list[list[int]], machine: str
) -> None:
    folder, _ = checkpoint
    engine = LLMEngine(EngineConfig.from_dict({"model": {"path": str(folder), "device": "cpu"}, **MACHINES[machine]}))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    outputs = engine.generate(prompts(), params)
    check_scheduler(engine.scheduler)
    assert [output.outputs[0].token_ids for output in outputs] == expected

    records = engine.records
    if machine.startswith("short of memory"):
        assert any(record.preempted for record in records)
        assert any(record.num_prefilling for record in records), "no prompt was cut into chunks"
        assert any(record.prefill_tokens and record.decode_tokens for record in records)
        if "swap" in machine:
            assert sum(r.swapped_out_blocks for r in records) == sum(r.swapped_in_blocks for r in records) > 0
        else:
            assert sum(r.prefix_hit_tokens for r in records) > 0
            assert sum(r.evictions for r in records) > 0


def test_siblings_equal_transformers(checkpoint: tuple[Path, Any], expected: list[list[int]]) -> None:
    folder, _ = checkpoint
    engine = LLMEngine(EngineConfig.from_dict({"model": {"path": str(folder)}, "cache": {"prefix_caching": False}}))
    (output,) = engine.generate(prompts()[0], SamplingParams(temperature=0, max_tokens=NEW_TOKENS, n=3))
    assert [completion.token_ids for completion in output.outputs] == [expected[0]] * 3
    cached = [completion.metrics.num_cached_tokens for completion in output.outputs if completion.metrics]
    assert cached == [0, 32, 32], "they share the prompt's two full blocks"
