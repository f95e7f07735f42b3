"""The architectures that are known here, and how a config.json becomes a ModelSpec. `source` names it in errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mini_infer.core.errors import ModelError
from mini_infer.core.lean_imports import without_models
from mini_infer.core.model_config import Implementation
from mini_infer.modeling.moe_config import FeedForwards, deepseek, mixtral, olmoe, qwen_moe
from mini_infer.modeling.rope import RopeSpec
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, token_ids
from mini_infer.modeling.transformers_probe import transformers_spec
from mini_infer.quantization.checkpoint_config import checkpoint_format


def decoder_spec(
    name: str,
    config: Any,
    source: str,
    mlp_bias: bool = False,
    feed_forward: Callable[[Any, str], FeedForwards] | None = None,
    attention: Callable[..., AttentionSpec | MLASpec] | None = None,
    **attends: bool,
) -> ModelSpec:
    """A model whose layers differ in their windows and feed-forwards alone, for modeling/decoder.py. `feed_forward`:
    of mixtures of experts. `attention`: of another kind than grouped heads; `attends`: what more AttentionSpec has.
    Raises ModelError for what the decoder does not do."""
    if config.hidden_act != "silu":
        raise ModelError(f"{source}: hidden_act is {config.hidden_act!r}; only 'silu' is supported")
    spec, windows = (attention or grouped_heads)(config, source, **attends), layer_windows(config, source)
    if feed_forward is None:
        feed_forwards: FeedForwards = (MLPSpec(config.intermediate_size, mlp_bias),) * len(windows)
    else:
        feed_forwards = feed_forward(config, source)
    return ModelSpec(
        architecture=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(
            LayerSpec(replace(spec, window=window), own) for window, own in zip(windows, feed_forwards, strict=True)
        ),
        norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_model_len=stretched_length(config),
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
        eos_token_ids=token_ids(config.eos_token_id),
        config=config,
    )


def grouped_heads(config: Any, source: str, **attends: bool) -> AttentionSpec:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % 2:
        raise ModelError(f"{source}: head_dim={head_dim} is odd, which rotary embedding cannot be")
    rope = rope_spec(config, source)
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope=rope, **attends)


def stretched_length(config: Any) -> int:
    """Tokens that the positions reach: linear and yarn stretch them; llama3's max_position_embeddings has it in."""
    values, length = config.rope_parameters, config.max_position_embeddings
    if values["rope_type"] == "linear":
        return int(length * values["factor"])
    if values["rope_type"] == "yarn" and values["factor"]:
        return max(length, int(values["original_max_position_embeddings"] * values["factor"]))
    return length


def layer_windows(config: Any, source: str) -> tuple[int | None, ...]:
    """Each layer's window, by the config's layer_types, or the one that it has for all."""
    window = None if config.model_type == "llama" else getattr(config, "sliding_window", None)  # Llama's code has none
    known = {"full_attention": None, "sliding_attention": window}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"{source}: layer type {kind!r} is not supported; only {', '.join(known)} are")
    return tuple(known[kind] for kind in kinds)


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


def latent_attention(config: Any, source: str) -> MLASpec:
    """Of DeepSeek-V2 and V3."""
    heads, rope = config.num_attention_heads, rope_spec(config, source)
    nope_dim, rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
    if rope_dim % 2:
        raise ModelError(f"{source}: qk_rope_head_dim={rope_dim} is odd, which rotary embedding cannot be")
    if config.attention_bias and config.q_lora_rank is None:
        raise ModelError(f"{source}: attention_bias without q_lora_rank is not supported")
    values, scale = config.rope_parameters, (nope_dim + rope_dim) ** -0.5
    if values["rope_type"] != "default" and (strength := values.get("mscale_all_dim")) and values["factor"] > 1:
        scale *= (0.1 * strength * math.log(values["factor"]) + 1) ** 2  # YaRN's temperature, of q and of k
    return MLASpec(
        num_heads=heads,
        rank=config.kv_lora_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.v_head_dim,
        scale=scale,
        rope=rope,
        q_rank=config.q_lora_rank,
        interleaved=getattr(config, "rope_interleave", True),
        bias=config.attention_bias,
    )


def _biased(config: Any, **more: Any) -> dict[str, Any]:
    return {"qkv_bias": config.attention_bias, "o_bias": config.attention_bias, **more}


# Architecture -> the model_type of its transformers config class, which knows defaults and older spellings, and what
# `decoder_spec` is told of it.
ARCHITECTURES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "LlamaForCausalLM": ("llama", lambda c: _biased(c, mlp_bias=c.mlp_bias)),
    "Qwen2ForCausalLM": ("qwen2", lambda c: {"qkv_bias": True}),
    "Qwen3ForCausalLM": ("qwen3", lambda c: _biased(c, qk_norm=True)),
    "MistralForCausalLM": ("mistral", lambda c: {}),
    "MixtralForCausalLM": ("mixtral", lambda c: {"feed_forward": mixtral}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", lambda c: {"qkv_bias": c.qkv_bias, "feed_forward": qwen_moe}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", lambda c: _biased(c, qk_norm=True, feed_forward=qwen_moe)),
    "OlmoeForCausalLM": ("olmoe", lambda c: _biased(c, qk_norm_of_all=True, feed_forward=olmoe)),
    "DeepseekV2ForCausalLM": ("deepseek_v2", lambda c: {"attention": latent_attention, "feed_forward": deepseek}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", lambda c: {"attention": latent_attention, "feed_forward": deepseek}),
}

# A config.json without these would silently get the sizes of the family's 7B model.
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def parse_spec(raw: dict[str, Any], source: str, implementation: Implementation = Implementation.auto) -> ModelSpec:
    """A config.json's content -> ModelSpec. `source` names it in errors. Raises ModelError."""
    names = raw.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    name = next((name for name in names if name in ARCHITECTURES), None)
    ours = ", ".join(ARCHITECTURES)
    quantization = None
    if raw.get("quantization_config") is not None:
        quantization = checkpoint_format(raw["quantization_config"], source)
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    try:
        if implementation is Implementation.transformers or (implementation is Implementation.auto and name is None):
            if quantization is not None:
                raise ModelError(
                    f"{source}: a quantized checkpoint that is to run through transformers' code is not supported. "
                    f"Take the original weights, or set model.implementation=ours for {ours}"
                )
            return transformers_spec(raw, names, source, ours)
        if name is None:
            raise ModelError(
                f"{source}: unsupported architecture {', '.join(names) or '(none given)'}; model.implementation=ours "
                f"supports {ours}, and transformers others"
            )
        missing = [key for key in _REQUIRED if key not in raw]
        if missing:
            raise ModelError(f"{source}: missing {', '.join(missing)}")
        from transformers import AutoConfig  # takes seconds to import, and a dry model needs none of it

        model_type, parts = ARCHITECTURES[name]
        with without_models():
            config = AutoConfig.for_model(model_type, **{key: raw[key] for key in raw if key != "model_type"})
        return replace(decoder_spec(name, config, source, **parts(config)), quantization=quantization)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever its validators do
        raise ModelError(f"{source}: {error}") from error
