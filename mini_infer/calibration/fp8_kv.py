"""Keys and values rounded to fp8 in a model of transformers: what `cache.dtype=fp8` makes of its answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mini_infer.modeling.model_files import safetensors_files
from mini_infer.quantization.formats import FP8, Quantized, dequantize, encode

NOTES, ROUNDS = "mini_infer_notes_kv", "mini_infer_fp8_kv"


@torch.no_grad()
def with_fp8_kv(model: Any, ids: Tensor) -> nn.Module:
    """The model, which from now on attends to rounded keys and values. Its queries, and the rest of it, stay as they
    are.

    Args:
        ids: calibration text [n, L], of whose largest key and value each head's scales are made, as a folder has them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        scales = torch.stack([side.abs().amax((0, 2, 3)) for side in (key, value)]) / FP8.number.largest
        module.kv_scales = torch.maximum(module.kv_scales, scales) if hasattr(module, "kv_scales") else scales
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = (_rounded(side, scales) for side, scales in zip((key, value), module.kv_scales, strict=True))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    for name, function in ((NOTES, note), (ROUNDS, attend)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(NOTES)
    for row in ids:
        model(row[None])
    model.set_attn_implementation(ROUNDS)
    found: nn.Module = model
    return found


def write_scales(model: nn.Module, folder: Path, out: Path) -> None:
    """Writes `out`, which is not there yet: `folder`, and the scales of the model that `with_fp8_kv` made of it."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: value for file in safetensors_files(folder) for name, value in load_file(file).items()}
    for name, module in model.named_modules():
        if hasattr(module, "kv_scales"):
            keys, values = module.kv_scales.clone()
            tensors |= {f"{name}.k_scale": keys.clone(), f"{name}.v_scale": values.clone()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    """x [B, heads, L, D], scales [heads] -> the same in numbers of fp8."""
    heads = x.transpose(0, 1).flatten(1).float()
    held = Quantized(encode(heads, scales[:, None], None, FP8), scales[:, None])
    return dequantize(held, FP8).view(x.transpose(0, 1).shape).transpose(0, 1).to(x.dtype)
