"""Models through transformers' code in the engine: the tokens of `generate` under every mechanism."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from against_transformers import CLEAR, Tokens, greedy, saved
from fake_graphs import RecordingGraph

from experiments.lab.judge.logit_gate import probe_logits
from mini_infer import EngineConfig, LLMEngine
from mini_infer.runtime.graphs.pieces import PiecewiseGraphs

VOCAB, MAX_LEN, NEW_TOKENS = 200, 96, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    **CLEAR,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "head_dim": 16}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
CONFIGS: dict[str, transformers.PretrainedConfig] = {  # logits of more: modeling/test_transformers_model.py
    "gemma3": transformers.Gemma3TextConfig(**GROUPED, **WINDOWS),
    "phi": transformers.PhiConfig(**GROUPED),
    "phi3": transformers.Phi3Config(**GROUPED, sliding_window=20),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
    "gpt2": transformers.GPT2Config(**SIZES),
    "deepseek_v3": transformers.DeepseekV3Config(**SIZES, **MLA, **EXPERTS, num_key_value_heads=4, head_dim=8),
    "llama": transformers.LlamaConfig(**GROUPED),
}
SHORT = {  # of memory: chunks, hits, evictions and preemptions all happen
    "cache": {"num_blocks": 12, "block_size": 8, "watermark": 0.0},
    "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 23},
}
NGRAM = {"speculation": {"method": "ngram", "num_tokens": 3, "ngram_min": 1, "adaptive": False}}
MACHINES: dict[str, dict[str, Any]] = {
    "recompute, drafts": SHORT | NGRAM,
    "swap": SHORT | {"scheduler": SHORT["scheduler"] | {"preemption": "swap"}},
    "static, contiguous": {
        "cache": {"num_blocks": 24, "block_size": 16, "layout": "contiguous", "prefix_caching": False},
        "scheduler": {"batching": "static", "max_num_seqs": 4},
    },
    "overlap": SHORT | NGRAM | {"scheduler": SHORT["scheduler"] | {"overlap": "always"}},
}


Checkpoints = Callable[[str], tuple[Path, Tokens]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The folder, and what the model generates, by its name."""

    @cache
    def made(name: str) -> tuple[Path, Tokens]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
        folder = tmp_path_factory.mktemp(name)
        return folder, saved(model, folder, prompts(), NEW_TOKENS)

    return made


def prompts() -> list[list[int]]:
    """Some share a prefix, one repeats itself, and one ends at the model's last position with its new tokens."""
    generator = torch.Generator().manual_seed(1)
    shared, lone, long = (torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (20, 17, 80))
    return [*(shared + shared[:n] for n in (3, 10, 1)), lone, lone[:1], (lone[:3] * 9)[:25], long]


def run(folder: Path, machine: dict[str, Any]) -> tuple[LLMEngine, Tokens]:
    model = {"path": str(folder), "device": "cpu", "implementation": "transformers"}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, **machine}))
    return engine, greedy(engine, prompts(), NEW_TOKENS)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_generate(checkpoints: Checkpoints, name: str) -> None:
    folder, expected = checkpoints(name)
    engine, tokens = run(folder, MACHINES["recompute, drafts"])
    assert tokens == expected
    records = engine.records
    assert any(record.preempted for record in records)
    assert any(record.num_prefilling for record in records), "no prompt was cut into chunks"
    assert any(record.prefill_tokens and record.decode_tokens for record in records)
    assert sum(record.prefix_hit_tokens for record in records) > 0
    assert any(sum(record.drafted) for record in records)
    engine.close()


@pytest.mark.parametrize(
    ("name", "machine"), [("gpt2", "overlap"), ("gemma3", "swap"), ("gemma3", "static, contiguous")]
)
def test_under_every_mechanism(checkpoints: Checkpoints, name: str, machine: str) -> None:
    folder, expected = checkpoints(name)
    engine, tokens = run(folder, MACHINES[machine])
    assert tokens == expected
    engine.close()


def test_both_ways_of_a_llama(checkpoints: Checkpoints) -> None:
    folder, _ = checkpoints("llama")
    logits, told = [], []
    for implementation in ("auto", "transformers"):
        model = {"path": str(folder), "device": "cpu", "implementation": implementation}
        engine = LLMEngine(EngineConfig.from_dict({"model": model}))
        logits.append(probe_logits(engine, prompts()[0], 1))
        told.append((engine.startup.implementation, engine.startup.weight_bytes, engine.startup.kv_bytes))
        engine.close()
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert [implementation for implementation, *_ in told] == ["ours", "transformers"]
    assert told[0][1:] == told[1][1:]


def test_a_draft_model_may_be_one_of_them(checkpoints: Checkpoints) -> None:
    folder, expected = checkpoints("gpt2")
    draft = {"method": "draft", "draft": {"path": str(folder)}, "num_tokens": 3, "adaptive": False}
    engine, tokens = run(folder, {"speculation": draft})
    assert tokens == expected
    assert any(sum(record.accepted) for record in engine.records)
    engine.close()


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "deepseek_v3"])
def test_pieces_between_attention_can_be_captured(checkpoints: Checkpoints, name: str) -> None:
    """With graphs that record operations on a CPU and repeat them, put where a GPU's would be."""
    folder, expected = checkpoints(name)
    config = {"model": {"path": str(folder), "device": "cpu"}, "scheduler": {"max_num_seqs": 4}}
    engine = LLMEngine(EngineConfig.from_dict(config))
    part = engine.executor.runner._model
    pieces = PiecewiseGraphs(part._model, part.store, [64, 128], RecordingGraph)
    with torch.inference_mode():
        pieces._pieces = {size: pieces.capture_size(size) for size in (128, 64)}
    part._pieces = {False: pieces}  # of steps without adapters
    assert len(pieces._pieces[64].before) == 2, "a cut at each layer's attention"
    assert greedy(engine, prompts(), NEW_TOKENS) == expected
    engine.close()
