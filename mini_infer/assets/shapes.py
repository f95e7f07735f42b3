"""The shapes of the shipped models: Qwen2 decoders, head size 64, two KV heads each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from mini_infer.assets.chat import IM_END
from mini_infer.assets.tokenizer import MAX_MODEL_LEN


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


TARGET = Shape(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=1024)
DRAFT = Shape(hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=768)


def build_model(shape: Shape, tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """A float32 model with fresh weights, on the CPU."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(IM_END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def num_parameters(model: torch.nn.Module) -> int:
    """Tied weights counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
