"""K in parts, where a product has too few tiles for all SMs: the last program of a tile adds the parts up, in order.

What the sum is depends on the number of parts, and not on who is last.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton import jit

_MAX_TILES = 4096


@jit
def added_up(y, parts_ptr, tickets_ptr, tile, SPLITS: tl.constexpr):
    """(the sum of all parts of a tile, whether this program has it), where y is that of program_id(1).

    parts_ptr: [tiles, SPLITS, *y.shape] of y's dtype; tickets_ptr: [tiles] int32, zeros before and after.
    """
    ROWS: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = y.shape[1]
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = parts_ptr + tile.to(tl.int64) * (SPLITS * ROWS * COLUMNS) + place
    tl.store(first + tl.program_id(1) * (ROWS * COLUMNS), y)
    tl.debug_barrier()  # the ticket speaks for all threads
    last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(tickets_ptr + tile, 0)  # for the next launch
        y = tl.load(first)
        for split in tl.static_range(1, SPLITS):
            y += tl.load(first + split * (ROWS * COLUMNS))
    return y, last


def scratch(
    tiles: int, splits: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    """parts and tickets of `added_up`; None, None where nothing is split.

    Raises:
        RuntimeError: it is the first call on a device, and under capture.
        ValueError: for so many tiles there is nothing to be gained.
    """
    if splits == 1:
        return [None, None]
    if tiles > _MAX_TILES:
        raise ValueError(f"of a product of {tiles} tiles K is not split")
    return [torch.empty((tiles, splits, *shape), dtype=dtype, device=device), _tickets(device)]


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Zeros, and every launch leaves them so."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a product whose K is split must be computed once before one is captured in a CUDA graph")
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
