"""Matrix products whose every number is the same in any batch.

An element of the result is one sum over K, taken 16 products at a time from the first to the last: that is what a
tensor core instruction adds to its accumulator, whatever tile it is part of. No tile splits K. So tiles may follow the
number of rows, for speed, and numbers do not (He et al. 2025, "Defeating Nondeterminism in LLM Inference",
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_infer.kernels.paged_prefill import DOT_DTYPES, shared_memory


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,  # tiles of rows whose programs share a part of the weights, one after the other
    DOT: tl.constexpr,  # dtype of the factors
):
    row_tiles, out_tiles = tl.cdiv(num_rows, BLOCK_ROWS), (OUT_SIZE + BLOCK_OUT - 1) // BLOCK_OUT
    band = tl.program_id(0) // (TALL * out_tiles)
    height = tl.minimum(row_tiles - band * TALL, TALL)
    within = tl.program_id(0) % (TALL * out_tiles)
    row, out = (band * TALL + within % height) * BLOCK_ROWS, within // height * BLOCK_OUT
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for k in range(0, IN_SIZE, BLOCK_K):  # descriptors give zeros beyond the ends
        weight, x = weight_desc.load([out, k]).to(DOT), x_desc.load([row, k]).to(DOT)
        acc = tl.dot(weight, x.T, acc, input_precision="ieee")
    rows, outs = row + tl.arange(0, BLOCK_ROWS), out + tl.arange(0, BLOCK_OUT)
    real = outs < OUT_SIZE
    if bias_ptr is not None:
        # Not as a sum: of a product in one step and a sum Triton makes a product that starts from the bias.
        acc = tl.fma(acc, 1.0, tl.load(bias_ptr + outs, mask=real, other=0.0).to(tl.float32)[:, None])
    places = out_ptr + rows.to(tl.int64)[None, :] * OUT_SIZE + outs[:, None]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (rows < num_rows)[None, :])


class Tile(NamedTuple):
    rows: int
    outs: int  # at least 64: with fewer an H200's tensor cores would take another instruction
    k: int
    num_warps: int
    num_stages: int


def tile_for(rows: int, out_size: int, itemsize: int) -> Tile:
    """The best on an H200, or within 3 % of it, by the products of Qwen2.5-7B in bfloat16. Microseconds of a layer's
    four, and cuBLAS's:

        rows       1      8     32     64    128    256   4,096
        this     127    123    130    136    160    216   2,562
        cuBLAS   136    131    138    137    146    185   2,557
    """
    small = out_size <= 8192
    if itemsize == 4:
        return Tile(32, 64, 32, 4, 2)
    if rows <= 16:
        return Tile(16, 64, 256, 4, 5)
    if rows <= 32:
        return Tile(32, 64, 128, 4, 8)
    if rows <= 64:
        return Tile(64, 64, 128, 4, 6) if small else Tile(64, 128, 64, 4, 3)
    if rows <= 128:
        return Tile(64, 64, 128, 4, 5) if small else Tile(128, 64, 128, 4, 4)
    if rows <= 512:
        return Tile(128, 64, 128, 4, 4) if small else Tile(128, 128, 64, 4, 5)
    return Tile(256, 128, 64, 8, 3)


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, tile: Tile | None = None
) -> Tensor:
    """x W^T + b, accumulated in float32 and rounded once.

    Args:
        x: [T, K] float32, bfloat16 or float16; rows are contiguous and begin at multiples of 16 bytes.
        weight: [N, K] of x's dtype, contiguous.
        bias: [N].
        out: takes the result where it is given, [T, N] contiguous.
        tile: instead of the one for this number of rows, for tests and measurements.

    Returns:
        [T, N] of x's dtype. A row depends on that row of x, the weights and the bias alone, to the bit.

    Raises:
        ValueError: K is no multiple of 16 bytes.
    """
    (rows, in_size), out_size = x.shape, weight.shape[0]
    if in_size * x.element_size() % 16:
        raise ValueError(f"a batch-invariant product takes rows of a multiple of 16 bytes, not {in_size} of {x.dtype}")
    if out is None:
        out = x.new_empty((rows, out_size))
    if rows:
        tile = tile or tile_for(rows, out_size, x.element_size())
        if (shared := shared_memory(x.device)) is not None:
            stage = (tile.rows + tile.outs) * tile.k * x.element_size()
            tile = tile._replace(num_stages=max(1, min(tile.num_stages, shared // stage)))
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(out_size, tile.outs),)
        _linear_kernel[grid](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.k]),
            TensorDescriptor.from_tensor(weight, [tile.outs, tile.k]),
            bias, out, rows, OUT_SIZE=out_size, IN_SIZE=in_size, BLOCK_ROWS=tile.rows, BLOCK_OUT=tile.outs,
            BLOCK_K=tile.k, TALL=8, DOT=DOT_DTYPES[x.dtype], num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out
