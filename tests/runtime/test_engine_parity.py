"""Greedy tokens of the engine against transformers', with every mechanism switched on and memory short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from against_transformers import CLEAR, LATENTS, Tokens, greedy, made_up_prompts, saved

from experiments.lab.judge.logit_gate import probe_batch, probe_logits
from mini_infer import EngineConfig, LLMEngine, RequestError, SamplingParams

VOCAB, NEW_TOKENS = 200, 16
PROMPTS = made_up_prompts(VOCAB)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **CLEAR,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
V2 = LATENTS | {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
YARN = {  # as V2-Lite has it
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # DeepSeek-V3: test_mla_engine.py
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}),
    "olmoe": ("Olmoe", EXPERTS),
    "deepseek-v2-lite": ("DeepseekV2", V2 | {"rope_parameters": YARN}),
    "deepseek-v2, groups": ("DeepseekV2", V2 | GROUPS),
}
# Eight requests of up to 66 tokens on 16 blocks of 8: chunks, hits, evictions and preemptions all happen.
SHORT: dict[str, Any] = {"num_blocks": 16, "block_size": 8, "watermark": 0.0}
BUSY: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 23}
MACHINES: dict[str, dict[str, Any]] = {
    "plain": {"cache": {"prefix_caching": False}},
    "recompute, overlap": {"cache": SHORT, "scheduler": BUSY | {"overlap": "always"}},
    "swap, drafts": {
        "cache": SHORT | {"prefix_caching": False},
        "scheduler": BUSY | {"preemption": "swap"},
        "speculation": {"method": "ngram", "num_tokens": 3, "ngram_min": 1, "adaptive": False},
    },
    "static and contiguous": {
        "cache": {"num_blocks": 32, "block_size": 16, "layout": "contiguous", "prefix_caching": False},
        "scheduler": {"batching": "static", "max_num_seqs": 4},
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokens]:
    """The folder, and what transformers generates."""
    name, own = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | own)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    folder = tmp_path_factory.mktemp(name)
    return folder, saved(model, folder, PROMPTS, NEW_TOKENS)


def make(folder: Path, machine: dict[str, Any]) -> LLMEngine:
    return LLMEngine(EngineConfig.from_dict({"model": {"path": str(folder), "device": "cpu"}, **machine}))


@pytest.mark.parametrize("machine", ["recompute, overlap", "swap, drafts"])
def test_greedy_tokens_equal_transformers(checkpoint: tuple[Path, Tokens], machine: str) -> None:
    folder, expected = checkpoint
    engine = make(folder, MACHINES[machine])
    assert greedy(engine, PROMPTS, NEW_TOKENS) == expected
    records = engine.records
    assert any(record.preempted for record in records)
    assert any(record.num_prefilling for record in records), "no prompt was cut into chunks"
    assert any(record.prefill_tokens and record.decode_tokens for record in records)
    if "swap" in machine:
        assert sum(r.swapped_out_blocks for r in records) == sum(r.swapped_in_blocks for r in records) > 0
        assert any(record.accepted for record in records)
    else:
        assert sum(r.prefix_hit_tokens for r in records) > 0
        assert sum(r.evictions for r in records) > 0


few_families = pytest.mark.parametrize("checkpoint", ["llama", "mistral", "qwen2-moe"], indirect=True)


@few_families
@pytest.mark.parametrize("machine", ["plain", "static and contiguous"])
def test_so_they_are_without_mechanisms(checkpoint: tuple[Path, Tokens], machine: str) -> None:
    folder, expected = checkpoint
    assert greedy(make(folder, MACHINES[machine]), PROMPTS, NEW_TOKENS) == expected


@few_families
def test_siblings_equal_transformers_and_probed_rows_are_the_same_in_any_company(
    checkpoint: tuple[Path, Tokens],
) -> None:
    folder, expected = checkpoint
    engine = make(folder, MACHINES["plain"])
    (output,) = engine.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=NEW_TOKENS, n=3))
    assert [completion.token_ids for completion in output.outputs] == [expected[0]] * 3
    cached = [completion.metrics.num_cached_tokens for completion in output.outputs if completion.metrics]
    assert cached == [0, 32, 32], "they share the prompt's two full blocks"
    rows = [(PROMPTS[0], 40), (PROMPTS[4] + PROMPTS[5], 1), (PROMPTS[7], 33)]
    alone = [probe_logits(engine, *row) for row in rows]
    assert [len(logits) for logits in alone] == [4, 18, 1]
    torch.testing.assert_close(probe_batch(engine, rows), alone)
    many = [([1, 2], 1)] * (engine.config.scheduler.max_num_seqs + 1)
    with pytest.raises(RequestError, match=r"a probe takes from 1 to \d+ rows \(scheduler.max_num_seqs\), not"):
        probe_batch(engine, many)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_probe_of_more_than_the_cache_holds_is_refused(checkpoint: tuple[Path, Tokens]) -> None:
    engine = make(checkpoint[0], {"cache": {"num_blocks": 8, "block_size": 16}})
    with pytest.raises(RequestError, match="the rows of a probe take 9 KV blocks, and there are 8"):
        probe_batch(engine, [([1] * 40, 40)] * 3)
