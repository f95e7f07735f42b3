"""Keys and values in float8_e4m3fn, a scale for each head: value = code * scale."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0  # a larger number becomes this one


def store_heads(slots: Tensor, slot_mapping: Tensor, heads: Tensor, scales: Tensor | None) -> None:
    """Puts heads [T, Hkv, D], of any strides, into slots [S, Hkv, D] at slot_mapping [T], with scales [Hkv] float32 as
    8-bit codes, rounded to nearest."""
    if scales is not None:
        codes = (heads.float() / scales[:, None]).clamp_(-_LARGEST, _LARGEST).to(slots.dtype)
        slots, heads = slots.view(torch.uint8), codes.view(torch.uint8)  # no index_copy_ for fp8 on a CPU
    slots.index_copy_(0, slot_mapping, heads)


def load_heads(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., Hkv, D], scales [Hkv] float32 -> [..., Hkv, D] float32."""
    return codes.float() * scales[:, None]
