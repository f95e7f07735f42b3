"""Flash Decoding: decode attention that splits long rows over several programs (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    row 0  | part | part | part | part | part |      each part one program a KV head; the last to finish merges them
    row 1  | part |
    row 2  | part | part |

A part's size is what gives every SM work, given the lengths of all rows. Each program computes it on the device from
seq_lens, and with it its own row and part. So short rows are not split, and no length shows in the grid: a CUDA graph
stays right while the lengths change. The grid has as many programs as there can be parts, and those too many exit.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.paged_decode import (
    UNBOUNDED,
    attend,
    decode_shape,
    first_position,
    packs,
    paged_decode,
    paged_decode_reference,
    store_rows,
)
from mini_infer.kernels.pdl import launch_options

MAX_PARTS = 128  # of a row: one program merges them all
WHOLE_TILES = 2  # a row of no more is not worth a merge
LONG_TILES = 14  # with longer parts an SM gets two programs, which hide each other's waiting; with shorter ones, one
MAX_ROWS = 1024  # of a batch: each program reads all lengths
MAX_TICKETS = 2**16


@triton.jit(
    do_not_specialize=["num_rows", "target", "table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def _flash_decode_kernel(
    out,
    q,
    keys,
    values,
    block_tables,
    seq_lens,
    found,  # [segments, packs, QUERIES, HEAD_DIM] of q's dtype: the results of parts, where a row has several
    found_lse,  # [segments, packs, QUERIES] fp32: log2 of their sums of exponentials
    tickets,  # [R * packs] int32, zeros before and after: how many parts of a row are finished
    num_rows,
    target,  # parts to make of the whole batch, give or take one a row; twice as many of a long one
    table_stride,
    window,
    scale_log2,
    MAX_ROWS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    LONG_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TILE: tl.constexpr = SLICES * SLICE
    # KV heads vary fastest: programs that start together read neighbouring heads of the same tokens.
    pack, num_packs = tl.program_id(0), tl.num_programs(0)
    segment = tl.program_id(1)  # parts are counted through the batch
    rows = tl.arange(0, MAX_ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    tiles = tl.cdiv(lengths - first_position(lengths, window, QUERY_LEN), TILE)
    all_tiles = tl.sum(tiles, 0)
    target = tl.where(all_tiles > target * LONG_TILES, 2 * target, target)
    parts = _num_parts(tiles, all_tiles, target, WHOLE_TILES)
    ends = tl.cumsum(parts, 0)
    if segment >= tl.max(ends, 0):
        return
    row = tl.sum((ends <= segment).to(tl.int32), 0)
    part = segment - tl.sum(tl.where(ends <= segment, parts, 0), 0)
    length = tl.load(seq_lens + row)
    first = first_position(length, window, QUERY_LEN)
    own_tiles = tl.cdiv(length - first, TILE)
    num_parts = _num_parts(own_tiles, all_tiles, target, WHOLE_TILES)
    begin = first + own_tiles * part // num_parts * TILE
    end = tl.minimum(first + own_tiles * (part + 1) // num_parts * TILE, length)
    acc, top, total = attend(
        q, keys, values, block_tables + row * table_stride, row, pack,
        begin, end, length, window, scale_log2,
        GROUP, QUERY_LEN, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROWS, BLOCK_D, SLICES, SLICE, PDL,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # some queries may see nothing of this part
    if num_parts == 1:
        store_rows(out, acc, row, pack, GROUP, QUERY_LEN, NUM_KV_HEADS, HEAD_DIM, ROWS, BLOCK_D)
    else:
        query = tl.arange(0, ROWS)
        dims = tl.arange(0, BLOCK_D)
        line = (segment * num_packs + pack) * QUERIES + query
        real = query < QUERIES
        tl.store(found + line[:, None] * HEAD_DIM + dims, acc, mask=real[:, None] & (dims < HEAD_DIM))
        tl.store(found_lse + line, top + tl.log2(total), mask=real)
        ticket = tickets + row * num_packs + pack
        tl.debug_barrier()  # the ticket speaks for all threads
        if tl.atomic_add(ticket, 1, sem="acq_rel") == num_parts - 1:
            tl.store(ticket, 0)  # for the next launch
            merged = _merge(
                found, found_lse, ((segment - part) * num_packs + pack) * QUERIES, num_packs * QUERIES, num_parts,
                MAX_PARTS, QUERIES, HEAD_DIM, MERGE_ROWS, MERGE_PARTS, BLOCK_D,
            )  # fmt: skip
            store_rows(out, merged, row, pack, GROUP, QUERY_LEN, NUM_KV_HEADS, HEAD_DIM, MERGE_ROWS, BLOCK_D)


@triton.jit
def _num_parts(tiles, all_tiles, target, WHOLE_TILES: tl.constexpr):
    """A row's share of the target, rounded: rows of one length stay whole rather than become a part and a bit."""
    share = (2 * target * tiles + all_tiles) // (2 * all_tiles)
    return tl.minimum(tl.where(tiles > WHOLE_TILES, tl.maximum(share, 1), 1), tiles)


@triton.jit
def _merge(
    found,
    found_lse,
    first_line,
    stride,  # lines from part to part
    num_parts,
    MAX_PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The parts of one row's pack, weighted by their sums of exponentials. [ROWS, BLOCK_D]"""
    query = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, BLOCK_D)
    every = tl.arange(0, MAX_PARTS)
    lse = first_line + every * stride + query
    lse = tl.load(found_lse + lse, mask=(every < num_parts) & (query < QUERIES), other=float("-inf"))
    top = tl.maximum(tl.max(lse, 1), -1e30)
    total = tl.sum(tl.exp2(lse - top[:, None]), 1)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in tl.range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        line = first_line + part * stride + query
        real = (part < num_parts) & (query < QUERIES)
        wide = real[:, :, None] & (dims < HEAD_DIM)
        x = tl.load(found + line[:, :, None] * HEAD_DIM + dims, mask=wide, other=0.0).to(tl.float32)
        weight = tl.exp2(tl.load(found_lse + line, mask=real, other=float("-inf")) - top[:, None])
        acc += tl.sum(x * weight[:, :, None], 1)
    return acc / total[:, None]


def flash_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    query_len: int,
) -> Tensor:
    """paged_decode, faster: the same arguments, result and errors, and as safe in a CUDA graph.

    The first call on a device must not be under capture (RuntimeError). Calls on one device share their tickets, so
    they must not overlap: one stream, or streams that wait for each other.
    """
    shape, num_rows = decode_shape(q, keys, query_len), seq_lens.shape[0]
    num_packs = packs(shape)
    if num_rows > MAX_ROWS or num_rows * num_packs > MAX_TICKETS:
        return paged_decode(q, keys, values, block_tables, seq_lens, scale=scale, window=window, query_len=query_len)
    out = torch.empty_like(q)
    if not q.numel():
        return out
    queries, head_dim = min(shape["GROUP"] * query_len, shape["ROWS"]), shape["HEAD_DIM"]
    target = max(1, min(_num_sms(q.device) // num_packs, MAX_PARTS // 2))
    segments = num_rows + 2 * target
    merge_rows = triton.next_power_of_2(queries)
    _flash_decode_kernel[(num_packs, segments)](
        out,
        q,
        keys,
        values,
        block_tables,
        seq_lens,
        torch.empty((segments, num_packs, queries, head_dim), dtype=q.dtype, device=q.device),
        torch.empty((segments, num_packs, queries), dtype=torch.float32, device=q.device),
        _tickets(q.device),
        num_rows,
        target,
        block_tables.stride(0),
        UNBOUNDED if window is None else window,
        scale * math.log2(math.e),
        MAX_ROWS=next(size for size in (1, 32, 256, MAX_ROWS) if num_rows <= size),
        MAX_PARTS=MAX_PARTS,
        WHOLE_TILES=WHOLE_TILES,
        LONG_TILES=LONG_TILES,
        QUERIES=queries,
        MERGE_ROWS=merge_rows,
        MERGE_PARTS=max(1, 2**14 // (merge_rows * shape["BLOCK_D"])),
        **shape,
        **launch_options(q.device),
    )
    return out


flash_decode_reference = paged_decode_reference


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors, or a few on a CPU, where the interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Zeros, and every launch leaves them so. [MAX_TICKETS] int32"""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("flash_decode must be called once on a device before it is captured in a CUDA graph")
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)
