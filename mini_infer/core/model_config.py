"""Settings of a model: where its weights come from, and how it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mini_infer.core.config_checks import at_least, coerce, setting_key
from mini_infer.core.errors import ConfigError


class LoadFormat(str, Enum):
    auto = "auto"  # safetensors of a Hugging Face folder
    dummy = "dummy"  # random weights of the true shape, made on the device
    dry = "dry"  # no weights at all: a deterministic token function and a time model


class DType(str, Enum):
    auto = "auto"  # what the checkpoint says on a GPU, float32 on a CPU
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    auto = "auto"  # cuda where there is one
    cpu = "cpu"
    cuda = "cuda"


class KernelChoice(str, Enum):
    auto = "auto"  # triton on a GPU, torch on a CPU
    torch = "torch"  # plain torch operations: the reference
    triton = "triton"  # our own fused kernels


class Implementation(str, Enum):
    auto = "auto"  # ours, where the architecture has one here; else transformers'
    ours = "ours"
    transformers = "transformers"  # its modeling code with our paged attention: many more architectures, slower


class Quantization(str, Enum):
    none = "none"  # weights in the model's dtype, or as a quantized folder has them
    w8a8 = "w8a8"  # int8 weights, a scale an output; int8 activations, a scale a token
    w8a16 = "w8a16"  # int8 weights; activations in the model's dtype
    mixed = "mixed"  # w8a8, but for the input columns with the largest weights, which stay in the model's dtype
    fp8 = "fp8"  # e4m3 weights, a scale an output; e4m3 activations, a scale a token
    fp8_block = "fp8_block"  # e4m3 weights, a scale for 128 x 128; e4m3 activations, a scale for 128 of a token
    w4a16 = "w4a16"  # int4 weights, a scale a group of inputs; activations in the model's dtype


class Routing(str, Enum):
    learned = "learned"  # by the router's scores; random weights send most tokens to few experts
    uniform = "uniform"  # a hash of (seed, layer, token id, position) draws the experts, all alike
    zipf = "zipf"  # the same, the i-th expert i times as rarely as the first


DRY_TOKEN_BYTES = 8  # of KV: the dry model keeps one 64-bit state


@dataclass(frozen=True)
class DryConfig:
    """Shape and time model of the dry model (`load_format: dry`). Times of zero do not sleep."""

    vocab_size: int = 512  # token ids of the dry model, at least 261
    max_model_len: int = 8192  # tokens of prompt + output that the dry model takes
    step_ms: float = 0.0  # milliseconds that every step takes, whatever is in it
    prefill_token_us: float = 0.0  # microseconds that a step takes longer for each prompt token in it
    decode_token_us: float = 0.0  # microseconds that a step takes longer for each decoding request in it

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 261, "vocab_size")  # 256 bytes and the special tokens of the byte tokenizer
        at_least(self, 2, "max_model_len")
        at_least(self, 0, "step_ms", "prefill_token_us", "decode_token_us")


def check_weights(config: Any) -> None:
    """Of a ModelConfig, or of a draft's."""
    coerce(config)
    if config.hf_config is not None and config.load_format is not LoadFormat.dummy:
        raise ConfigError(
            f"{setting_key(config, 'hf_config')} goes with {setting_key(config, 'load_format')}=dummy, not "
            f"{config.load_format.value}: a folder brings its own config.json"
        )


@dataclass(frozen=True)
class ModelConfig:
    path: str = "tiny-target"  # a folder, a hub name, or a shipped model: tiny-target, tiny-draft, tiny-moe
    load_format: LoadFormat = LoadFormat.auto  # where the weights come from
    implementation: Implementation = Implementation.auto  # whose code computes the model
    hf_config: dict[str, Any] | None = None  # a config.json given inline, for dummy weights without a folder
    tokenizer: str | None = None  # a folder or a hub name; default: the model's own
    dtype: DType = DType.auto  # of weights, activations and KV
    device: Device = Device.auto  # where the model runs
    quantization: Quantization = Quantization.none  # to which unquantized weights are rounded while they are loaded
    quantization_group: int = 128  # inputs that share a scale in w4a16: 32, 64 or 128
    quantization_symmetric: bool = True  # w4a16 without zeros
    kernels: KernelChoice = KernelChoice.auto  # of everything between the matmuls and the attention
    routing: Routing = Routing.learned  # which experts tokens go to; the router computes its scores in any case
    count_experts: bool = False  # step records say how many tokens went to each expert
    max_model_len: int | None = None  # tokens of prompt + output; default: the model's own limit
    threads: int | None = None  # of torch for a step; default: all that it has, and on a CPU one for small steps
    seed: int = 0  # of the random weights of load_format=dummy
    dry: DryConfig = field(default_factory=DryConfig)

    def __post_init__(self) -> None:
        check_weights(self)
        if not self.path:
            raise ConfigError("model.path is empty: give a folder, a hub name, or tiny-target")
        at_least(self, 2, "max_model_len")
        at_least(self, 1, "threads")
        if self.quantization_group not in (32, 64, 128):
            raise ConfigError(f"model.quantization_group must be 32, 64 or 128, got {self.quantization_group}")
        if self.quantization is not Quantization.none and self.load_format is LoadFormat.dry:
            raise ConfigError(
                f"model.quantization={self.quantization.value}: a dry model has no weights. Set model.quantization=none"
            )
