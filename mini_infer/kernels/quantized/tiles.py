"""Tiles of products with quantized weights, and from how many rows on a library is the faster: the best on an H200, by
the products of Qwen2.5-7B.

A table's lines are (rows of x at most, whether W has few rows, whether they are long, the tile); the first that fits
counts, and None fits any. Few rows are too few for all SMs; where those are long, a program goes a long way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from mini_infer.quantization.formats import Number

_FEW, _LONG = 8192, 8192  # rows of W at most, columns at least


class FmaTile(NamedTuple):
    rows: int  # of W, a program
    k: int  # 16-byte loads of a row a thread of a program
    num_warps: int


class DotTile(NamedTuple):
    rows: int  # of W, a program
    k: int  # columns a step
    tokens: int  # 0 in a table: as many as there are rows of x
    num_warps: int
    num_stages: int
    splits: int  # of K


class Tile(NamedTuple):
    """Of linear.py. Tiles differ in speed; sums differ only where K is split."""

    rows: int  # 0 in a table: as many as there are rows of x
    outs: int
    k: int  # columns; of packed codes those of a chunk
    num_warps: int
    num_stages: int
    splits: int = 1  # of K


_GEMV = {
    Number.int8: [
        (1, None, True, FmaTile(2, 1, 8)),
        (1, None, None, FmaTile(4, 1, 4)),
        (16, False, None, DotTile(16, 256, 0, 1, 4, 1)),
        (16, True, True, DotTile(16, 256, 0, 1, 6, 4)),
        (16, True, False, DotTile(16, 256, 0, 1, 6, 1)),
        (64, True, True, DotTile(64, 256, 0, 4, 3, 4)),
    ],
    Number.fp8: [
        (1, True, False, FmaTile(4, 1, 4)),
        (1, None, None, FmaTile(4, 1, 8)),
        (16, False, None, DotTile(16, 256, 0, 1, 4, 1)),
        (16, True, None, DotTile(16, 256, 0, 1, 6, 4)),
        (64, True, True, DotTile(64, 128, 0, 4, 6, 4)),
    ],
    Number.int4: [
        (1, True, False, FmaTile(8, 1, 4)),
        (1, None, None, FmaTile(16, 1, 4)),
        (16, False, None, DotTile(32, 256, 0, 2, 4, 1)),
        (16, True, True, DotTile(64, 512, 0, 4, 3, 12)),
        (16, True, False, DotTile(64, 512, 0, 4, 3, 7)),
        (64, True, True, DotTile(64, 128, 0, 4, 4, 4)),
        (64, True, False, DotTile(64, 128, 0, 4, 3, 4)),
        (64, False, True, DotTile(64, 128, 0, 4, 4, 1)),
        (64, False, False, DotTile(64, 128, 0, 4, 3, 1)),
    ],
}
_LINEAR = {
    Number.int8: [
        (64, True, None, Tile(0, 64, 256, 4, 6)),
        (32, False, None, Tile(0, 128, 128, 4, 4)),
        (64, False, None, Tile(0, 128, 128, 4, 3)),
        (256, True, False, Tile(64, 64, 128, 4, 4)),
        (256, True, True, Tile(128, 64, 256, 4, 4)),
        (256, False, None, Tile(128, 64, 128, 4, 3)),
        (math.inf, None, None, Tile(128, 128, 128, 4, 3)),
    ],
    Number.fp8: [  # 128 columns are what its sums are made of
        (64, True, None, Tile(0, 64, 128, 4, 8)),
        (32, False, None, Tile(0, 128, 128, 4, 4)),
        (64, False, None, Tile(0, 128, 128, 4, 3)),
        (256, True, False, Tile(64, 64, 128, 4, 4)),
        (256, True, True, Tile(128, 64, 128, 4, 4)),
        (256, False, None, Tile(128, 64, 128, 4, 3)),
        (math.inf, None, None, Tile(128, 128, 128, 4, 3)),
    ],
    Number.int4: [
        (32, None, None, Tile(0, 64, 128, 4, 6)),
        (64, True, None, Tile(0, 64, 128, 4, 6)),
        (64, False, None, Tile(0, 128, 128, 4, 3)),
        (math.inf, True, True, Tile(128, 128, 128, 8, 4, splits=2)),
        (math.inf, None, None, Tile(128, 128, 128, 8, 4)),
    ],
}
_LINEAR_WEIGHTS_ALONE = [(64, True, None, Tile(0, 64, 256, 4, 3)), (math.inf, None, None, Tile(0, 64, 128, 4, 3))]

# Rows of x above which cuBLAS is the faster: for weights alone in fewer bits with the time to make them floating again,
# for fp8 as it is. At 256 rows int4's own products take 281 us a layer of Qwen2.5-7B, and cuBLAS's 177. Making the
# weights bf16 takes at least 137, however many rows there are (583 MB at the ceiling of copying).
DEQUANTIZED_ROWS = {Number.int4: 256, Number.int8: 256, Number.fp8: 256}
LIBRARY_FP8_ROWS = 128


def gemv_tile(rows: int, number: Number, out_size: int, in_size: int) -> FmaTile | DotTile | None:
    """Of gemv.py; None: linear.py is the faster."""
    tile = _first(_GEMV[number], rows, out_size, in_size)
    return tile._replace(tokens=max(8, triton.next_power_of_2(rows))) if isinstance(tile, DotTile) else tile


def tile_for(rows: int, number: Number, out_size: int, in_size: int, activations: bool = True) -> Tile:
    """Of linear.py. `activations`: they are quantized, as int4 weights' never are."""
    alone = not activations and number is not Number.int4
    tile = _first(_LINEAR_WEIGHTS_ALONE if alone else _LINEAR[number], rows, out_size, in_size)
    return tile if tile.rows else tile._replace(rows=min(max(triton.next_power_of_2(rows), 16), 128))


def _first(table: Sequence[tuple[float, bool | None, bool | None, Any]], rows: int, out_size: int, in_size: int) -> Any:
    few, long = out_size <= _FEW, in_size > _LONG
    lines = (tile for most, f, n, tile in table if rows <= most and f in (None, few) and n in (None, long))
    return next(lines, None)
