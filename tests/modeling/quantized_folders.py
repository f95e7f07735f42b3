"""Tiny random checkpoints in the formats that people have, with the weights that their numbers stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from mini_infer.quantization.formats import WeightFormat, quantize, spread_scales
from mini_infer.quantization.packing import AWQ_PLACES, pack_words

SHAPE = {
    "vocab_size": 90,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
INT = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}


def model(**changes: Any) -> transformers.Qwen2ForCausalLM:
    torch.manual_seed(0)
    made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE | changes)).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    return made


def compressed_tensors_folder(
    folder: Path,
    groups: dict[str, dict[str, Any]],
    kv: dict | None = None,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Written with its own library: quantized, compressed, saved.

    Args:
        groups: config_groups: targets, weights, input_activations.
        kv: scales of keys and values by layer, for a kv_cache_scheme.
        changes: to the model's shape.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    made = model(**(changes or {}))
    apply_quantization_config(made, QuantizationConfig(config_groups=groups, ignore=["lm_head"], **options))
    for module in made.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or not isinstance(module, torch.nn.Linear):
            continue
        args, weight = scheme.weights, module.weight.data
        rows, columns = 1, args.group_size if args.strategy == "group" else weight.shape[1]
        if args.strategy == "block":
            rows, columns = args.block_structure
        if args.strategy == "tensor":
            rows = weight.shape[0]
        spread = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = spread.amin((1, 3)), spread.amax((1, 3))
        if args.strategy == "tensor":
            low, high = low.flatten(), high.flatten()
        scale, zero = calculate_qparams(low, high, args)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
    compressor = ModelCompressor.from_pretrained_model(made)
    compressor.compress_model(made)
    made.config.architectures = ["Qwen2ForCausalLM"]
    made.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in made.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(str(folder))


def quantized_folder(folder: Path, config: dict[str, Any], tensors_of: Any, **changes: Any) -> dict[str, Tensor]:
    """The model's projections as `tensors_of(weight [N, K])` -> (tensors by name, the weight that they stand for), with
    this `quantization_config`. Returns those weights by the projections' names."""
    made = model(**changes)
    tensors, meant = {}, {}
    for name, tensor in made.state_dict().items():
        if name.endswith("proj.weight"):
            own, meant[name] = tensors_of(tensor.detach())
            tensors |= {name.removesuffix("weight") + key: value.contiguous() for key, value in own.items()}
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made.config.architectures = ["Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(made.config.to_dict() | {"quantization_config": config}))
    return meant


def gptq(bits: int, group: int | None, symmetric: bool, act_order: bool = False, version: int = 1) -> Any:
    """What AutoGPTQ packs of a weight, for `quantized_folder`."""

    def tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        in_size = weight.shape[1]
        width, middle = group or in_size, 1 << (bits - 1)
        order = torch.arange(in_size)
        if act_order:  # a projection's columns in an order that q, k and v share
            order = torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size))
        spread = weight[:, order].unflatten(1, (-1, width))
        if symmetric:
            scales = (spread.abs().amax(2) / (middle - 1)).half().float()
            zeros = torch.full_like(scales, middle)
        else:
            low, high = spread.amin(2).clamp(max=0), spread.amax(2).clamp(min=0)
            scales = ((high - low) / (2 * middle - 1)).half().float()
            zeros = (-low / scales).round().clamp(1, 2 * middle - 1)
        codes = (spread / scales[..., None] + zeros[..., None]).round().clamp(0, 2 * middle - 1)
        meant = torch.empty_like(weight)
        meant[:, order] = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
        stored = torch.empty_like(weight)
        stored[:, order] = codes.flatten(1)
        g_idx = torch.empty(in_size, dtype=torch.int32)
        g_idx[order] = (torch.arange(in_size) // width).int()
        return {
            "qweight": pack_words(stored.long(), bits).T,
            "qzeros": pack_words((zeros - int(version == 1)).T.long(), bits),
            "scales": scales.T.half(),
            "g_idx": g_idx,
        }, meant

    return tensors


def packed_by_activations(group: int) -> Any:
    """What llm-compressor packed with `actorder: group`, for `quantized_folder`. compressed-tensors 0.20 neither writes
    nor reads such folders."""

    def tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = gptq(4, group, symmetric=True, act_order=True)(weight)
        return {
            "weight_packed": stored["qweight"].T,
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": stored["scales"].T,
            "weight_g_idx": stored["g_idx"],
        }, meant

    return tensors


def awq(group: int) -> Any:
    """What AutoAWQ packs of a weight, for `quantized_folder`."""

    def tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = gptq(4, group, symmetric=False, version=2)(weight)
        spread = weight.unflatten(1, (-1, group))
        scales = stored["scales"].T.float()[..., None]
        low = spread.amin(2).clamp(max=0)[..., None]
        zeros = (-low / scales).round().clamp(1, 15)
        codes = (spread / scales + zeros).round().clamp(0, 15).flatten(1)
        return {
            "qweight": pack_words(codes.T.long(), 4, AWQ_PLACES),
            "qzeros": pack_words(zeros[..., 0].T.long(), 4, AWQ_PLACES),
            "scales": stored["scales"],
        }, meant

    return tensors


def fp8(form: WeightFormat, scale_name: str, one_scale: bool = False) -> Any:
    """Blocks, or one scale for the tensor, for `quantized_folder`."""

    def tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if one_scale:
            scale = weight.abs().max() / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": codes, scale_name: scale}, codes.float() * scale
        quantized = quantize(weight, form)
        meant = quantized.codes.float() * spread_scales(quantized.scales, form, weight.shape)
        return {"weight": quantized.codes, scale_name: quantized.scales}, meant

    return tensors
