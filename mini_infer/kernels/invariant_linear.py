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

from mini_infer.kernels.paged_prefill import DOT_DTYPES


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    num_rows,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,  # tiles of rows whose programs share a part of the weights, one after the other
    DOT: tl.constexpr,  # dtype of the factors
):
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), (OUT_SIZE + BLOCK_N - 1) // BLOCK_N
    band = tl.program_id(0) // (TALL * column_tiles)
    height = tl.minimum(row_tiles - band * TALL, TALL)
    within = tl.program_id(0) % (TALL * column_tiles)
    row, column = (band * TALL + within % height) * BLOCK_M, within // height * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN_SIZE, BLOCK_K):  # descriptors give zeros beyond the ends
        x, weight = x_desc.load([row, k]).to(DOT), weight_desc.load([column, k]).to(DOT)
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    real = columns < OUT_SIZE
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * OUT_SIZE + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & real[None, :])


class Tile(NamedTuple):
    block_m: int  # at least 64: with fewer rows an H200's tensor cores would take another instruction
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(rows: int, out_size: int, itemsize: int) -> Tile:
    """The best of some forty on an H200, by the products of Qwen2.5-7B in bfloat16; microseconds beside cuBLAS's:

     rows    qkv        o          gate, up     down
       64    11.7 11.1  9.7 9.6    70.3 72.3    40.1 40.4
      256    21.9 14.9  13.9 12.8  126 95.5     61.9 54.5
    4,096    194  173   155  142   1,415 1,439  756  748
    """
    if itemsize == 4:
        return Tile(64, 32, 32, 4, 2)
    if rows <= 64:
        return (
            Tile(64, 32, 128, 4, 7)
            if out_size <= 4096
            else Tile(64, 64, 128, 4, 5)
            if out_size <= 8192
            else Tile(64, 128, 64, 4, 3)
        )
    if rows <= 512:
        return Tile(64, 128, 128, 4, 4) if out_size <= 8192 else Tile(128, 128, 64, 8, 3)
    return Tile(128, 256, 64, 8, 3)


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
        grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(out_size, tile.block_n),)
        _linear_kernel[grid](
            TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
            bias, out, rows, OUT_SIZE=out_size, IN_SIZE=in_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, TALL=8, DOT=DOT_DTYPES[x.dtype], num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out
