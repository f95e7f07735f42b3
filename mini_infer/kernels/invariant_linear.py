"""Matrix products whose every number is the same in any batch.

An element of the result is one sum over K, taken 16 products at a time from the first to the last: that is what a
tensor core instruction adds to its accumulator, whatever tile it is part of. No tile splits K. So tiles may follow the
number of rows, for speed, and numbers do not (He et al. 2025, "Defeating Nondeterminism in LLM Inference",
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).

Where ranks share the inputs, K has 8 chunks (`num_chunks`). Each is one such sum, and chunks are added up as a balanced
tree, of which every rank has a branch:

    1 rank    ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7))
    2 ranks    |---- rank 0 ---------|   |---- rank 1 ---------|    the last sum is between ranks

Branches can be of programs of one GPU just as well (`Tile.parts`), and a second kernel adds up what those have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
    CHUNKS: tl.constexpr,  # that this program adds up: 1, 2, 4 or 8
    PARTS: tl.constexpr,  # programs that have CHUNKS each
    DOT: tl.constexpr,  # dtype of the factors
):
    row_tiles, out_tiles = tl.cdiv(num_rows, BLOCK_ROWS), (OUT_SIZE + BLOCK_OUT - 1) // BLOCK_OUT
    band = tl.program_id(0) // (TALL * out_tiles)
    height = tl.minimum(row_tiles - band * TALL, TALL)
    within = tl.program_id(0) % (TALL * out_tiles)
    row, out = (band * TALL + within % height) * BLOCK_ROWS, within // height * BLOCK_OUT
    part = tl.program_id(1)
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    if CHUNKS * PARTS == 1:
        for k in range(0, IN_SIZE, BLOCK_K):  # descriptors give zeros beyond the ends
            weight, x = weight_desc.load([out, k]).to(DOT), x_desc.load([row, k]).to(DOT)
            acc = tl.dot(weight, x.T, acc, input_precision="ieee")
    else:
        # One loop over all chunks, so that loads run ahead across their ends. A sum waits until the branch beside it is
        # there: `one` of a chunk, `two` of two, `four` of four.
        one, two, four = acc, acc, acc
        STEPS: tl.constexpr = (IN_SIZE // (CHUNKS * PARTS) + BLOCK_K - 1) // BLOCK_K
        for step in range(0, CHUNKS * STEPS):
            chunk, k = step // STEPS, step % STEPS * BLOCK_K
            weight = weight_desc.load([part * CHUNKS + chunk, out, k]).reshape(BLOCK_OUT, BLOCK_K).to(DOT)
            x = x_desc.load([part * CHUNKS + chunk, row, k]).reshape(BLOCK_ROWS, BLOCK_K).to(DOT)
            acc = tl.dot(weight, x.T, acc, input_precision="ieee")
            if CHUNKS > 1:  # noqa: SIM102 Triton looks at both sides of an `and`
                if step % STEPS == STEPS - 1 and chunk < CHUNKS - 1:
                    one, two, four = wait_in_tree(acc, chunk, one, two, four)
                    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        acc = end_of_tree(acc, one, two, four, CHUNKS)
    rows, outs = row + tl.arange(0, BLOCK_ROWS), out + tl.arange(0, BLOCK_OUT)
    real = outs < OUT_SIZE
    if bias_ptr is not None:
        acc = plus(acc, tl.load(bias_ptr + outs, mask=real, other=0.0).to(tl.float32)[:, None])
    places = out_ptr + (part * num_rows + rows).to(tl.int64)[None, :] * OUT_SIZE + outs[:, None]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["numel"])
def _add_parts_kernel(
    parts_ptr,  # [PARTS, T, N] float32
    bias_ptr,
    out_ptr,
    numel,
    OUT_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = places < numel
    one, two, four = 0.0, 0.0, 0.0
    for part in tl.static_range(PARTS):
        acc = tl.load(parts_ptr + part * numel.to(tl.int64) + places, mask=real, other=0.0)
        if part < PARTS - 1:
            one, two, four = wait_in_tree(acc, part, one, two, four)
    acc = end_of_tree(acc, one, two, four, PARTS)
    if bias_ptr is not None:
        acc = plus(acc, tl.load(bias_ptr + places % OUT_SIZE, mask=real, other=0.0).to(tl.float32))
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def plus(one, other):
    """Not as a sum: of a product in one step and a sum Triton makes a product that starts from the other."""
    return tl.fma(one, 1.0, other)


@triton.jit
def wait_in_tree(acc, chunk, one, two, four):
    """(one, two, four) after the sum of a chunk that is not the last."""
    if chunk % 2 == 0:
        one = acc
    else:
        pair = plus(one, acc)
        if chunk % 4 == 1:
            two = pair
        else:
            four = plus(two, pair)
    return one, two, four


@triton.jit
def end_of_tree(acc, one, two, four, CHUNKS: tl.constexpr):
    """The sum of all chunks, `acc` being the last one's."""
    if CHUNKS > 1:
        acc = plus(one, acc)
    if CHUNKS > 2:
        acc = plus(two, acc)
    if CHUNKS > 4:
        acc = plus(four, acc)
    return acc


CHUNKS = 8  # ranks that can share inputs, at most


def num_chunks(in_size: int, itemsize: int) -> int:
    """Of K inputs, each of a multiple of 16 bytes: 8, or as many as there can be."""
    return next((n for n in (CHUNKS, 4, 2) if in_size * itemsize % (16 * n) == 0), 1)


class Tile(NamedTuple):
    rows: int
    outs: int  # at least 64: with fewer an H200's tensor cores would take another instruction
    k: int
    num_warps: int
    num_stages: int
    parts: int = 1  # programs that share the chunks of a tile


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


def chunked_tile_for(rows: int, out_size: int, itemsize: int) -> Tile:
    """The best on an H200 for products in 8 chunks, or within 1 % of it. Microseconds of Qwen2.5-7B's two in a layer,
    attention's output and the down projection, and of the same without chunks:

        rows               1     32     64    128    256    512   4,096
        this              49     50     54     64    106    190   1,864
        without chunks    46     47     52     56     75    139     946

    A program's tensor cores wait at each end of a chunk, and sums of branches that wait take registers. Programs with
    other parts compute meanwhile; of a whole prompt's rows, what parts pass on through memory takes longer than that.
    """
    if itemsize == 4:
        return tile_for(rows, out_size, itemsize)
    if rows <= 16:
        return Tile(16, 64, 256, 4, 5, parts=2)
    if rows <= 32:
        return Tile(32, 64, 128, 4, 4, parts=4)
    if rows <= 64:
        return Tile(64, 64, 128, 4, 6, parts=2)
    if rows <= 128:
        return Tile(64, 128, 64, 8, 4, parts=4)
    if rows <= 512:
        return Tile(128, 128, 64, 8, 4, parts=4)
    return Tile(128, 64, 128, 8, 4)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    chunks: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + b, accumulated in float32 and rounded once.

    Args:
        x: [T, K] float32, bfloat16 or float16; rows are contiguous and begin at multiples of 16 bytes.
        weight: [N, K] of x's dtype, contiguous.
        bias: [N].
        out: takes the result where it is given, [T, N] contiguous, of any dtype.
        chunks: of K, whose sums are added up as a tree; a divisor of `num_chunks`.
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
        if tile is None:
            tile = (tile_for if chunks == 1 else chunked_tile_for)(rows, out_size, x.element_size())
        if (shared := shared_memory(x.device)) is not None:
            stage = (tile.rows + tile.outs) * tile.k * x.element_size()
            tile = tile._replace(num_stages=max(1, min(tile.num_stages, shared // stage)))
        if chunks > 1:
            # A dimension of their own: beyond a chunk's end are zeros, not the next one. As the first it folds away;
            # else Triton would bring the weights to tensor cores through registers.
            x, weight = (each.unflatten(1, (chunks, -1)).transpose(0, 1) for each in (x, weight))
        before = [1] * (chunks > 1)
        parts = min(tile.parts, chunks)
        sums = out if parts == 1 else x.new_empty((parts, rows, out_size), dtype=torch.float32)
        _linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(out_size, tile.outs), parts)](
            TensorDescriptor.from_tensor(x, [*before, tile.rows, tile.k]),
            TensorDescriptor.from_tensor(weight, [*before, tile.outs, tile.k]),
            bias if parts == 1 else None, sums, rows, OUT_SIZE=out_size, IN_SIZE=in_size, BLOCK_ROWS=tile.rows,
            BLOCK_OUT=tile.outs, BLOCK_K=tile.k, TALL=8, CHUNKS=chunks // parts, PARTS=parts, DOT=DOT_DTYPES[x.dtype],
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if parts > 1:
            _add_parts_kernel[(triton.cdiv(out.numel(), 1024),)](
                sums, bias, out, out.numel(), OUT_SIZE=out_size, PARTS=parts, BLOCK=1024
            )
    return out
