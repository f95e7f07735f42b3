"""The shapes of the shipped models: two Qwen2 decoders, head size 64, two KV heads each, and a DeepSeek-V2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from mini_infer.assets.chat import IM_END
from mini_infer.assets.tokenizer import MAX_MODEL_LEN


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class MoEShape:
    """A first layer with a dense feed-forward, and layers of experts behind it. Sizes a head: nope | rope, value."""

    hidden_size: int
    num_layers: int
    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_size: int
    num_experts: int
    top_k: int
    num_shared: int
    expert_size: int


TARGET = Shape(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=1024)
DRAFT = Shape(hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=768)

MOE = MoEShape(
    hidden_size=256,
    num_layers=5,
    num_heads=4,
    kv_rank=128,
    nope_dim=64,
    rope_dim=32,
    value_dim=64,
    dense_size=512,
    num_experts=16,
    top_k=4,
    num_shared=2,
    expert_size=64,
)


def build_model(shape: Shape, tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """A float32 model with fresh weights, on the CPU."""
    config = Qwen2Config(
        intermediate_size=shape.intermediate_size,
        num_key_value_heads=shape.num_kv_heads,
        **_common(shape, tokenizer),
    )
    torch.manual_seed(seed)
    return _stopping(Qwen2ForCausalLM(config), tokenizer)


def build_moe(shape: MoEShape, tokenizer: Qwen2Tokenizer, seed: int) -> DeepseekV2ForCausalLM:
    """As build_model."""
    config = DeepseekV2Config(
        kv_lora_rank=shape.kv_rank,
        q_lora_rank=None,
        qk_nope_head_dim=shape.nope_dim,
        qk_rope_head_dim=shape.rope_dim,
        v_head_dim=shape.value_dim,
        intermediate_size=shape.dense_size,
        first_k_dense_replace=1,
        n_routed_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        n_shared_experts=shape.num_shared,
        moe_intermediate_size=shape.expert_size,
        topk_method="greedy",
        **_common(shape, tokenizer),
    )
    torch.manual_seed(seed)
    return _stopping(DeepseekV2ForCausalLM(config), tokenizer)


def _common(shape: Shape | MoEShape, tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _stopping(model: PreTrainedModel, tokenizer: Qwen2Tokenizer) -> Any:
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(IM_END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def num_parameters(model: torch.nn.Module) -> int:
    """Tied weights counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
