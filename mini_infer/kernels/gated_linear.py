"""silu(x Wg^T) * (x Wu^T) for a batch of rows of x, where the time is still the time to read W = [Wg; Wu] once.

    x [T, K], Wg and Wu [N, K] --> products --> SiLU(gate) * up --> out [T, N]        16 < T <= 128

Rows of x lie along the side of a tensor core's tile that has a fixed size (M = 64 or 128), and rows of W along the
other, which can be wide: a program reads all of x, and the wider its part of W is, the less often x is read. So parts
are wide, and as many as there are SMs, or twice that. Since tiles are powers of two, a part is 2^i + 2^j rows of W,
which its program multiplies by x in two products: Qwen2.5-7B's 37,888 rows are 131.6 parts of 256 + 32, for 132 SMs.

Half of a part's rows are gate's, the other half up's for the same columns: one box of W as [2, N, K].

The kernel is a programmatic dependent (kernels/pdl.py).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_infer.kernels.paged_prefill import shared_memory
from mini_infer.kernels.pdl import launch_options, take_turn
from mini_infer.kernels.silu_mul import silu_mul_reference

MIN_ROWS, MAX_ROWS = 17, 128
_SMS, _SHARED = 132, 227 * 1024  # of the H200 that the tiles below were measured on; bytes of shared memory an SM
_PARTS = ((256, 32), (256, 0), (128, 64), (128, 32), (128, 16), (128, 0), (64, 0))
_LEAST_FILLED = 0.7  # of the SMs; with fewer cuBLAS and a kernel for SiLU-mul may be the faster
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    wide: int  # rows of W in a program's first product, half of them gate's
    rest: int  # in its second one; 0: it has none
    k: int  # columns a step
    num_warps: int
    num_stages: int


def gated_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The definition, summed in float32 and rounded to x's dtype behind each operation. Arguments as `gated_linear`."""
    return silu_mul_reference((x.float() @ weight.float().T).to(x.dtype))


@triton.jit
def _store_gated(y, column, out_ptr, T, N, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr):
    """y [BLOCK_T, WIDTH], gate's columns and then up's, rounded as gate, up and silu(gate) are in memory."""
    dtype = out_ptr.dtype.element_ty
    halves = tl.permute(tl.reshape(y, [BLOCK_T, 2, WIDTH // 2]), (0, 2, 1))
    gate, up = tl.split(halves.to(dtype).to(tl.float32))
    y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    tokens, outs = tl.arange(0, BLOCK_T), column + tl.arange(0, WIDTH // 2)
    inside = (tokens < T)[:, None] & (outs < N)[None, :]
    tl.store(out_ptr + tokens[:, None] * N + outs[None, :], y.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _gated_linear_kernel(
    x_desc,
    wide_desc,
    rest_desc,  # as wide_desc where REST is 0
    out_ptr,
    T,
    N,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    take_turn(PDL)
    column = tl.program_id(0) * ((WIDE + REST) // 2)
    wide = tl.zeros([BLOCK_T, WIDE], tl.float32)
    rest = tl.zeros([BLOCK_T, REST if REST else 16], tl.float32)
    for k in range(0, K, BLOCK_K):  # descriptors give zeros beyond the ends
        x = x_desc.load([0, k])
        w = wide_desc.load([0, column, k]).reshape(WIDE, BLOCK_K)
        if _INTERPRETED:  # its products take bfloat16 for integers
            x, w = x.to(tl.float32), w.to(tl.float32)
        wide = tl.dot(x, w.T, wide)
        if REST:
            w = rest_desc.load([0, column + WIDE // 2, k]).reshape(REST, BLOCK_K)
            if _INTERPRETED:
                w = w.to(tl.float32)
            rest = tl.dot(x, w.T, rest)
    _store_gated(wide, column, out_ptr, T, N, BLOCK_T, WIDE)
    if REST:
        _store_gated(rest, column + WIDE // 2, out_ptr, T, N, BLOCK_T, REST)


def gated_linear(x: Tensor, weight: Tensor, *, tile: Tile | None = None) -> Tensor:
    """silu(x Wg^T) * (x Wu^T) -> [T, N] in x's dtype, summed in float32. Can be captured in a CUDA graph.

    Rounded to x's dtype are gate, up, silu(gate) and the result, as if each was an operation of its own.

    Args:
        x: [T, K] with T <= MAX_ROWS, bf16 or fp16, contiguous.
        weight: [2 N, K], gate over up, contiguous, of x's dtype.
        tile: instead of the one for these sizes, for tests and measurements.

    Raises:
        ValueError: other shapes or dtypes.
    """
    (rows, k), outs = x.shape, weight.shape[0] // 2
    fits = weight.shape == (2 * outs, k) and x.dtype == weight.dtype and x.dtype.itemsize == 2
    if not fits or rows > MAX_ROWS or k % 8 or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(
            f"gated_linear takes up to {MAX_ROWS} rows of a multiple of 8 numbers of bfloat16 or float16, and as many "
            f"rows of gate as of up, all contiguous, not {tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} "
            f"{weight.dtype}. Call linear and silu_mul"
        )
    out = x.new_empty(rows, outs)
    if not rows:
        return out
    tile = tile or tile_for(rows, outs)
    block_t = _block_t(rows)
    gate_and_up = weight.view(2, outs, k)
    wide = TensorDescriptor.from_tensor(gate_and_up, [2, tile.wide // 2, tile.k])
    rest = TensorDescriptor.from_tensor(gate_and_up, [2, tile.rest // 2, tile.k]) if tile.rest else wide
    _gated_linear_kernel[(triton.cdiv(2 * outs, tile.wide + tile.rest),)](
        TensorDescriptor.from_tensor(x, [block_t, tile.k]), wide, rest, out, rows, outs, K=k, BLOCK_T=block_t,
        WIDE=tile.wide, REST=tile.rest, BLOCK_K=tile.k, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def worth_it(rows: int, outs: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `gated_linear` of x [rows, k] beats cuBLAS and `silu_mul` on an H200; it is for GPUs with as much shared
    memory. Microseconds that a layer takes less than its 152 to 177 (Qwen2.5-7B), 54 to 65 (1.5B) and 44 to 54
    (Qwen3-0.6B) with them, in chains of 28 layers:

        rows            32    64   128
        Qwen2.5-7B     7.0   8.5   5.0
        Qwen2.5-1.5B   3.8   4.9   3.0
        Qwen3-0.6B     1.9   2.9     -
    """
    if not MIN_ROWS <= rows <= MAX_ROWS or k % 8 or dtype not in (torch.bfloat16, torch.float16):
        return False
    width, shared = sum(_part(outs)), shared_memory(device)
    measured = rows <= 64 or width >= 128
    return measured and _filled(outs, width) >= _LEAST_FILLED and (shared is None or shared >= _SHARED)


def tile_for(rows: int, outs: int) -> Tile:
    """Of narrow parts more columns a step."""
    wide, rest = _part(outs)
    few = rows <= 64
    k = 128 if few and wide + rest <= 144 else 64
    stages = _SHARED // ((wide + rest + _block_t(rows)) * k * 2)
    return Tile(wide, rest, k, 4 if few else 8, min(4, stages))


@cache
def _part(outs: int) -> tuple[int, int]:
    """Which leaves the fewest SMs without work in the last round; the widest of those."""
    return max(_PARTS, key=lambda part: _filled(outs, sum(part)))


def _filled(outs: int, width: int) -> float:
    """The share of SMs that have work, over as many rounds as parts of so many rows of W take."""
    parts = triton.cdiv(2 * outs, width)
    return parts / (triton.cdiv(parts, _SMS) * _SMS)


def _block_t(rows: int) -> int:
    return 64 if rows <= 64 else 128
