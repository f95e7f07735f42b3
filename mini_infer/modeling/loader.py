"""ModelConfig -> ModelSpec -> a model with its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mini_infer.core.config import Device, DType, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.interface import Kernels
from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.checkpoint import checkpoint_dtype, fill_from, read_json, resolve_folder, safetensors_files
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.linear_methods.base import Build, LinearMethodFactory
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.model import Model
from mini_infer.modeling.registry import parse_spec
from mini_infer.modeling.spec import ModelSpec, token_ids
from mini_infer.modeling.transformers_model import load_transformers_model, new_transformers_model

_DRAWN_AT_ONCE = 2**28  # random numbers
_DUMMY_STD = 0.02  # as models are initialised: activations stay of order 1


def load_spec(config: ModelConfig) -> ModelSpec:
    """Reads config.json (and generation_config.json's end-of-sequence ids), or config.hf_config. Raises ModelError."""
    if config.hf_config is not None:
        return parse_spec(config.hf_config, "model.hf_config", config.implementation)
    folder = resolve_folder(config.path, weights=config.load_format is LoadFormat.auto)
    spec = parse_spec(read_json(folder / "config.json"), str(folder / "config.json"), config.implementation)
    if (folder / "generation_config.json").is_file():
        more = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
        spec = dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *more))))
    return spec


def load_model(
    config: ModelConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int | None = None,
    kernels: Kernels | None = None,
    linear_method: LinearMethodFactory = Unquantized.create,
) -> Model:
    """The model on its device, weights filled, for sequences of up to `max_len` tokens (default: the model's own
    limit), computing with `kernels` (default: torch's). Raises ModelError, naming the tensor and the file."""
    build = Build(dtype, device, kernels or TorchKernels(), linear_method)
    if spec.through_transformers and config.load_format is LoadFormat.auto:
        return load_transformers_model(resolve_folder(config.path), spec, build)
    model = _new_model(spec, max_len or spec.max_model_len, build)
    if config.load_format is LoadFormat.dummy:
        model.fill_dummy(dummy_weights(device, config.seed))
    else:
        ignored = ("rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tie_word_embeddings else ()))
        fill_from(safetensors_files(resolve_folder(config.path)), model.checkpoint_tensors(), ignored)
    return model


def outline(spec: ModelSpec, dtype: torch.dtype) -> Model:
    """The model without memory, for what it says of itself."""
    return _new_model(spec, 1, Build(dtype, torch.device("meta"), TorchKernels(), Unquantized.create))


def _new_model(spec: ModelSpec, max_len: int, build: Build) -> Model:
    return new_transformers_model(spec, build) if spec.through_transformers else Decoder(spec, max_len, build)


def dummy_weights(device: torch.device, seed: int) -> Callable[[Tensor], None]:
    """Draws normal weights where they lie: a 7B model takes a second on a GPU and no host memory."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(weight: Tensor) -> None:
        # A model in fp32 has the same weights, so that it can be a reference. So they are rounded, and drawn in parts:
        # within a tensor of more than 2 GiB torch starts its generator anew.
        for part in weight.split(max(1, _DRAWN_AT_ONCE // weight[0].numel())):
            part.normal_(std=_DUMMY_STD, generator=generator)
            part.copy_(part.bfloat16())

    return draw


def resolve_device(config: ModelConfig) -> torch.device:
    """Raises ConfigError where CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if config.device is Device.cuda and not available:
        raise ConfigError("model.device=cuda, but torch sees no CUDA device here; use model.device=auto or cpu")
    return torch.device("cuda" if available and config.device is not Device.cpu else "cpu")


def resolve_dtype(config: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU, and float32 on a CPU, where it is both exact and faster."""
    if config.dtype is DType.auto:
        if device.type == "cpu":
            return torch.float32
        if spec.dtype is not None or config.load_format is not LoadFormat.auto:
            return spec.dtype or torch.bfloat16
        return checkpoint_dtype(resolve_folder(config.path))
    return getattr(torch, config.dtype.value)
