"""From a config.json, as transformers reads it, to the parts of a ModelSpec. `source` names the config in errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mini_infer.core.errors import ModelError
from mini_infer.modeling.rope import RopeSpec
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec


def decoder_spec(
    architecture: str,
    config: Any,
    source: str,
    windows: tuple[int | None, ...],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """A model whose layers differ in their windows alone, for modeling/decoder.py.

    Raises ModelError for what the decoder does not do.
    """
    if config.hidden_act != "silu":
        raise ModelError(f"{source}: hidden_act is {config.hidden_act!r}; only 'silu' is supported")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % 2:
        raise ModelError(f"{source}: head_dim={head_dim} is odd, which rotary embedding cannot be")
    rope = rope_spec(config, source)
    attention = AttentionSpec(
        heads, kv_heads, head_dim, head_dim**-0.5, rope=rope, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm
    )
    mlp = MLPSpec(config.intermediate_size, mlp_bias)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(LayerSpec(replace(attention, window=window), mlp) for window in windows),
        norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_model_len=stretched_length(config),
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
        eos_token_ids=token_ids(config.eos_token_id),
        config=config,
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An end-of-sequence entry of a config: one id, several, or none (some files say -1 for none)."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(token for token in values if token >= 0)


def stretched_length(config: Any) -> int:
    """Tokens that the positions reach: linear and yarn stretch them; llama3's max_position_embeddings has it in."""
    values, length = config.rope_parameters, config.max_position_embeddings
    if values["rope_type"] == "linear":
        return int(length * values["factor"])
    if values["rope_type"] == "yarn" and values["factor"]:
        return max(length, int(values["original_max_position_embeddings"] * values["factor"]))
    return length


def layer_windows(config: Any, source: str) -> tuple[int | None, ...]:
    """Each layer's window, by the config's layer_types."""
    known = {"full_attention": None, "sliding_attention": config.sliding_window}
    for kind in config.layer_types:
        if kind not in known:
            raise ModelError(f"{source}: layer type {kind!r} is not supported; only {', '.join(known)} are")
    return tuple(known[kind] for kind in config.layer_types)


def rope_spec(config: Any, source: str) -> RopeSpec:
    values = config.rope_parameters
    if "rope_type" not in values:
        raise ModelError(f"{source}: rope_parameters that differ between layers are not supported")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor other than 1 is not supported")
    kind, theta = values["rope_type"], float(values["rope_theta"])
    if kind == "default":
        return RopeSpec(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            f"{source}: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn. "
            "(dynamic and longrope change the keys already cached as a sequence grows)"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    return RopeSpec(theta, tuple(scaled.tolist()), float(attention_factor))
