"""The architectures that are known here, and how a config.json becomes a ModelSpec. `source` names it in errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mini_infer.core.errors import ModelError
from mini_infer.core.model_config import Implementation
from mini_infer.modeling.rope import RopeSpec
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, token_ids
from mini_infer.modeling.transformers_probe import transformers_spec
from mini_infer.quantization.checkpoint_config import checkpoint_format


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


def _llama(name: str, config: Any, source: str) -> ModelSpec:
    bias, windows = config.attention_bias, (None,) * config.num_hidden_layers
    return decoder_spec(name, config, source, windows, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def _qwen2(name: str, config: Any, source: str) -> ModelSpec:
    return decoder_spec(name, config, source, layer_windows(config, source), qkv_bias=True)


def _qwen3(name: str, config: Any, source: str) -> ModelSpec:
    bias, windows = config.attention_bias, layer_windows(config, source)
    return decoder_spec(name, config, source, windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _mistral(name: str, config: Any, source: str) -> ModelSpec:
    return decoder_spec(name, config, source, (config.sliding_window,) * config.num_hidden_layers)


# Architecture -> the model_type of its transformers config class, which knows defaults and older spellings, and what
# makes the spec of (architecture, config, source).
ARCHITECTURES: dict[str, tuple[str, Callable[[str, Any, str], ModelSpec]]] = {
    "LlamaForCausalLM": ("llama", _llama),
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "MistralForCausalLM": ("mistral", _mistral),
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

        model_type, read = ARCHITECTURES[name]
        values = {key: value for key, value in raw.items() if key != "model_type"}
        spec = read(name, AutoConfig.for_model(model_type, **values), source)
        return replace(spec, quantization=quantization)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever its validators do
        raise ModelError(f"{source}: {error}") from error
