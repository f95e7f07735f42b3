"""ModelConfig -> ModelSpec -> a model with its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mini_infer.core.config import (
    CacheDType,
    Device,
    DType,
    EngineConfig,
    LoadFormat,
    MLAForm,
    ModelConfig,
    Numerics,
    Quantization,
    Routing,
)
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.kernels.interface import Kernels
from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.adapters import Adapters
from mini_infer.modeling.checkpoint import checkpoint_dtype, fill_from
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.linear_methods.base import Build, LinearMethodFactory
from mini_infer.modeling.linear_methods.stored import stored_as
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.model import Model
from mini_infer.modeling.model_files import read_json, resolve_folder, safetensors_files
from mini_infer.modeling.registry import parse_spec
from mini_infer.modeling.spec import MLASpec, ModelSpec, MoESpec, token_ids
from mini_infer.modeling.transformers_model import load_transformers_model, new_transformers_model
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.expert import ALL_EXPERTS, ExpertRanks
from mini_infer.quantization.checkpoint_config import rounding

_DRAWN_AT_ONCE = 2**28  # random numbers
_DUMMY_STD = 0.02  # as models are initialised: activations stay of order 1


def load_spec(config: ModelConfig) -> ModelSpec:
    """Reads config.json (and generation_config.json's end-of-sequence ids), or config.hf_config. Raises ModelError."""
    if config.hf_config is not None:
        return _as_configured(parse_spec(config.hf_config, "model.hf_config", config.implementation), config)
    folder = resolve_folder(config.path, weights=config.load_format is LoadFormat.auto)
    spec = parse_spec(read_json(folder / "config.json"), str(folder / "config.json"), config.implementation)
    spec = _as_configured(spec, config)
    if (folder / "generation_config.json").is_file():
        more = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
        spec = dataclasses.replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *more))))
    return spec


def as_served(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The spec of a model whose cache is kept as the config says. Raises ConfigError where it cannot be."""
    brings_scales = spec.quantization is not None and spec.quantization.fp8_kv
    spec = dataclasses.replace(spec, fp8_kv=config.cache.dtype is CacheDType.fp8 or brings_scales)
    form = config.attention.mla
    if not isinstance(spec.attention, MLASpec):
        if form is not MLAForm.auto:
            raise ConfigError(
                f"attention.mla={form.value}: {spec.architecture} has no multi-head latent attention, and one form of "
                "its own. Set attention.mla=auto"
            )
        return spec
    if form is MLAForm.auto and config.numerics is Numerics.batch_invariant:
        form = MLAForm.naive  # one form for prompts and decode, and the fastest in these numerics
    if spec.fp8_kv and form is MLAForm.naive:
        raise ConfigError(
            f"cache.dtype=fp8: {spec.architecture} has keys and values of two sizes, and no scales for these. Set "
            "attention.mla=absorbed, which caches latents, or cache.dtype=auto"
        )
    attention = dataclasses.replace(spec.attention, form=form, crossover=config.attention.mla_crossover)
    return dataclasses.replace(spec, layers=tuple(dataclasses.replace(x, attention=attention) for x in spec.layers))


def _as_configured(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    return _with_routing(_with_rounding(spec, config), config)


def _with_routing(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """The spec of a model whose tokens go to experts as the config says."""
    asked = [f"model.routing={config.routing.value}"] if config.routing is not Routing.learned else []
    asked += ["model.count_experts=true"] if config.count_experts else []
    if asked and not any(isinstance(layer.feed_forward, MoESpec) for layer in spec.layers):
        raise ModelError(
            f"{' and '.join(asked)}: {spec.architecture} has no experts that our code sends tokens to. Set "
            "model.routing=learned and model.count_experts=false"
        )
    if config.routing is Routing.learned:
        return spec
    layers = list(spec.layers)
    for index, layer in enumerate(layers):
        if isinstance(moe := layer.feed_forward, MoESpec):
            seed = config.seed * len(layers) + index
            router = dataclasses.replace(moe.router, routing=config.routing, seed=seed)
            layers[index] = dataclasses.replace(layer, feed_forward=dataclasses.replace(moe, router=router))
    return dataclasses.replace(spec, layers=tuple(layers))


def _with_rounding(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """The spec of a model whose weights are quantized while they are loaded, where the config says so."""
    if config.quantization is Quantization.none:
        return spec
    asked = f"model.quantization={config.quantization.value}"
    if spec.quantization is not None:
        raise ModelError(
            f"{asked}: {config.path} is quantized already ({spec.quantization.describe()}). Set model.quantization=none"
        )
    if spec.through_transformers:
        raise ModelError(
            f"{asked}: {config.path} runs through transformers' code, whose products are not ours to quantize. Set "
            "model.quantization=none"
        )
    form = rounding(config.quantization.value, config.quantization_group, config.quantization_symmetric)
    return dataclasses.replace(spec, quantization=form)


def load_model(
    config: ModelConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int | None = None,
    kernels: Kernels | None = None,
    linear_method: LinearMethodFactory | None = None,
    parallel: ParallelContext = ONE_RANK,
    experts: ExpertRanks = ALL_EXPERTS,
    adapters: Adapters | None = None,
) -> Model:
    """The model on its device, weights filled, for sequences of up to `max_len` tokens (default: the model's own
    limit), computing with `kernels` (default: torch's) and with linear methods of its own (default: the spec's). Of a
    model that ranks share, `spec` is a rank's. Raises ModelError, naming the tensor and the file."""
    method = linear_method or _linear_method(spec)
    build = Build(dtype, device, kernels or TorchKernels(), method, parallel, experts, adapters)
    if spec.through_transformers and config.load_format is LoadFormat.auto:
        return load_transformers_model(resolve_folder(config.path), spec, build)
    model = _new_model(spec, max_len or spec.max_model_len, build)
    # Other stages have the other layers.
    other_layers = sorted(
        set(range(spec.whole.num_layers)) - set(range(spec.first_layer, spec.first_layer + spec.num_layers))
    )
    if adapters is not None:
        model.adapters = adapters
        adapters.load_named(other_layers)
    if config.count_experts and isinstance(model, Decoder):
        model.count_experts()
    if config.load_format is LoadFormat.dummy:
        model.fill_dummy(dummy_weights(device, config.seed))
    else:
        ignored = ("rotary_emb.inv_freq", "q_scale", *(("lm_head.weight",) if spec.tie_word_embeddings else ()))
        if model.kv_scales is None:
            ignored = (*ignored, "k_scale", "v_scale")
        held = "" if spec.quantization is None else f" ({spec.quantization.describe()})"
        # DeepSeek-V3 brings layers behind the last, which predict further tokens.
        behind = range(spec.whole.num_layers, spec.whole.num_layers + getattr(spec.config, "num_mtp_layers", 0))
        skipped = tuple(f"model.layers.{layer}." for layer in (*other_layers, *behind))
        for name, own in (
            ("model.embed_tokens", spec.is_first or (spec.is_last and spec.tie_word_embeddings)),
            ("model.norm", spec.is_last),
            ("lm_head", spec.is_last),
        ):
            skipped += () if own else (f"{name}.",)
        skipped += model.elsewhere()
        files = safetensors_files(resolve_folder(config.path))
        fill_from(files, model.checkpoint_tensors(), ignored, held, skipped)
        model.loaded()
    return model


def outline(
    spec: ModelSpec, dtype: torch.dtype, parallel: ParallelContext = ONE_RANK, experts: ExpertRanks = ALL_EXPERTS
) -> Model:
    """The model without memory, for what it says of itself."""
    build = Build(dtype, torch.device("meta"), TorchKernels(), _linear_method(spec), parallel, experts)
    return _new_model(spec, 1, build)


def _linear_method(spec: ModelSpec) -> LinearMethodFactory:
    return Unquantized.create if spec.quantization is None else stored_as(spec.quantization)


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


def resolve_device(config: ModelConfig, parallel: ParallelContext = ONE_RANK) -> torch.device:
    """Of this rank. Raises ConfigError where CUDA is asked for and there is none, or too few."""
    available = torch.cuda.is_available()
    if config.device is Device.cuda and not available:
        raise ConfigError("model.device=cuda, but torch sees no CUDA device here; use model.device=auto or cpu")
    if not available or config.device is Device.cpu:
        return torch.device("cpu")
    if parallel.num_ranks == 1:
        return torch.device("cuda")
    if parallel.num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{parallel.num_ranks} ranks (parallel.tensor, expert and pipeline) need a GPU each, and torch sees "
            f"{torch.cuda.device_count()}: lower one of them, or set model.device=cpu"
        )
    return torch.device("cuda", parallel.number)


def resolve_dtype(config: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU, and float32 on a CPU, where it is both exact and faster."""
    if config.dtype is DType.auto:
        if device.type == "cpu":
            return torch.float32
        if spec.dtype is not None or config.load_format is not LoadFormat.auto:
            return spec.dtype or torch.bfloat16
        return checkpoint_dtype(resolve_folder(config.path))
    return getattr(torch, config.dtype.value)
