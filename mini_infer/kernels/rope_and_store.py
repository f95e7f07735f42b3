"""From the merged QKV projection to attention's operands in one pass: QK-norm, rotary embedding, KV-cache write.

    qkv     [T, (Hq + 2 Hkv) * D]     q heads | k heads | v heads      read once
    q       [T, Hq, D]                normalised, rotated              returned
    k                                 normalised, rotated              to key_slots[slot_mapping]
    v                                 as it is                         to value_slots[slot_mapping]

Rotary embedding: Su et al. 2021, arXiv:2104.09864; QK-norm: Henry et al. 2020, arXiv:2010.04245, as RMSNorm.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.interface import Places, QKNorm
from mini_infer.kernels.pdl import launch_options, take_turn
from mini_infer.kernels.quantized.tokens import as_fp8
from mini_infer.kernels.rms_norm import rms_norm_reference
from mini_infer.kernels.silu_mul import load_sum
from mini_infer.quantization.formats import as_stored


def rope_and_store_reference(qkv: Tensor, qk_norm: QKNorm | None, places: Places) -> Tensor:
    """The definition, step by step. Arguments as `rope_and_store`."""
    cos, sin, slot_mapping, key_slots, value_slots, kv_scales = places
    kv_heads, head_dim = key_slots.shape[1:]
    q, k, v = qkv.unflatten(1, (-1, head_dim)).tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
    q, k = (x * cos + x.roll(head_dim // 2, dims=-1) * sin for x in (q, k))
    k, v = as_stored(k, v, key_slots.dtype, kv_scales)
    key_slots.view(k.dtype)[slot_mapping] = k
    value_slots.view(v.dtype)[slot_mapping] = v
    return q


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr,
    more_ptr,  # None, or what is added to qkv
    qk_norm,  # None: no norm
    places,
    q_ptr,
    rotary_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes up to BLOCK_HEADS heads of one kind (q, k or v) of one token."""
    take_turn(PDL)
    SIZE: tl.constexpr = 2 * HALF
    q_tiles: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    kv_tiles: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    tiles: tl.constexpr = q_tiles + 2 * kv_tiles
    token = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = token * (Q_HEADS + 2 * KV_HEADS) * SIZE
    qkv_ptr += row
    if more_ptr is not None:
        more_ptr += row
    cos_ptr = places.cos + token * rotary_stride
    sin_ptr = places.sin + token * rotary_stride
    q_weight, k_weight, eps = None, None, 0.0
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    if tile < q_tiles:
        head += tile * BLOCK_HEADS
        inside = (head < Q_HEADS) & (column < HALF)
        at = head * SIZE + column
        first, second = _normed_and_rotated(
            qkv_ptr, more_ptr, at, inside, q_weight, cos_ptr, sin_ptr, column, eps, HALF
        )
        _store_halves(q_ptr + token * Q_HEADS * SIZE + at, first, second, inside, HALF)
    elif tile < q_tiles + kv_tiles:
        slot = tl.load(places.slot_mapping + token)
        head += (tile - q_tiles) * BLOCK_HEADS
        inside = (head < KV_HEADS) & (column < HALF)
        at = head * SIZE + column
        first, second = _normed_and_rotated(
            qkv_ptr, more_ptr, Q_HEADS * SIZE + at, inside, k_weight, cos_ptr, sin_ptr, column, eps, HALF
        )
        if places.kv_scales is not None:
            scale = tl.load(places.kv_scales + head, mask=head < KV_HEADS, other=1.0)
            first, second = first / scale, second / scale
        _store_halves(places.key_slots + slot * KV_HEADS * SIZE + at, first, second, inside, HALF)
    else:
        slot = tl.load(places.slot_mapping + token)
        head += (tile - q_tiles - kv_tiles) * BLOCK_HEADS
        inside = (head < KV_HEADS) & (column < HALF)
        at = head * SIZE + column
        v_at = (Q_HEADS + KV_HEADS) * SIZE + at
        v_first = load_sum(qkv_ptr, more_ptr, v_at, inside)
        v_second = load_sum(qkv_ptr, more_ptr, v_at + HALF, inside)
        if places.kv_scales is not None:
            scale = tl.load(places.kv_scales + KV_HEADS + head, mask=head < KV_HEADS, other=1.0)
            v_first, v_second = v_first / scale, v_second / scale
        _store_halves(places.value_slots + slot * KV_HEADS * SIZE + at, v_first, v_second, inside, HALF)


@triton.jit
def _normed_and_rotated(x_ptr, more_ptr, at, inside, weight_ptr, cos_ptr, sin_ptr, column, eps, HALF: tl.constexpr):
    """The halves of some heads, whose elements pair in the rotation, [BLOCK_HEADS, BLOCK_HALF] float32 each."""
    # What all heads share is loaded for each: in the layout of x, so that nothing has to be moved between threads.
    column = tl.broadcast_to(column, inside.shape)
    # All loads come first: none depends on another, and a decode step's time is their latency.
    first = load_sum(x_ptr, more_ptr, at, inside)
    second = load_sum(x_ptr, more_ptr, at + HALF, inside)
    # The other halves, cos again and -sin, are not read.
    cos = tl.load(cos_ptr + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        first_weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        first *= scale * first_weight
        second *= scale * second_weight
    return rotate(first, second, cos, sin)


@triton.jit
def rotate(first, second, cos, sin):
    """The halves of a head, turned. sin: that of the second half, whose sign is +."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_halves(ptr, first, second, inside, HALF: tl.constexpr):
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        first, second = as_fp8(first.to(tl.float32)), as_fp8(second.to(tl.float32))
    tl.store(ptr, first.to(dtype), mask=inside)
    tl.store(ptr + HALF, second.to(dtype), mask=inside)


def rope_and_store(
    qkv: Tensor, qk_norm: QKNorm | None, places: Places, more: Tensor | None = None, *, one_shape: bool = False
) -> Tensor:
    """Writes k and v into their slots and returns q [T, Hq, D], contiguous and of qkv's dtype; computed in float32.

    Args, contiguous:
        qkv: [T, (Hq + 2 Hkv) * D].
        qk_norm: None: no norm.
        places: dimension i of a head pairs with i + D / 2. Of tokens that share a slot, any one stays. The cache may be
            of any floating dtype. Rows of cos and sin alone may lie apart.
        more: as qkv, added to it; may be of another stream's kernel.
        one_shape: programs are shaped alike for any number of tokens, so that a head's norm is summed in one order.
    """
    tokens, (kv_heads, head_dim) = qkv.shape[0], places.key_slots.shape[1:]
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = qkv.new_empty((tokens, q_heads, head_dim))
    if not tokens:
        return q
    # Few tokens hide latency by many small programs. Of many tokens' programs most wait for a place on an SM, and those
    # of the next launch, let in early, take places from them: then large programs are best.
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads, num_warps = (8, 4) if tokens <= 256 or one_shape else (min(2048 // block_half, 32), 2)
    tiles = triton.cdiv(q_heads, block_heads) + 2 * triton.cdiv(kv_heads, block_heads)
    _rope_and_store_kernel[(tokens * tiles,)](
        qkv, more, qk_norm, places, q, places.cos.stride(0), Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
        BLOCK_HALF=block_half, BLOCK_HEADS=block_heads, num_warps=num_warps,
        **launch_options(qkv.device, ordinary=more is not None),
    )  # fmt: skip
    return q
