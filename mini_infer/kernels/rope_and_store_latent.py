"""From the down-projections of multi-head latent attention to attention's operands in one pass: the latent's norm,
rotary embedding, cache write (DeepSeek-V2, arXiv:2405.04434).

    kv   [T, R + P]        c normalised | r rotated                 to slots[slot_mapping]
    q    [T, Hq, N + P]    of each head N as they are | P rotated   returned
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.interface import LatentPlaces, Norm
from mini_infer.kernels.pdl import launch_options, take_turn
from mini_infer.kernels.quantized.tokens import as_fp8
from mini_infer.kernels.rms_norm import rms_norm_reference
from mini_infer.kernels.rope_and_store import rotate
from mini_infer.quantization.formats import as_stored


def rope_and_store_latent_reference(q: Tensor, kv: Tensor, norm: Norm, places: LatentPlaces) -> Tensor:
    """The definition, step by step. Arguments as `rope_and_store_latent`."""
    rope_dim = places.cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        if places.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return x * places.cos + x.roll(rope_dim // 2, dims=-1) * places.sin

    c, r = rms_norm_reference(kv[:, :-rope_dim], *norm), turned(kv[:, None, -rope_dim:])[:, 0]
    latents, _ = as_stored(*(torch.cat((c, r), dim=1),) * 2, places.slots.dtype, None)
    places.slots.view(latents.dtype)[places.slot_mapping] = latents
    return torch.cat((q[..., :-rope_dim], turned(q[..., -rope_dim:])), dim=2)


@triton.jit
def _rope_and_store_latent_kernel(
    q_ptr,
    kv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    out_ptr,
    slots_ptr,
    q_stride,  # between tokens
    kv_stride,
    rotary_stride,
    eps,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each token one program takes the latent, and others up to BLOCK_HEADS heads of q each."""
    take_turn(PDL)
    TILES: tl.constexpr = 1 + (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    SIZE: tl.constexpr = NOPE + 2 * HALF
    token, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    half = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + token * rotary_stride + half, mask=half < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * rotary_stride + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
    if tile == 0:
        own = kv_ptr + token * kv_stride
        kept = slots_ptr + tl.load(slot_ptr + token) * (RANK + 2 * HALF)
        place = tl.arange(0, BLOCK_RANK)
        c = tl.load(own + place, mask=place < RANK, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + place, mask=place < RANK, other=0.0).to(tl.float32)
        c *= tl.rsqrt(tl.sum(c * c, axis=0) / RANK + eps) * weight
        tl.store(kept + place, _stored(c, slots_ptr.dtype.element_ty), mask=place < RANK)
        _turn(own + RANK, kept + RANK, half, half < HALF, cos, sin, HALF, INTERLEAVED)
    else:
        head = (tile - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        column, real = tl.arange(0, BLOCK_NOPE)[None, :], head < HEADS
        heads = q_ptr + token * q_stride + head * SIZE
        outputs = out_ptr + (token * HEADS + head) * SIZE
        nope = tl.load(heads + column, mask=real & (column < NOPE))
        tl.store(outputs + column, nope, mask=real & (column < NOPE))
        _turn(heads + NOPE, outputs + NOPE, half, real & (half < HALF), cos, sin, HALF, INTERLEAVED)


@triton.jit
def _turn(from_ptr, to_ptr, half, inside, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        PAIRS: tl.constexpr = half.shape[1]
        pair = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(inside, inside), [inside.shape[0], 2 * PAIRS])
        numbers = tl.load(from_ptr + pair, mask=both, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(numbers, [inside.shape[0], PAIRS, 2]))
    else:
        first = tl.load(from_ptr + half, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(from_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)
    first, second = rotate(first, second, cos, sin)
    tl.store(to_ptr + half, _stored(first, to_ptr.dtype.element_ty), mask=inside)
    tl.store(to_ptr + HALF + half, _stored(second, to_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    if dtype == tl.float8e4nv:
        x = as_fp8(x)
    return x.to(dtype)


def rope_and_store_latent(q: Tensor, kv: Tensor, norm: Norm, places: LatentPlaces) -> Tensor:
    """Writes latents into their slots and returns q [T, Hq, N + P], contiguous and of q's dtype; computed in float32.

    Args:
        q: [T, Hq, N + P], a token's heads contiguous.
        kv: [T, R + P], a token's numbers contiguous.
        norm: of the first R numbers of kv.
        places: of tokens that share a slot, any one stays.
    """
    cos, sin, slot_mapping, slots, interleaved = places
    (tokens, heads, size), rope_dim = q.shape, cos.shape[-1]
    nope_dim, rank = size - rope_dim, slots.shape[1] - rope_dim
    out = q.new_empty(q.shape)
    if not tokens:
        return out
    block_heads = min(8, triton.next_power_of_2(heads))
    _rope_and_store_latent_kernel[(tokens * (1 + triton.cdiv(heads, block_heads)),)](
        q, kv, norm.weight, cos, sin, slot_mapping, out, slots, q.stride(0), kv.stride(0), cos.stride(0), norm.eps,
        HEADS=heads, NOPE=nope_dim, HALF=rope_dim // 2, RANK=rank, INTERLEAVED=interleaved,
        BLOCK_NOPE=triton.next_power_of_2(nope_dim), BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        BLOCK_RANK=triton.next_power_of_2(rank), BLOCK_HEADS=block_heads, num_warps=4, **launch_options(q.device),
    )  # fmt: skip
    return out
