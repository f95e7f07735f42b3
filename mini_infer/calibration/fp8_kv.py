"""Keys and values rounded to fp8 in a model of transformers: what `cache.dtype=fp8` makes of its answers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mini_infer.quantization.formats import FP8, dequantize, quantize

NAME = "mini_infer_fp8_kv"


def with_fp8_kv(model: Any) -> nn.Module:
    """The model, which from now on attends to rounded keys and values, with a scale a head that just holds its largest
    number. Its queries, and the rest of it, stay as they are."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, _rounded(key), _rounded(value), *args, **kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    found: nn.Module = model
    return found


def _rounded(x: Tensor) -> Tensor:
    """[B, heads, L, D] -> the same in numbers of fp8."""
    heads = x.reshape(x.shape[0] * x.shape[1], -1)
    return dequantize(quantize(heads, FP8), FP8).view(x.shape).to(x.dtype)
