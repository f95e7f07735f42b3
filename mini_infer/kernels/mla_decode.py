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
from mini_infer.kernels.paged_decode import packs, paged_decode_reference, query_rows, store_rows
from mini_infer.kernels.pdl import launch_options

# Ranks are padded to a power of two by masks; the sums of more would not fit into the registers.
LIMITS = AttentionLimits(
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    head_sizes=range(2, 577),
    unequal_values=True,
    **FP8_CACHE,
)
MERGED_APART = 32  # rows of a batch, up to which parts are merged by a kernel of their own
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attends with one pack of a row's queries to its positions [begin, end). Returns the weighted latents [ROWS,
    BLOCK_C], not normalised, the scores' maxima [ROWS] and the sums of the weights."""
    SIZE: tl.constexpr = RANK + ROPE_DIM
    c_dims, r_dims, lanes = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R), tl.arange(0, TILE)
    token, line, real = query_rows(row, pack, GROUP, QUERY_LEN, 1, ROWS)
    own = q + line[:, None] * SIZE
    q_c = tl.load(own + c_dims, mask=real[:, None] & (c_dims < RANK), other=0.0)
    q_r = tl.load(own + RANK + r_dims, mask=real[:, None] & (r_dims < ROPE_DIM), other=0.0)
    if _INTERPRETED:  # the interpreter's products take bfloat16 for integers
        q_c, q_r = q_c.to(tl.float32), q_r.to(tl.float32)
    last_seen = (length - QUERY_LEN + token)[:, None]
    blocks = tl.load(table + (begin + lanes) // BLOCK_SIZE, mask=begin + lanes < end, other=0)
    # A finite floor, not -inf: a query that sees nothing of a part then needs no guard against inf - inf.
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for start in tl.range(begin, end, TILE):
        position = start + lanes
        inside = position < end
        places = latents + (blocks * BLOCK_SIZE + position % BLOCK_SIZE).to(tl.int64)[:, None] * SIZE
        # What lies past the end is not even read: it may hold NaN, and 0 * NaN is NaN.
        c = tl.load(places + c_dims, mask=inside[:, None] & (c_dims < RANK), other=0.0).to(q_c.dtype)
        r = tl.load(places + RANK + r_dims, mask=inside[:, None] & (r_dims < ROPE_DIM), other=0.0).to(q_r.dtype)
        # The next tile's blocks, a turn ahead, so that its loads need not wait for where they are.
        upcoming = position + TILE
        blocks = tl.load(table + upcoming // BLOCK_SIZE, mask=upcoming < end, other=0)
        scores = tl.dot(q_c, tl.trans(c), input_precision="tf32x3")
        scores = tl.dot(q_r, tl.trans(r), scores, input_precision="tf32x3") * scale_log2
        visible = inside[None, :]
        if QUERY_LEN > 1:  # one token sees all of [begin, end)
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
    parts,  # as in flash_decode.py; None: rows are left whole
    found,
    found_lse,
    tickets,  # None: parts are merged by another kernel
    table_stride,
    scale_log2,
    QUERIES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pack, row = tl.program_id(0), tl.program_id(1)
    if parts is None:
        length = tl.load(seq_lens + row)
        begin = 0
        end = length
    else:
        row, length, begin, end = part_of(parts, tl.program_id(1))
    if row < 0:  # there are fewer parts than programs
        return
    acc, top, total = _attend(
        q, latents, block_tables + row * table_stride, row, pack, begin, end, length, scale_log2,
        GROUP, QUERY_LEN, RANK, ROPE_DIM, BLOCK_SIZE, ROWS, BLOCK_C, BLOCK_R, TILE,
    )  # fmt: skip
    if parts is None:
        store_rows(out, acc / total[:, None], row, pack, GROUP, QUERY_LEN, 1, RANK, ROWS, BLOCK_C)
    else:
        finish_part(
            out, acc, top, total, parts, found, found_lse, tickets, row,
            QUERIES, MERGE_ROWS, GROUP, QUERY_LEN, 1, RANK, ROWS, BLOCK_C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_parts"])
def _merge_parts_kernel(
    out,
    parts,
    found,
    found_lse,
    num_parts,
    NUM_PACKS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,  # of the numbers, for each program
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program some numbers of a query of a row that has several parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    query, row, skipped = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_C
    own, place = parts_of(parts, row, num_parts, BLOCK_PARTS)
    if own == 1:
        return
    pack, within = query // ROWS, query % ROWS
    first = (place * NUM_PACKS + pack) * QUERIES + within
    PARTS: tl.constexpr = min(BLOCK_PARTS, 2**14 // BLOCK_C)
    merged = merge(found + skipped, found_lse, first, NUM_PACKS * QUERIES, own, 1, RANK, 1, BLOCK_C, PARTS)
    token = query // GROUP
    line = (row * QUERY_LEN + token) * GROUP + query % GROUP
    dims = skipped + tl.arange(0, BLOCK_C)[None, :]
    tl.store(out + line.to(tl.int64) * RANK + dims, merged.to(out.dtype.element_ty), mask=dims < RANK)


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
    shape, num_rows = _shape(q, latents, rank, query_len), seq_lens.shape[0]
    num_packs = _packs(shape)
    out = q.new_empty(*q.shape[:2], rank) if out is None else out
    if not q.numel():
        return out
    apart, pdl = num_rows <= MERGED_APART, launch_options(q.device)
    found = None if parts is None else (parts.fields, parts.found, parts.found_lse)
    num_parts = num_rows if parts is None else len(parts.fields)
    queries = min(shape["GROUP"] * query_len, shape["ROWS"])
    _mla_decode_kernel[(num_packs, num_parts)](
        out,
        q,
        latents,
        block_tables,
        seq_lens,
        *(found or (None,) * 3),
        None if found is None or apart else tickets_of(q.device),
        block_tables.stride(0),
        scale * math.log2(math.e),
        QUERIES=queries,
        MERGE_ROWS=triton.next_power_of_2(queries),
        **shape,
        **pdl,
    )
    if found is not None and apart:
        block_c = shape["BLOCK_C"] if rank % 128 else 128
        _merge_parts_kernel[(q.shape[1] * query_len, num_rows, triton.cdiv(rank, block_c))](
            out,
            *found,
            num_parts,
            NUM_PACKS=num_packs,
            QUERIES=queries,
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
            BLOCK_C=block_c,
            **{key: shape[key] for key in ("GROUP", "QUERY_LEN", "RANK", "ROWS")},
            num_warps=4,
            **pdl,
        )
    return out


def split_latent_rows(q: Tensor, latents: Tensor, rank: int, seq_lens: Tensor, *, query_len: int) -> Parts | None:
    """The parts of all rows, for mla_decode with the same arguments. None where they are too many to be split."""
    shape = _shape(q, latents, rank, query_len)
    if len(seq_lens) * _packs(shape) > MAX_TICKETS:
        return None
    found = _packs(shape), min(shape["GROUP"] * query_len, shape["ROWS"]), rank
    return make_parts(q, seq_lens, found, tile=shape["TILE"], window=None, query_len=query_len, whole_tiles=1)


def _packs(shape: dict[str, Any]) -> int:
    return packs(shape | {"NUM_KV_HEADS": 1})


def _shape(q: Tensor, latents: Tensor, rank: int, query_len: int) -> dict[str, Any]:
    """The compile-time arguments."""
    num_heads, (_, block_size, size), itemsize = q.shape[1], latents.shape, q.element_size()
    refusal = LIMITS.refusal(size, block_size, q.dtype, rank)
    if refusal is not None:
        raise ValueError(f"MLA decode: {refusal}")
    block_c, block_r = (max(16, triton.next_power_of_2(dims)) for dims in (rank, size - rank))
    queries = num_heads * query_len
    # A matrix product has at least 16 rows, and the tensor cores of a Hopper GPU take 64. Each reads all latents anew.
    rows = 64 if queries > 32 and itemsize == 2 else 32 if queries > 16 else 16
    # Two tiles of 64 latents in 147 KB, beside the queries' 74 KB; or three of 32, and room for two programs; in fp32
    # one of 16.
    tile, stages = (16, 1) if itemsize == 4 else (64, 2) if rows == 64 else (32, 3)
    return {
        "GROUP": num_heads,
        "QUERY_LEN": query_len,
        "RANK": rank,
        "ROPE_DIM": size - rank,
        "BLOCK_SIZE": block_size,
        "ROWS": rows,
        "BLOCK_C": block_c,
        "BLOCK_R": block_r,
        "TILE": tile,
        "num_warps": 8 if block_c * rows > 8192 else 4,
        "num_stages": stages,
    }


def mla_decode_reference(
    q: Tensor, latents: Tensor, rank: int, block_tables: Tensor, seq_lens: Tensor, *, scale: float, query_len: int
) -> Tensor:
    """What mla_decode computes, row by row in fp32: keys of one head, whose first numbers are its values."""
    keys = latents[:, :, None].to(q.dtype)
    return paged_decode_reference(
        q, keys, keys[..., :rank], block_tables, seq_lens, scale=scale, window=None, query_len=query_len
    )
