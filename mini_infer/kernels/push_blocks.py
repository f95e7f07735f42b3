"""KV blocks into another GPU's memory, which a kernel writes to by its address, over NVLink where there is any.

A few programs keep the link busy, and leave the other multiprocessors to the step that runs beside the copy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE_BYTES = 16384
_PROGRAMS = 32  # of a copy at once: half a MiB under way


@triton.jit
def _push_kernel(
    source_ptr,
    target_ptr,
    here_ptr,
    there_ptr,
    count,
    source_plane,
    target_plane,
    num_tiles,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile is a part of one block of one plane: `source_plane` and `target_plane` words from one to the next."""
    parts: tl.constexpr = (WORDS + TILE - 1) // TILE
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        part, place = tile % parts, tile // parts
        plane, index = (place // count).to(tl.int64), place % count
        words = part * TILE + tl.arange(0, TILE)
        source = source_ptr + plane * source_plane + tl.load(here_ptr + index) * WORDS
        target = target_ptr + plane * target_plane + tl.load(there_ptr + index) * WORDS
        tl.store(target + words, tl.load(source + words, mask=words < WORDS), mask=words < WORDS)


def push_blocks(source: Tensor, target: Tensor, here: Tensor, there: Tensor) -> None:
    """Copies blocks `here` of a layer to blocks `there` of another store's.

    Args:
        source: [planes, num_blocks, words] int64 or uint8, contiguous.
        target: [planes, any number of blocks, words], in memory that this device reaches.
        here, there: [n] int64.
    """
    planes, _, words = source.shape
    tile = min(triton.next_power_of_2(words), _TILE_BYTES // source.itemsize)
    num_tiles = planes * len(here) * triton.cdiv(words, tile)
    if num_tiles:
        planes_apart = source.stride(0), target.stride(0)
        grid = (min(num_tiles, _PROGRAMS),)
        _push_kernel[grid](
            source, target, here, there, len(here), *planes_apart, num_tiles, WORDS=words, TILE=tile, num_warps=8
        )
