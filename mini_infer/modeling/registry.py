"""The architectures that the decoder serves, and how each config.json becomes a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_infer.core.errors import ModelError
from mini_infer.modeling.spec import ModelSpec, common_fields, layer_windows


@dataclass(frozen=True)
class Architecture:
    model_type: str  # of the transformers config class, which knows the defaults and the older spellings
    features: Callable[[Any, str], dict[str, Any]]  # (config, source) -> the fields in which architectures differ


def _llama(config: Any, source: str) -> dict[str, Any]:
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": False,
        "sliding_windows": (None,) * config.num_hidden_layers,
    }


def _qwen2(config: Any, source: str) -> dict[str, Any]:
    windows = layer_windows(config, source)
    return {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False, "sliding_windows": windows}


def _qwen3(config: Any, source: str) -> dict[str, Any]:
    return {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "mlp_bias": False,
        "qk_norm": True,
        "sliding_windows": layer_windows(config, source),
    }


def _mistral(config: Any, source: str) -> dict[str, Any]:
    windows = (config.sliding_window,) * config.num_hidden_layers
    return {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, "sliding_windows": windows}


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _llama),
    "Qwen2ForCausalLM": Architecture("qwen2", _qwen2),
    "Qwen3ForCausalLM": Architecture("qwen3", _qwen3),
    "MistralForCausalLM": Architecture("mistral", _mistral),
}

# A config.json without these would silently get the sizes of the family's 7B model.
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def parse_spec(raw: dict[str, Any], source: str) -> ModelSpec:
    """A config.json's content -> ModelSpec. `source` names it in errors. Raises ModelError."""
    names = raw.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        raise ModelError(
            f"{source}: unsupported architecture {', '.join(names) or '(none given)'}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise ModelError(f"{source}: missing {', '.join(missing)}")
    from transformers import AutoConfig  # takes seconds to import, and a dry model needs none of it

    architecture = ARCHITECTURES[name]
    values = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(architecture.model_type, **values)
        fields = common_fields(config, source) | architecture.features(config, source)
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever its validators do
        raise ModelError(f"{source}: {error}") from error
    return ModelSpec(architecture=name, **fields)
