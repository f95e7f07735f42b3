"""The architectures that are known here, and how a config.json becomes a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mini_infer.core.errors import ModelError
from mini_infer.core.model_config import Implementation
from mini_infer.modeling.hf_config import decoder_spec, layer_windows
from mini_infer.modeling.spec import ModelSpec
from mini_infer.modeling.transformers_probe import transformers_spec
from mini_infer.quantization.checkpoint_config import checkpoint_format


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
