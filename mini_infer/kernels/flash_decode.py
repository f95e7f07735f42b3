"""Flash Decoding: decode attention that splits long rows over several programs (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    row 0  | part | part | part | part | part |      each part one program a KV head; the last to finish merges them
    row 1  | part |
    row 2  | part | part |

A part's size is what gives every SM work, given the lengths of all rows. It is computed on the device from seq_lens,
once a step for all layers (split_rows). So short rows are not split, and no length shows in the grid: a CUDA graph
stays right while the lengths change. The grid has as many programs as there can be parts, and those too many exit.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.paged_decode import (
    UNBOUNDED,
    attend,
    decode_shape,
    first_position,
    num_sms,
    paged_decode,
    paged_decode_reference,
    store_rows,
    stored,
)

WHOLE_TILES = 6  # a row of no more is not worth a merge
LONG_TILES = 14  # with longer parts an SM gets two programs, which hide each other's waiting; with shorter ones, one
MAX_ROWS = 1024  # of a batch: for each part, all lengths are read
MAX_TICKETS = 2**16
_FIELDS = tl.constexpr(8)  # of a part: row (-1: none), its length, begin, end, the row's first part and their number


@triton.jit(do_not_specialize=["num_rows", "target", "window"], do_not_specialize_on_alignment=["seq_lens"])
def _split_rows_kernel(
    parts,  # [S, _FIELDS]
    seq_lens,
    num_rows,
    target,  # parts to make of the whole batch, give or take one a row; twice as many of a long one
    window,
    MAX_ROWS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    LONG_TILES: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TILE: tl.constexpr,
    AT_MOST: tl.constexpr,  # target is not passed, unless there are more rows
    MOST_PARTS: tl.constexpr,  # of a row
):
    """One program a row, and more for places that are left over: the longest parts come first, since programs start in
    the order of their places, and a long one that starts last keeps few SMs busy while the others wait for it."""
    own = tl.program_id(0)
    rows = tl.arange(0, MAX_ROWS)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    tiles = tl.cdiv(lengths - first_position(lengths, window, QUERY_LEN), TILE)
    all_tiles = tl.sum(tiles, 0)
    if not AT_MOST:
        target = tl.where(all_tiles > target * LONG_TILES, 2 * target, target)
    counts = _num_parts(tiles, all_tiles, target, WHOLE_TILES, AT_MOST)
    if own >= tl.sum(counts, 0):
        tl.store(parts + own * _FIELDS, -1)
    if own >= num_rows:
        return
    is_own = rows == own
    length, own_tiles, num_parts = _of(is_own, lengths), _of(is_own, tiles), _of(is_own, counts)
    sizes = tl.cdiv(tiles, tl.maximum(counts, 1))
    size = _of(is_own, sizes)
    first_part = _of((sizes > size) | ((sizes == size) & (rows < own)), counts)
    first = first_position(length, window, QUERY_LEN)
    part = tl.arange(0, MOST_PARTS)
    fields, real = parts + (first_part + part) * _FIELDS, part < num_parts
    tl.store(fields, own, mask=real)
    tl.store(fields + 1, length, mask=real)
    tl.store(fields + 2, first + own_tiles * part // num_parts * TILE, mask=real)
    tl.store(fields + 3, tl.minimum(first + own_tiles * (part + 1) // num_parts * TILE, length), mask=real)
    tl.store(fields + 4, first_part, mask=real)
    tl.store(fields + 5, num_parts, mask=real)


@triton.jit
def _of(chosen, numbers):
    """The sum of those that are chosen."""
    return tl.sum(tl.where(chosen, numbers, 0), 0)


@triton.jit
def _num_parts(tiles, all_tiles, target, WHOLE_TILES: tl.constexpr, AT_MOST: tl.constexpr):
    """A row's share of the target, rounded: rows of one length stay whole rather than become a part and a bit. AT_MOST:
    rounded down."""
    rounded = 0 if AT_MOST else all_tiles
    share = (2 * target * tiles + rounded) // (2 * all_tiles)
    return tl.minimum(tl.where(tiles > WHOLE_TILES, tl.maximum(share, 1), 1), tiles)


class Parts(NamedTuple):
    """How a step's rows are split, and where programs leave what they found: shared by layers, which take turns."""

    fields: Tensor  # [S, _FIELDS] int32
    found: Tensor  # [S, packs, queries, value_dim] of q's dtype: the results of parts, where a row has several
    found_lse: Tensor  # [S, packs, queries] fp32: log2 of their sums of exponentials


def split_rows(
    q: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, *, window: int | None, query_len: int
) -> Parts | None:
    """The parts of all rows, for flash_decode with the same arguments. None beyond MAX_ROWS rows, which flash_decode
    leaves whole."""
    shape, _ = decode_shape(q, keys, values, query_len)
    found = shape.packs, shape.queries, shape.value_dim
    return make_parts(q, seq_lens, found, tile=shape.slices * shape.slice, window=window, query_len=query_len)


def make_parts(
    q: Tensor,
    seq_lens: Tensor,
    found: tuple[int, int, int],
    *,
    tile: int,
    window: int | None,
    query_len: int,
    whole_tiles: int = WHOLE_TILES,
    at_most: bool = False,
) -> Parts | None:
    """As split_rows, for rows of tiles of so many keys, of each of whose parts is found what `found` says: packs,
    queries, value_dim. q has the dtype. A row of no more than whole_tiles is not split. at_most: programs fill an SM,
    so there are no more parts than SMs, unless there are more rows."""
    num_rows, num_packs = seq_lens.shape[0], found[0]
    if num_rows > MAX_ROWS:
        return None
    target = max(1, num_sms(q.device) // num_packs)
    # Rounded down, the shares of rows that are split come to the target at most, and the other rows have a part each.
    # One program more than SMs would start when the first had ended, and the next kernel only then.
    num_parts = num_rows - 1 + target if at_most else num_rows + 2 * target
    fields = torch.empty((num_parts, _FIELDS.value), dtype=torch.int32, device=q.device)
    _split_rows_kernel[(num_parts,)](
        fields, seq_lens, num_rows, target, UNBOUNDED if window is None else window,
        MAX_ROWS=next(size for size in (1, 32, 256, MAX_ROWS) if num_rows <= size), WHOLE_TILES=whole_tiles,
        LONG_TILES=LONG_TILES, QUERY_LEN=query_len, TILE=tile, AT_MOST=at_most,
        MOST_PARTS=triton.next_power_of_2(num_parts - num_rows + 1),
    )  # fmt: skip
    numbers = torch.empty((num_parts, *found), dtype=q.dtype, device=q.device)
    return Parts(fields, numbers, torch.empty(numbers.shape[:3], dtype=torch.float32, device=q.device))


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables"],
)
def _flash_decode_kernel(
    out,
    q,
    keys,
    values,
    block_tables,
    kv_scales,
    parts,
    tickets,  # [R * packs] int32, zeros before and after: how many parts of a row are finished
    table_stride,
    window,
    scale_log2,
    S: tl.constexpr,
):
    # KV heads vary fastest: programs that start together read neighbouring heads of the same tokens.
    pack = tl.program_id(0)
    row, length, begin, end = part_of(parts.fields, tl.program_id(1))
    if row < 0:
        return
    acc, top, total = attend(
        q, keys, values, block_tables + row * table_stride, kv_scales, row, pack,
        begin, end, length, window, scale_log2,
        S,
    )  # fmt: skip
    finish_part(out, acc, top, total, parts, tickets, row, S)


@triton.jit
def part_of(fields, place):
    """A part's row (-1: none), the row's length, and the positions [begin, end) that are the part's."""
    fields += place * _FIELDS
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)


@triton.jit
def parts_of(fields, row, num_parts, BLOCK: tl.constexpr):
    """How many parts a row has, and the first of them."""
    place = tl.arange(0, BLOCK)
    own = tl.load(fields + place * _FIELDS, mask=place < num_parts, other=-1) == row
    return tl.sum(own.to(tl.int32), 0), tl.min(tl.where(own, place, BLOCK), 0)


@triton.jit
def finish_part(
    out,
    acc,  # [ROWS, BLOCK_V], with top and total as of `attend`
    top,
    total,
    parts,
    tickets,
    row,
    S: tl.constexpr,
):
    """What a program of a grid [packs, parts] found, to where it belongs: a whole row's to `out`; else to `found`,
    which the last of the row's programs merges, or another kernel where tickets are None."""
    pack, num_packs = tl.program_id(0), tl.num_programs(0)
    place = tl.program_id(1)
    QUERIES: tl.constexpr = min(S.group * S.query_len, S.rows)
    MERGE_ROWS: tl.constexpr = triton.next_power_of_2(QUERIES)
    fields = parts.fields + place * _FIELDS
    first_part, num_parts = tl.load(fields + 4), tl.load(fields + 5)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # some queries may see nothing of this part
    if num_parts == 1:
        store_rows(out, acc, row, pack, S, S.rows)
    else:
        query = tl.arange(0, S.rows)
        dims = tl.arange(0, S.block_v)
        line = (place * num_packs + pack) * QUERIES + query
        real = query < QUERIES
        tl.store(parts.found + line[:, None] * S.value_dim + dims, acc, mask=real[:, None] & (dims < S.value_dim))
        tl.store(parts.found_lse + line, top + tl.log2(total), mask=real)
        if tickets is not None:
            ticket = tickets + row * num_packs + pack
            tl.debug_barrier()  # the ticket speaks for all threads
            if tl.atomic_add(ticket, 1, sem="acq_rel") == num_parts - 1:
                tl.store(ticket, 0)  # for the next launch
                at_once: tl.constexpr = min(32, max(1, 2**14 // (MERGE_ROWS * S.block_v)))
                merged = merge(
                    parts.found, parts.found_lse, (first_part * num_packs + pack) * QUERIES, num_packs * QUERIES,
                    num_parts, QUERIES, S.value_dim, MERGE_ROWS, S.block_v, at_once,
                )  # fmt: skip
                store_rows(out, merged, row, pack, S, MERGE_ROWS)


@triton.jit
def merge(
    found,
    found_lse,
    first_line,
    stride,  # lines from part to part
    num_parts,
    QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,  # at a time
):
    """The parts of one row's pack, weighted by their sums of exponentials. [ROWS, BLOCK_V]"""
    query = tl.minimum(tl.arange(0, ROWS), QUERIES - 1)
    dims = tl.arange(0, BLOCK_V)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
    for start in tl.range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        line = first_line + tl.minimum(part, num_parts - 1)[:, None] * stride + query
        # Two dimensions, of which the threads go along the fastest: each then holds its elements of all parts, and adds
        # them up alone. With three, versions of Triton differ on which of the others comes next.
        flat = tl.reshape(line, (PARTS * ROWS,))[:, None] * VALUE_DIM + dims
        x = tl.load(found + flat, mask=dims < VALUE_DIM, other=0.0)
        lse = tl.load(found_lse + line)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.where(part[:, None] < num_parts, tl.exp2(lse - new_top), 0.0)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 0)
        x = tl.reshape(x, (PARTS, ROWS, BLOCK_V)).to(tl.float32)
        acc = acc * rescale[:, None] + tl.sum(x * weights[:, :, None], 0)
        top = new_top
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
    out: Tensor | None = None,
    kv_scales: Tensor | None = None,
    parts: Parts | None = None,
) -> Tensor:
    """paged_decode, faster: the same arguments, result and errors, and as safe in a CUDA graph.

    parts is what split_rows gives, where several layers can share it. It is made here where it is None.

    The first call on a device must not be under capture (RuntimeError). Calls on one device share their tickets, so
    they must not overlap: one stream, or streams that wait for each other.
    """
    (shape, options), num_rows = decode_shape(q, keys, values, query_len), seq_lens.shape[0]
    num_packs = shape.packs
    if num_rows > MAX_ROWS or num_rows * num_packs > MAX_TICKETS:
        return paged_decode(
            q, keys, values, block_tables, seq_lens, scale=scale, window=window, query_len=query_len, out=out,
            kv_scales=kv_scales,
        )  # fmt: skip
    out = q.new_empty(*q.shape[:2], values.shape[3]) if out is None else out
    if not q.numel():
        return out
    if parts is None:
        parts = split_rows(q, keys, values, seq_lens, window=window, query_len=query_len)
    assert parts is not None, "more rows have been left whole above"
    # A deeper pipeline leaves room for two programs an SM instead of three. The GPU hands out programs three to an SM
    # where the grid has enough of them, those that only exit included, and a few hundred long ones end up unevenly.
    deep = num_rows > 32 and num_rows * num_packs <= 4 * num_sms(q.device)
    options |= {"num_stages": 4} if deep else {}
    _flash_decode_kernel[(num_packs, parts.fields.shape[0])](
        out, q, *stored(keys, values), block_tables, kv_scales, parts, tickets_of(q.device), block_tables.stride(0),
        UNBOUNDED if window is None else window, scale * math.log2(math.e), shape, **options,
    )  # fmt: skip
    return out


flash_decode_reference = paged_decode_reference


@functools.cache
def tickets_of(device: torch.device) -> Tensor:
    """Zeros, and every launch leaves them so. [MAX_TICKETS] int32"""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("flash_decode must be called once on a device before it is captured in a CUDA graph")
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)
