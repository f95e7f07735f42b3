"""Decode attention over the paged KV cache in a single pass: one program for each row and KV head.

The query heads that share a KV head, times the query tokens of a row, are the rows of one matrix product (GQA packing),
so K and V are read once for all of them. The softmax is computed online (Milakov and Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.limits import FP8_CACHE, AttentionLimits
from mini_infer.kernels.quantized.unpack import fp8_pairs

# Heads are padded to a power of two by masks; one of 512 would not fit into the registers.
LIMITS = AttentionLimits(
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_sizes=range(1, 257),
    unequal_values=True,
    **FP8_CACHE,
)
UNBOUNDED = 2**30  # a window that no sequence fills
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Packs:
    """How queries are packed into programs, for which a decode kernel is compiled: kernels call it S."""

    group: int  # query heads of a KV head
    query_len: int  # tokens of a row
    kv_heads: int
    value_dim: int
    block_size: int  # tokens of a block of the cache
    rows: int  # queries of a program
    block_v: int  # value_dim, filled up

    @property
    def packs(self) -> int:
        """In a row, over all KV heads."""
        return self.kv_heads * triton.cdiv(self.group * self.query_len, self.rows)

    @property
    def queries(self) -> int:
        """Of a pack, without what fills it up."""
        return min(self.group * self.query_len, self.rows)


@dataclass(frozen=True)
class DecodeShape(Packs):
    """The rest of what decode kernels are compiled for."""

    head_dim: int
    block_d: int
    slices: int  # of a tile, one a warp
    slice: int  # keys


@triton.jit
def query_rows(row, pack, S: tl.constexpr, ROWS: tl.constexpr):
    """The queries of one program: their token within the row, their place in q [R * query_len, num_heads, head_dim]
    counted in heads, and whether they exist. Three times [rows].

    A KV head has group * query_len queries, in packs of rows. Pack i belongs to KV head i // packs_per_head.
    """
    QUERIES: tl.constexpr = S.group * S.query_len
    PACKS: tl.constexpr = (QUERIES + ROWS - 1) // ROWS
    query = pack % PACKS * ROWS + tl.arange(0, ROWS)
    token = tl.minimum(query // S.group, S.query_len - 1)  # what pads a pack sees what the last token sees
    line = ((row * S.query_len + token) * S.kv_heads + pack // PACKS) * S.group + query % S.group
    return token, line, query < QUERIES


@triton.jit
def first_position(length, window, QUERY_LEN: tl.constexpr):
    """The first position that any of a row's queries sees."""
    return tl.maximum(length - QUERY_LEN - window + 1, 0)


@triton.jit
def attend(
    q,
    keys,
    values,
    table,  # the row's block table
    kv_scales,  # None, or [2, NUM_KV_HEADS] fp32, what keys and values are multiplied by
    row,
    pack,
    begin,
    end,
    length,
    window,
    scale_log2,  # scale * log2(e), since exponentials are of base 2
    S: tl.constexpr,
):
    """Attends with one pack of a row's queries to its positions [begin, end), in tiles of slices * slice.

    Each warp owns a slice of the tile, with a softmax of its own: a batched product gives each warp one element of the
    batch, so warps wait for each other's loads only, not for each other's maxima. The slices are merged at the end.
    Returns the weighted values [rows, block_v], not normalised, the scores' maxima [rows] and the sums of the weights.
    """
    SLICES: tl.constexpr = S.slices
    ROWS: tl.constexpr = S.rows
    TILE: tl.constexpr = SLICES * S.slice
    PACKS: tl.constexpr = (S.group * S.query_len + ROWS - 1) // ROWS
    PAIRS: tl.constexpr = keys.dtype.element_ty == tl.int16  # of float8
    PARTS: tl.constexpr = 2 if PAIRS else 1  # of a head's dimensions, the even ones and the odd ones
    dims, value_dims = tl.arange(0, S.block_d // PARTS), tl.arange(0, S.block_v // PARTS)
    lanes = tl.arange(0, SLICES)[:, None] * S.slice + tl.arange(0, S.slice)
    position = begin + lanes
    blocks = tl.load(table + position // S.block_size, mask=position < end, other=0)
    token, line, real = query_rows(row, pack, S, ROWS)
    asked = q + line[:, None] * S.head_dim + dims * PARTS
    there = real[:, None] & (dims < S.head_dim // PARTS)
    own = tl.load(asked, mask=there, other=0.0)
    own_odd = own
    if PAIRS:
        own_odd = tl.load(asked + 1, mask=there, other=0.0)
    v_scale = 1.0
    if kv_scales is not None:
        scale_log2 *= tl.load(kv_scales + pack // PACKS)
        v_scale = tl.load(kv_scales + S.kv_heads + pack // PACKS)
    if PAIRS and q.dtype.element_ty == tl.bfloat16:
        # A query that is divided by its largest number is in the range of float16.
        own, own_odd = own.to(tl.float32), own_odd.to(tl.float32)
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(own), tl.abs(own_odd)), 1), 1e-30)[:, None]
        own, own_odd = (own / largest).to(tl.float16), (own_odd / largest).to(tl.float16)
        scale_log2 *= largest[None, :, :]
    DOT: tl.constexpr = tl.float32 if _INTERPRETED else own.dtype  # whose products take bfloat16 for integers
    own = tl.broadcast_to(own.to(DOT)[None, :, :], (SLICES, ROWS, S.block_d // PARTS))
    own_odd = tl.broadcast_to(own_odd.to(DOT)[None, :, :], (SLICES, ROWS, S.block_d // PARTS))
    last_seen = (length - S.query_len + token)[None, :, None]
    keys += pack // PACKS * (S.head_dim // PARTS) + dims
    values += pack // PACKS * (S.value_dim // PARTS) + value_dims
    # A finite floor, not -inf: a slice that sees nothing then needs no guard against inf - inf.
    top = tl.full((SLICES, ROWS), -1e30, tl.float32)
    total = tl.zeros((SLICES, ROWS), tl.float32)
    acc = tl.zeros((SLICES, ROWS, S.block_v // PARTS), tl.float32)
    acc_odd = acc
    for start in tl.range(begin, end, TILE):
        position = start + lanes
        inside = position < end
        slots = (blocks * S.block_size + position % S.block_size).to(tl.int64)[:, :, None]
        # What lies past the end is not even read: it may hold NaN, and 0 * NaN is NaN.
        owned = inside[:, :, None]
        k = tl.load(
            keys + slots * (S.kv_heads * S.head_dim // PARTS), mask=owned & (dims < S.head_dim // PARTS), other=0
        )
        v = tl.load(
            values + slots * (S.kv_heads * S.value_dim // PARTS),
            mask=owned & (value_dims < S.value_dim // PARTS),
            other=0,
        )
        # The next tile's blocks, a turn ahead: loads whose addresses are still being loaded would halve the pipeline.
        upcoming = position + TILE
        blocks = tl.load(table + upcoming // S.block_size, mask=upcoming < end, other=0)
        k = tl.permute(k, (0, 2, 1))
        k_odd, v_odd = k, v
        if PAIRS:
            k, k_odd = fp8_pairs(k)
            v, v_odd = fp8_pairs(v)
        scores = tl.dot(own, k.to(DOT), input_precision="tf32x3")
        if PAIRS:
            scores = tl.dot(own_odd, k_odd.to(DOT), scores, input_precision="tf32x3")
        scores *= scale_log2
        visible = inside[:, None, :]
        if S.query_len > 1:  # one token sees all of [begin, end)
            key = position[:, None, :]
            visible = visible & (key <= last_seen) & (key > last_seen - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 2))
        weights = tl.exp2(scores - new_top[:, :, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 2)
        weights = weights.to(DOT)
        acc = tl.dot(weights, v.to(DOT), acc * rescale[:, :, None], input_precision="tf32x3")
        if PAIRS:
            acc_odd = tl.dot(weights, v_odd.to(DOT), acc_odd * rescale[:, :, None], input_precision="tf32x3")
        top = new_top
    best = tl.max(top, 0)
    rescale = tl.exp2(top - best)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), (SLICES, ROWS, S.block_v))
    acc *= (rescale * v_scale)[:, :, None]
    return sum_slices(acc, SLICES, ROWS, S.block_v), best, tl.sum(total * rescale, 0)


@triton.jit
def sum_slices(x, SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """[SLICES, ROWS, BLOCK_D] summed over the 2 or 4 slices, which lie in different warps. Bringing them into one
    thread first takes a quarter of tl.sum's instructions."""
    x = tl.permute(x, (1, 2, 0))
    if SLICES == 4:
        even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK_D, 2, 2)))
        x = even + odd
    even, odd = tl.split(x)
    return even + odd


@triton.jit
def store_rows(out, rows, row, pack, S: tl.constexpr, ROWS: tl.constexpr):
    """rows [ROWS, block_v], the results of a pack, to their places."""
    dims = tl.arange(0, S.block_v)
    _, line, real = query_rows(row, pack, S, ROWS)
    wide = real[:, None] & (dims < S.value_dim)
    tl.store(out + line[:, None] * S.value_dim + dims, rows.to(out.dtype.element_ty), mask=wide)


# Integers are not specialised: a new batch size or table width must not compile anew in the middle of serving.
@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=["block_tables", "seq_lens"])
def _paged_decode_kernel(
    out, q, keys, values, block_tables, kv_scales, seq_lens, table_stride, window, scale_log2, S: tl.constexpr
):
    pack, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + row)
    acc, _, total = attend(
        q, keys, values, block_tables + row * table_stride, kv_scales, row, pack,
        first_position(length, window, S.query_len), length, length, window, scale_log2,
        S,
    )  # fmt: skip
    store_rows(out, acc / total[:, None], row, pack, S, S.rows)


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    query_len: int,
    out: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention of each row's last query_len tokens to all of its tokens, causal among themselves.

    q [R * query_len, num_heads, head_dim], keys and values [num_blocks, block_size, num_kv_heads, head_dim or
    value_dim], all contiguous and of one dtype (fp32, bf16 or fp16), or keys and values float8_e4m3fn, which kv_scales
    [2, Hkv] fp32 multiply; block_tables [R, W] int32; seq_lens [R] int32, the tokens of each row that are in the cache,
    at least query_len. A query at position p sees (p - window, p], or [0, p] where window is None. scale multiplies
    q.k. Returns [R * query_len, num_heads, value_dim] of q's dtype, in `out`, contiguous, where it is given. Safe in a
    CUDA graph: block_tables and seq_lens may change between replays. Raises ValueError for shapes that it does not
    take.
    """
    shape, options = decode_shape(q, keys, values, query_len)
    out = q.new_empty(*q.shape[:2], values.shape[3]) if out is None else out
    if q.numel():
        window = UNBOUNDED if window is None else min(window, UNBOUNDED)
        _paged_decode_kernel[(shape.packs, seq_lens.shape[0])](
            out, q, *stored(keys, values), block_tables, kv_scales, seq_lens, block_tables.stride(0), window,
            scale * math.log2(math.e), shape, **options,
        )  # fmt: skip
    return out


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors, or a few on a CPU, where the interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def decode_shape(q: Tensor, keys: Tensor, values: Tensor, query_len: int) -> tuple[DecodeShape, dict[str, Any]]:
    """What a decode kernel is compiled for, and its launch options: what is fastest for the shapes on an H200."""
    num_heads, (_, block_size, num_kv_heads, head_dim) = q.shape[1], keys.shape
    value_dim = values.shape[3]
    refusal = LIMITS.refusal(head_dim, block_size, q.dtype, value_dim)
    if refusal is not None:
        raise ValueError(f"paged decode: {refusal}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
    group = num_heads // num_kv_heads
    byte = keys.element_size() == 1
    if byte and (head_dim % 2 or value_dim % 2):
        raise ValueError(f"paged decode: heads of float8 are of even sizes, not {head_dim} and {value_dim}")
    # A matrix product sums over at least 16 numbers, and of float8 takes half a head.
    block_d, block_v = (max(32 if byte else 16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    widest = max(block_d, block_v)
    # A matrix product has at least 16 rows. More than 32 do not fit into the registers, and of those that do a program
    # has 32 where SMs are short, which reads K and V once for all: with 16 a layer takes 2 to 3 us less.
    narrow = q.shape[0] // query_len * num_kv_heads * triton.cdiv(group * query_len, 16)
    rows = 16 if group * query_len <= 16 or widest > 128 or narrow <= num_sms(q.device) else 32
    slices = 4 if widest * keys.element_size() <= 256 else 2  # two tiles of K and V in 64 KB (fp32 of 256: 128 KB)
    # Of bytes twice as many keys are as large a tile, and what a tile costs beside its products is paid less often.
    length = 32 if byte and rows == 16 and widest <= 128 else 16
    # Three programs an SM instead of two. The compiler would take a few registers more, and needs none of them.
    maxnreg = 168 if rows == 16 and widest <= 128 and keys.element_size() == 2 else None
    packs = group, query_len, num_kv_heads, value_dim, block_size, rows, block_v
    shape = DecodeShape(*packs, head_dim, block_d, slices, length)
    return shape, {"num_warps": slices, "num_stages": 3, "maxnreg": maxnreg}


def stored(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels read them: of float8 pairs, int16 [..., head_dim / 2]."""
    return (keys, values) if keys.element_size() > 1 else (keys.view(torch.int16), values.view(torch.int16))


def unscaled(keys: Tensor, values: Tensor, kv_scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values [..., Hkv, D] as they are, or multiplied by their scales [2, Hkv], in float32: of references."""
    if kv_scales is None:
        return keys, values
    return keys.float() * kv_scales[0, :, None], values.float() * kv_scales[1, :, None]


def paged_decode_reference(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, seq_lens: Tensor, *, query_len: int, **rest: Any
) -> Tensor:
    """What paged_decode computes."""
    starts = torch.arange(len(seq_lens) + 1) * query_len
    return attention_reference(q, keys, values, block_tables, starts, seq_lens, **rest)


def attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """The definition of attention to the paged cache, row by row in float32. Arguments as of `paged_prefill`."""
    keys, values = unscaled(keys, values, kv_scales)
    out = q.new_empty(*q.shape[:2], values.shape[3])
    group, block_size = q.shape[1] // keys.shape[2], keys.shape[1]
    window, starts = window or UNBOUNDED, query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        query = torch.arange(length - (tokens.stop - tokens.start), length, device=q.device)[:, None]
        key = torch.arange(max(0, int(query.min()) - window + 1), length, device=q.device)
        slots = block_tables[row, key // block_size].long() * block_size + key % block_size
        k, v = (side.flatten(0, 1)[slots].float().repeat_interleave(group, 1) for side in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), k) * scale
        weights = scores.masked_fill_((key > query) | (key <= query - window), -math.inf).softmax(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
