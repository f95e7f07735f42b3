"""x W^T for a few rows of x and W in 8 or 4 bits, where the time is the time to read W once; and what stands around.

As kernels/gemv.py, whose ends (SiLU-mul, residual, rotation) these kernels have, for formats of linear.py that
have a scale a row, or are int4. Two kernels:

    `_fma_kernel`   one row of x: 16-byte loads of W into registers and multiply-adds there. int8 four products an
                    instruction (dp4a), fp8 two, in float16, whose sums of two change the result by some 0.06 %; int4 as
                    int4_products.py says, in two thirds of the time of products in float32.
    `_dot_kernel`   tensor cores, with as many rows as a tile has. Where W has too few rows for all SMs, a program has a
                    part of K only, by W's shape alone, and the last of a tile to finish adds the parts up, in order.

Sums of int8 products are exact, so that either gives linear.py's bits. Others sum in an order of their own, which
is one for any number of rows that the same kernel and tile take.

Both are programmatic dependents (kernels/pdl.py). Before they wait for x they ask for the first of their weights, which
depend on nobody: into registers, or L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.gemv_kernels import Ends
from mini_infer.kernels.interface import Places
from mini_infer.kernels.paged_prefill import DOT_DTYPES
from mini_infer.kernels.pdl import launch_options
from mini_infer.kernels.quantized.gemv_kernels import _dot_kernel, _fma_kernel
from mini_infer.kernels.quantized.split import scratch
from mini_infer.kernels.quantized.tiles import DotTile, FmaTile, gemv_tile
from mini_infer.quantization.formats import ActivationFormat, Number
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight

_PREFETCH = 512  # bytes of a row of W, or of a part of it, that are asked for before x is there


def worth_it(weight: QuantizedWeight, activations: ActivationFormat | None, rows: int, dtype: torch.dtype) -> bool:
    """Whether `quant_gemv` has these formats, and is the fastest."""
    form, (out_size, in_size) = weight.form, weight.codes.shape
    if form.number is Number.int4:
        in_size *= 2
        fits = activations is None and dtype != torch.float32
    else:
        fits = activations is not None and form.columns is None and form.rows == 1 and activations.columns is None
        fits &= in_size % 16 == 0
    return bool(fits) and rows > 0 and gemv_tile(rows, form.number, out_size, in_size) is not None


def quant_gemv(
    x: Tensor | QuantizedTokens,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    places: Places | None = None,
    tile: FmaTile | DotTile | None = None,
) -> Tensor:
    """x W^T + bias -> [T, N] of x's dtype, rounded as each operation of its own would be.

    Args:
        x: [T, K], of formats that `worth_it` says.
        weight: [N, K]; not still being written on the GPU (rule 3 of kernels/pdl.py), as little as bias.
        bias: [N].
        residual: [T, N], contiguous, of x's dtype, added to the product.
        silu_mul: weight and bias are gate over up: silu(gate) * up, [T, N / 2].
        places: weight's rows are q | k | v heads: of them `rope_and_store` -> q [T, Hq, D], as `gemv.qkv_gemv`.
        tile: instead of the one for these sizes, for tests and measurements.

    The first call on a device must not be under capture (RuntimeError). Calls on one device share their tickets, so
    they must not overlap: one stream, or streams that wait for each other.

    Raises:
        ValueError: a number of rows, or a tile, that it does not have.
    """
    values, x_scales = (x, None) if isinstance(x, Tensor) else (x.codes, x.scales)
    (rows, k), n, form = values.shape, weight.codes.shape[0], weight.form
    tile = tile or gemv_tile(rows, form.number, n, k)
    if tile is None:
        raise ValueError(f"quant_gemv has no tile for {rows} rows of x; call quantized_linear")
    if places is None:
        out = torch.empty((rows, n // 2 if silu_mul else n), dtype=x.dtype, device=values.device)
    else:
        _, kv_heads, head_dim = places.key_slots.shape
        out = torch.empty((rows, n // head_dim - 2 * kv_heads, head_dim), dtype=x.dtype, device=values.device)
    ends = Ends.of(tile.rows, silu_mul, residual, out, places)
    packed, stride = form.number is Number.int4, values.stride(0)
    width = k // 2 if packed else k  # bytes of a row of W
    constants = {
        "N": n // 2 if silu_mul else n, "K": k, "GROUP": form.columns, "ENDS": ends, "num_warps": tile.num_warps,
        **launch_options(values.device),
    }  # fmt: skip
    prefetch = _PREFETCH if constants["PDL"] else 0
    rotary_stride = 0 if places is None else places.cos.stride(0)
    grid = triton.cdiv(n, ends.block_n)
    if isinstance(tile, FmaTile):
        bits = 0 if form.number is Number.fp8 else 4 if packed else 8
        stride = stride * values.element_size() // 4
        values, codes = values.view(torch.int32), weight.codes.view(torch.int32)
        most = triton.next_power_of_2(triton.cdiv(width, 16)) * 4
        _fma_kernel[(grid,)](
            values, x_scales, codes, weight.scales, weight.zeros, bias, residual, out, places, stride, rotary_stride,
            T=rows, BITS=bits, BLOCK_K=min(128 * tile.num_warps * tile.k, most),
            **constants,
        )  # fmt: skip
        return out
    dot = tl.int8 if x_scales is not None else DOT_DTYPES[x.dtype]
    if form.number is Number.fp8:
        dot = tl.float8e4nv
    block_k = tile.k if not packed or k % tile.k == 0 else 128
    steps = triton.cdiv(k, block_k)
    each = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, each)  # none of them empty
    shortest = k - (splits - 1) * each * block_k
    sums = torch.int32 if form.number is Number.int8 else torch.float32
    parts, tickets = scratch(grid, splits, (ends.block_n, tile.tokens), sums, values.device)
    _dot_kernel[(grid, splits)](
        values, x_scales, weight.codes.view(torch.int16) if packed else weight.codes, weight.scales, weight.zeros, bias,
        residual, out, places, parts, tickets, stride, rotary_stride, rows, PACKED=packed, DOT=dot, BLOCK_K=block_k,
        BLOCK_T=tile.tokens, STAGES=tile.num_stages, SPLITS=splits,
        PREFETCH=min(prefetch, shortest * width // k) // 16 * 16, **constants,
    )  # fmt: skip
    return out
