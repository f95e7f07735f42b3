"""Decode attention over a paged cache of latents: absorbed multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

All heads share one key of a token, its latent c and r, and one value, c alone. So the heads, times the query tokens of
a row, are the tall dimension of the products, and c is read once, for scores and for values:

    scores  [heads, tile] = q_c c^T + q_r r^T            c [tile, rank], r [tile, rope_dim]
    out     [heads, rank] += softmax(scores) c

Long rows are split over several programs, whose results the last one merges, as in flash_decode.py. A few rows are
split into so many parts that one program would take longer to merge them than all did to find them: those have a kernel
for that, with a program for each query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.flash_decode import (
    MAX_TICKETS,
    Parts,
    finish_part,
    make_parts,
    merge,
    part_of,
    parts_of,
    tickets_of,
)
from mini_infer.kernels.limits import FP8_CACHE, AttentionLimits
from mini_infer.kernels.paged_decode import Packs, num_sms, paged_decode_reference, query_rows, store_rows
from mini_infer.kernels.pdl import launch_options, take_turn

# Ranks are padded to a power of two by masks; the sums of more would not fit into the registers.
LIMITS = AttentionLimits(
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_sizes=range(2, 577),
    unequal_values=True,
    **FP8_CACHE,
)
FILLS_AN_SM = 64  # latents of a tile
MERGED_APART = 32  # rows of a batch, up to which parts are merged by a kernel of their own
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class LatentShape(Packs):
    """The rest of what the kernel is compiled for. The one KV head's values are the first numbers of its keys."""

    rope_dim: int
    block_r: int
    tile: int  # keys
    neighbours: int  # keys of a tile that lie beside each other in a block


@triton.jit
def _attend(
    q,
    latents,
    table,  # the row's block table
    row,
    pack,
    begin,
    end,
    length,
    scale_log2,  # scale * log2(e), since exponentials are of base 2
    S: tl.constexpr,
):
    """Attends with one pack of a row's queries to its positions [begin, end). Returns the weighted latents [rows,
    S.block_v], not normalised, the scores' maxima [ROWS] and the sums of the weights."""
    ROWS: tl.constexpr = S.rows
    BLOCK_V: tl.constexpr = S.block_v
    SIZE: tl.constexpr = S.value_dim + S.rope_dim
    c_dims, r_dims, lanes = tl.arange(0, BLOCK_V), tl.arange(0, S.block_r), tl.arange(0, S.tile)
    token, line, real = query_rows(row.to(tl.int64), pack, S, ROWS)  # of 32k prompt tokens with 128 heads that is much
    own = q + line[:, None] * SIZE
    q_c = tl.load(own + c_dims, mask=real[:, None] & (c_dims < S.value_dim), other=0.0)
    q_r = tl.load(own + S.value_dim + r_dims, mask=real[:, None] & (r_dims < S.rope_dim), other=0.0)
    if _INTERPRETED:  # the interpreter's products take bfloat16 for integers
        q_c, q_r = q_c.to(tl.float32), q_r.to(tl.float32)
    last_seen = (length - S.query_len + token)[:, None]
    # A place is looked up once for such a run of keys, and what is within it is known to the compiler.
    WIDTH: tl.constexpr = S.neighbours
    UNIT: tl.constexpr = SIZE & -SIZE
    runs, within = tl.arange(0, S.tile // WIDTH) * WIDTH, tl.arange(0, WIDTH)
    blocks = tl.load(table + (begin + runs) // S.block_size, mask=begin + runs < end, other=0)
    # A finite floor, not -inf: a query that sees nothing of a part then needs no guard against inf - inf.
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for start in tl.range(begin, end, S.tile):
        position = start + lanes
        inside = position < end
        first = (blocks * S.block_size + (start + runs) % S.block_size).to(tl.int64)
        # A reshape forgets what numbers are multiples of, without which loads would be narrow: so the last factor of
        # SIZE comes behind it, and no other, since a sum is shifted as its terms are.
        units = tl.reshape((first[:, None] + within[None, :]) * (SIZE // UNIT), (S.tile,))
        places = latents + units[:, None] * UNIT
        # What lies past the end is not even read: it may hold NaN, and 0 * NaN is NaN.
        c = tl.load(places + c_dims, mask=inside[:, None] & (c_dims < S.value_dim), other=0.0).to(q_c.dtype)
        r = tl.load(places + S.value_dim + r_dims, mask=inside[:, None] & (r_dims < S.rope_dim), other=0.0).to(
            q_r.dtype
        )
        # The next tile's blocks, a turn ahead, so that its loads need not wait for where they are.
        upcoming = start + S.tile + runs
        blocks = tl.load(table + upcoming // S.block_size, mask=upcoming < end, other=0)
        scores = tl.dot(q_c, tl.trans(c), input_precision="tf32x3")
        scores = tl.dot(q_r, tl.trans(r), scores, input_precision="tf32x3") * scale_log2
        visible = inside[None, :]
        if S.query_len > 1:  # one token sees all of [begin, end)
            visible = visible & (position[None, :] <= last_seen)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * rescale[:, None], input_precision="tf32x3")
        top = new_top
    return acc, top, total


# Integers are not specialised: a new batch size or table width must not compile anew in the middle of serving.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "seq_lens"])
def _mla_decode_kernel(
    out,
    q,
    latents,
    block_tables,
    seq_lens,
    parts,  # of flash_decode.py; None: rows are left whole
    tickets,  # None: parts are merged by another kernel
    table_stride,
    scale_log2,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    take_turn(PDL)
    pack, row = tl.program_id(0), tl.program_id(1)
    if parts is None:
        length = tl.load(seq_lens + row)
        begin = 0
        end = length
    else:
        row, length, begin, end = part_of(parts.fields, tl.program_id(1))
    if row < 0:  # there are fewer parts than programs
        return
    acc, top, total = _attend(
        q, latents, block_tables + row * table_stride, row, pack, begin, end, length, scale_log2, S
    )
    if parts is None:
        store_rows(out, acc / total[:, None], row.to(tl.int64), pack, S, S.rows)
    else:
        finish_part(out, acc, top, total, parts, tickets, row, S)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_parts_kernel(
    out,
    parts,
    num_parts,
    S: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,  # of the numbers, for each program
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program some numbers of a query of a row that has several parts."""
    take_turn(PDL)
    query, row, skipped = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK
    own, place = parts_of(parts.fields, row, num_parts, BLOCK_PARTS)
    if own == 1:
        return
    pack, within = query // S.rows, query % S.rows
    QUERIES: tl.constexpr = min(S.group * S.query_len, S.rows)
    first = (place * PACKS + pack) * QUERIES + within
    AT_ONCE: tl.constexpr = min(BLOCK_PARTS, 2**14 // BLOCK)
    found = parts.found + skipped
    merged = merge(found, parts.found_lse, first, PACKS * QUERIES, own, 1, S.value_dim, 1, BLOCK, AT_ONCE)
    token = query // S.group
    line = (row * S.query_len + token) * S.group + query % S.group
    dims = skipped + tl.arange(0, BLOCK)[None, :]
    tl.store(out + line.to(tl.int64) * S.value_dim + dims, merged.to(out.dtype.element_ty), mask=dims < S.value_dim)


def mla_decode(
    q: Tensor,
    latents: Tensor,
    rank: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    query_len: int,
    out: Tensor | None = None,
    parts: Parts | None = None,
) -> Tensor:
    """Attention of each row's last query_len tokens to all of its tokens, causal among themselves.

    q [R * query_len, num_heads, rank + rope_dim] and latents [num_blocks, block_size, rank + rope_dim], both contiguous
    and of one dtype (fp32, bf16 or fp16), or latents float8_e4m3fn; block_tables [R, W] int32; seq_lens [R] int32, the
    tokens of each row that are in the cache, at least query_len. scale multiplies q.k. parts: what split_latent_rows
    gives, which several layers can share; None: no row is split. Returns [R * query_len, num_heads, rank] of q's dtype,
    in `out`, contiguous, where it is given.

    Safe in a CUDA graph: block_tables and seq_lens may change between replays. The first call on a device must not be
    under capture (RuntimeError). Raises ValueError for shapes that it does not take.
    """
    num_rows = seq_lens.shape[0]
    shape, options = _shape(q, latents, rank, query_len, None if parts is None else num_rows)
    out = q.new_empty(*q.shape[:2], rank) if out is None else out
    if not q.numel():
        return out
    apart, pdl = num_rows <= MERGED_APART, launch_options(q.device)
    num_parts = num_rows if parts is None else len(parts.fields)
    _mla_decode_kernel[(shape.packs, num_parts)](
        out, q, latents, block_tables, seq_lens, parts, None if parts is None or apart else tickets_of(q.device),
        block_tables.stride(0), scale * math.log2(math.e), shape, **options, **pdl,
    )  # fmt: skip
    if parts is not None and apart:
        # One row has the most parts to merge: its programs are smaller, and so are more.
        block = shape.block_v if rank % 128 else 64 if num_rows == 1 else 128
        _merge_parts_kernel[(q.shape[1] * query_len, num_rows, triton.cdiv(rank, block))](
            out, parts, num_parts, shape, PACKS=shape.packs, BLOCK=block,
            BLOCK_PARTS=triton.next_power_of_2(num_parts), num_warps=4, **pdl,
        )  # fmt: skip
    return out


def split_latent_rows(q: Tensor, latents: Tensor, rank: int, seq_lens: Tensor, *, query_len: int) -> Parts | None:
    """The parts of all rows, for mla_decode with the same arguments. None where they are too many to be split."""
    shape, _ = _shape(q, latents, rank, query_len, len(seq_lens))
    if len(seq_lens) * shape.packs > MAX_TICKETS:
        return None
    return make_parts(
        q, seq_lens, (shape.packs, shape.queries, rank), tile=shape.tile, window=None, query_len=query_len,
        whole_tiles=1, at_most=shape.tile == FILLS_AN_SM,
    )  # fmt: skip


def _shape(
    q: Tensor, latents: Tensor, rank: int, query_len: int, num_split: int | None
) -> tuple[LatentShape, dict[str, Any]]:
    """What the kernel is compiled for, and its launch options. num_split: rows; None: they are left whole, and in what
    order one is summed has to do with no other."""
    num_heads, (_, block_size, size), itemsize = q.shape[1], latents.shape, q.element_size()
    refusal = LIMITS.refusal(size, block_size, q.dtype, rank)
    if refusal is not None:
        raise ValueError(f"MLA decode: {refusal}")
    block_c, block_r = (max(16, triton.next_power_of_2(dims)) for dims in (rank, size - rank))
    queries = num_heads * query_len
    # A matrix product has at least 16 rows, and the tensor cores of a Hopper GPU take 64. Each reads all latents anew.
    rows = 64 if queries > 32 and itemsize == 2 else 32 if queries > 16 else 16
    # Two tiles of 64 latents take 147 KB, beside the queries' 74 KB; with 16 queries there is room for a third, if rows
    # are so few that all parts run at once. Else three of 32, and room for two programs; in fp32 one of 16.
    few = rows == 16 and num_split is not None and 2 * num_split <= num_sms(q.device)
    tile, stages = (16, 1) if itemsize == 4 else (64, 3) if few else (64, 2) if rows == 64 else (32, 3)
    shape = LatentShape(
        num_heads, query_len, 1, rank, block_size, rows, block_c, size - rank, block_r, tile, math.gcd(block_size, tile)
    )
    return shape, {"num_warps": 8 if block_c * rows > 8192 else 4, "num_stages": stages}


def mla_decode_reference(
    q: Tensor, latents: Tensor, rank: int, block_tables: Tensor, seq_lens: Tensor, *, scale: float, query_len: int
) -> Tensor:
    """What mla_decode computes, row by row in fp32: keys of one head, whose first numbers are its values."""
    keys = latents[:, :, None].to(q.dtype)
    return paged_decode_reference(
        q, keys, keys[..., :rank], block_tables, seq_lens, scale=scale, window=None, query_len=query_len
    )
