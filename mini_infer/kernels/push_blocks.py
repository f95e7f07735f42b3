"""KV blocks into another GPU's memory, which a kernel writes to by its address, over NVLink where there is any: blocks
that lie apart, or parts of them. Runs of whole blocks are left to copy engines (transfer/memory.py).

A few programs keep the link busy, and leave the other multiprocessors to the step that runs beside the copy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE_BYTES = 16384
_PROGRAMS = 32  # of a copy at once: half a MiB under way


@triton.jit(  # one variant for any number of blocks: none is compiled in the middle of a load
    do_not_specialize=["count", "num_tiles"], do_not_specialize_on_alignment=["here_ptr", "there_ptr"]
)
def _push_kernel(
    source_ptr,
    target_ptr,
    here_ptr,
    there_ptr,
    count,
    source_plane,
    target_plane,
    source_block,
    target_block,
    source_row,
    target_row,
    num_tiles,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile is a part of one block of one plane, whose rows may lie apart: `..._plane`, `..._block` and `..._row`
    words from one to the next."""
    parts: tl.constexpr = (ROWS * WORDS + TILE - 1) // TILE
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        part, place = tile % parts, tile // parts
        plane, index = (place // count).to(tl.int64), place % count
        words = part * TILE + tl.arange(0, TILE)
        row, word, exists = words // WORDS, words % WORDS, words < ROWS * WORDS
        source = source_ptr + plane * source_plane + tl.load(here_ptr + index) * source_block
        target = target_ptr + plane * target_plane + tl.load(there_ptr + index) * target_block
        tl.store(target + row * target_row + word, tl.load(source + row * source_row + word, mask=exists), mask=exists)


def push_blocks(source: Tensor, target: Tensor, here: Tensor, there: Tensor) -> None:
    """Copies blocks `here` of a layer to blocks `there` of another store's.

    Args:
        source: [planes, num_blocks, rows, words] int64 or uint8, of which words lie together.
        target: [planes, any number of blocks, rows, words], likewise, in memory that this device reaches.
        here, there: [n] int64.
    """
    planes, _, rows, words = source.shape
    tile = min(triton.next_power_of_2(rows * words), _TILE_BYTES // source.itemsize)
    num_tiles = planes * len(here) * triton.cdiv(rows * words, tile)
    if num_tiles:
        apart = [tensor.stride(dim) for dim in range(3) for tensor in (source, target)]
        grid = (min(num_tiles, _PROGRAMS),)
        _push_kernel[grid](
            source, target, here, there, len(here), *apart, num_tiles, ROWS=rows, WORDS=words, TILE=tile, num_warps=8
        )
