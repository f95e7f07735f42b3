"""Greedy tokens of mixtures of experts against transformers', with every mechanism switched on and memory short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrity import check_scheduler

from mini_infer import EngineConfig, LLMEngine, SamplingParams

VOCAB, NEW_TOKENS = 61, 12
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that the greedy token leads clearly
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # Qwen2-MoE: test_engine_parity.py, DeepSeek-V3: test_mla_engine.py
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", EXPERTS),
    "deepseek-v2": ("DeepseekV2", LATENTS),
    "deepseek-v2, groups": ("DeepseekV2", LATENTS | GROUPS),
}
SHORT: dict[str, Any] = {"num_blocks": 12, "block_size": 8, "watermark": 0.0}
BUSY: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 23, "overlap": "always"}
MACHINES: dict[str, dict[str, Any]] = {
    "recompute": {"cache": SHORT, "scheduler": BUSY},
    "swap, drafts": {
        "cache": SHORT | {"prefix_caching": False},
        "scheduler": BUSY | {"preemption": "swap"},
        "speculation": {"method": "ngram", "num_tokens": 3, "ngram_min": 1, "adaptive": False},
    },
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    shared, *rest = (torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (40, 3, 10, 1, 17, 50, 33))
    return [*(shared + tail for tail in rest[:3]), *rest[3:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | own)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    expected = []
    for prompt in prompts():
        with torch.inference_mode():
            mask = torch.ones(1, len(prompt), dtype=torch.int64)
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            out = model.generate(torch.tensor([prompt]), attention_mask=mask, **options)
        expected.append(out[0, len(prompt) :].tolist())
    for machine, settings in MACHINES.items():
        engine = LLMEngine(EngineConfig.from_dict({"model": {"path": str(tmp_path), "device": "cpu"}, **settings}))
        outputs = engine.generate(prompts(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        check_scheduler(engine.scheduler)
        assert [output.outputs[0].token_ids for output in outputs] == expected, machine
        records = engine.records
        assert any(record.preempted for record in records)
        assert any(record.num_prefilling for record in records), "no prompt was cut into chunks"
        if machine == "recompute":
            assert sum(record.prefix_hit_tokens for record in records) > 0
        else:
            assert sum(record.swapped_in_blocks for record in records) > 0
            assert any(record.accepted for record in records)
        engine.close()
