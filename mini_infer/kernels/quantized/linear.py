"""Matrix products with quantized weights, and activations quantized or not.

One kernel for all formats and any number of rows. Weights are the tall operand of the tensor core, as in
invariant_linear.py. Where K is not split, a row's result is the same to the bit in any batch.

    weights    activations    a step of the loop                                        at the end
    int8       int8           sums of products, exact in int32                          * scale_x * scale_w
    fp8        fp8            128 columns in the tensor core's sum, then in float32     * scale_x * scale_w
    fp8 block  fp8 groups     128 columns * scale_x * scale_w, then in float32
    int8       as they are    codes made bf16, which is exact                           * scale_w
    int4       as they are    a group's sum of whole numbers * scale_w, then in float32

The tensor core of Hopper keeps some 14 bits of a sum of fp8 products, hence the 128 (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2).

Packed int4 is made numbers by its bits (kernels/quantized/unpack.py). Of up to 256 rows of x with few outputs, K is in
two parts unless one order of sums is asked for.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_infer.kernels.paged_prefill import DOT_DTYPES, shared_memory
from mini_infer.kernels.pdl import bring_to_l2, launch_options, let_next_start
from mini_infer.kernels.quantized.split import added_up, scratch
from mini_infer.kernels.quantized.tiles import DEQUANTIZED_ROWS, LIBRARY_FP8_ROWS, Tile, tile_for
from mini_infer.kernels.quantized.tokens import quantize_tokens
from mini_infer.kernels.quantized.unpack import (
    CHUNK,
    PLANE,
    group_scales,
    scaled_sum,
    unpacked,
    unpacked_planes,
    waited,
)
from mini_infer.quantization.formats import ActivationFormat, Number, WeightFormat
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _scales_of(ptr, outs, real, group, NUM_GROUPS: tl.constexpr, ROWS: tl.constexpr):
    return tl.load(ptr + outs // ROWS * NUM_GROUPS + group, mask=real, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _quant_linear_kernel(
    x_desc,
    x_scales_ptr,
    codes_desc,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,  # of `added_up`, as tickets_ptr
    tickets_ptr,
    num_rows,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of a tile; where PACKED those of a group, or of a chunk
    TALL: tl.constexpr,  # as in invariant_linear.py
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale of the weights; None: all
    GROUP_ROWS: tl.constexpr,
    X_GROUP: tl.constexpr,  # ... of the activations
    SPLITS: tl.constexpr,  # of K, axis 1 of the grid
    DOT: tl.constexpr,  # dtype of the factors
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row_tiles, out_tiles = tl.cdiv(num_rows, BLOCK_ROWS), (OUT_SIZE + BLOCK_OUT - 1) // BLOCK_OUT
    band = tl.program_id(0) // (TALL * out_tiles)
    height = tl.minimum(row_tiles - band * TALL, TALL)
    within = tl.program_id(0) % (TALL * out_tiles)
    row, out = (band * TALL + within % height) * BLOCK_ROWS, within // height * BLOCK_OUT
    rows, outs = row + tl.arange(0, BLOCK_ROWS), out + tl.arange(0, BLOCK_OUT)
    exists, real = rows < num_rows, outs < OUT_SIZE
    w_rows = tl.minimum(outs, OUT_SIZE - 1)
    if PDL:
        ROW_BYTES: tl.constexpr = IN_SIZE // 2 if PACKED else IN_SIZE
        if ROW_BYTES >= 512 and (row + tl.program_id(1)) == 0:
            bring_to_l2(codes_ptr, w_rows, ROW_BYTES, 512)
        tl.extra.cuda.gdc_wait()
    GROUPS: tl.constexpr = 1 if GROUP is None else (IN_SIZE + GROUP - 1) // GROUP
    X_GROUPS: tl.constexpr = 1 if X_GROUP is None else (IN_SIZE + X_GROUP - 1) // X_GROUP
    SUM: tl.constexpr = tl.int32 if tl.int8 == DOT else tl.float32
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], SUM)
    STEP: tl.constexpr = CHUNK if PACKED else BLOCK_K
    LENGTH: tl.constexpr = ((IN_SIZE + STEP - 1) // STEP + SPLITS - 1) // SPLITS * STEP
    k_begin = tl.program_id(1) * LENGTH
    k_end = tl.minimum(k_begin + LENGTH, IN_SIZE)
    if PACKED:
        next_scales = group_scales(scales_ptr, w_rows, k_begin, IN_SIZE, GROUP, CHUNK)  # a step ahead
        for k in range(k_begin, k_end, CHUNK):
            now = next_scales
            next_scales = group_scales(scales_ptr, w_rows, k + CHUNK, IN_SIZE, GROUP, CHUNK)
            words = codes_desc.load([out, k // 4])
            for column in tl.static_range(0, CHUNK, BLOCK_K):
                x = x_desc.load([row, k + column]).to(DOT)
                w = unpacked_planes(
                    words, column // PLANE, BLOCK_K // PLANE, zeros_ptr, w_rows, k + column, IN_SIZE, GROUP, DOT
                )
                sums = scaled_sum(tl.dot(w, x.T, input_precision="ieee"), now, column, sums, GROUP)
    else:
        for k in range(k_begin, k_end, BLOCK_K):  # descriptors give zeros beyond the ends
            codes, x = codes_desc.load([out, k]), x_desc.load([row, k])
            if _INTERPRETED and tl.float8e4nv == DOT:  # numpy has no such
                codes, x = codes.to(tl.float32), x.to(tl.float32)
            if tl.int8 == DOT:
                sums = tl.dot(codes, x.T, sums, out_dtype=tl.int32)
            elif GROUP is None and X_GROUP is None and tl.float8e4nv != DOT:
                sums = waited(tl.dot(codes.to(DOT), x.to(DOT).T, sums, input_precision="ieee"))
            else:
                part = tl.dot(codes, x.T)
                scale = tl.full([BLOCK_OUT, BLOCK_ROWS], 1.0, tl.float32)
                if X_GROUP is not None:
                    scale *= tl.load(x_scales_ptr + rows * X_GROUPS + k // X_GROUP, mask=exists, other=0.0)[None, :]
                if GROUP is not None:
                    scale *= _scales_of(scales_ptr, outs, real, k // GROUP, GROUPS, GROUP_ROWS)[:, None]
                sums = tl.fma(part, scale, sums)
    if SPLITS > 1:
        sums, last = added_up(sums, parts_ptr, tickets_ptr, tl.program_id(0), SPLITS)
        if not last:
            return
    result = sums.to(tl.float32)
    scale = tl.full([BLOCK_OUT, BLOCK_ROWS], 1.0, tl.float32)
    if x_scales_ptr is not None and X_GROUP is None:
        scale *= tl.load(x_scales_ptr + rows, mask=exists, other=0.0)[None, :]
    if GROUP is None:
        scale *= _scales_of(scales_ptr, outs, real, 0, 1, GROUP_ROWS)[:, None]
    bias = tl.zeros([BLOCK_OUT], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outs, mask=real, other=0.0).to(tl.float32)
    result = tl.fma(result, scale, tl.broadcast_to(bias[:, None], result.shape))
    places = rows.to(tl.int64)[None, :] * OUT_SIZE + outs[:, None]
    inside = real[:, None] & exists[None, :]
    result = result.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:  # rounded as between two operations
        residual = tl.load(residual_ptr + places, mask=inside, other=0.0)
        result = (result.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, result, mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WIDTH: tl.constexpr,  # columns at a time: CHUNK, of packed codes PLANE
    DOT: tl.constexpr,  # dtype that holds every code
):
    """A program has CHUNK columns of some rows: neighbours in memory are made by neighbours."""
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    real = outs < OUT_SIZE
    wide = outs.to(tl.int64)[:, None]
    begin = tl.program_id(0) * CHUNK
    columns = tl.arange(0, WIDTH)[None, :]
    GROUPS: tl.constexpr = 1 if GROUP is None else (IN_SIZE + GROUP - 1) // GROUP
    if PACKED:
        words = tl.load(codes_ptr + wide * (IN_SIZE // 4) + begin // 4 + columns, mask=real[:, None], other=0)
    for column in tl.static_range(0, CHUNK, WIDTH):
        here = begin + column + columns
        inside = real[:, None] & (here < IN_SIZE)
        if PACKED:
            w_rows = tl.minimum(outs, OUT_SIZE - 1)
            codes = unpacked(words, column // PLANE, zeros_ptr, w_rows, begin + column, IN_SIZE, GROUP, DOT)
            codes = codes.to(tl.float32)
        else:
            codes = tl.load(codes_ptr + wide * IN_SIZE + here, mask=inside, other=0.0).to(tl.float32)
        group = 0 if GROUP is None else (begin + column) // GROUP
        values = codes * _scales_of(scales_ptr, outs, real, group, GROUPS, GROUP_ROWS)[:, None]
        tl.store(out_ptr + wide * IN_SIZE + here, values.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] of `dtype`, each value rounded once."""
    form, out_size = weight.form, weight.codes.shape[0]
    packed = form.number is Number.int4
    in_size = weight.codes.shape[1] * (2 if packed else 1)
    out = torch.empty((out_size, in_size), dtype=dtype, device=weight.codes.device)
    _dequantize_kernel[(triton.cdiv(in_size, CHUNK.value), triton.cdiv(out_size, 64))](
        weight.codes.view(torch.int16) if packed else weight.codes, weight.scales, weight.zeros, out, OUT_SIZE=out_size,
        IN_SIZE=in_size, PACKED=packed, GROUP=form.columns, GROUP_ROWS=form.rows, BLOCK_OUT=64,
        WIDTH=PLANE.value if packed else CHUNK.value, DOT=DOT_DTYPES[torch.bfloat16], num_warps=4,
    )  # fmt: skip
    return out


def own_rows(weight: QuantizedWeight, activations: ActivationFormat | None) -> float:
    """The most for which `quantized_linear` is the fastest."""
    if activations is None:
        return DEQUANTIZED_ROWS[weight.form.number]
    form, one_scale = weight.form, activations.columns is None and weight.form.columns is None
    library = form.number is Number.fp8 and one_scale and _has_fp8(weight.codes.device)
    return LIBRARY_FP8_ROWS if library and all(size % 16 == 0 for size in weight.codes.shape) else math.inf


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) == (9, 0)
    )


def library_product(x: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x W^T + b of fp8 with a scale a row and of a model in bfloat16, by what torch chooses. How that sums is its own,
    and may depend on the number of rows."""
    return torch._scaled_mm(
        x.codes, weight.codes.t(), scale_a=x.scales, scale_b=weight.scales.t(), bias=bias, out_dtype=torch.bfloat16
    )


def quantized_linear(
    x: Tensor | QuantizedTokens,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    activations: ActivationFormat | None = None,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    one_order: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + b as the table above says.

    Args:
        x: [T, K] float32, bfloat16 or float16, elements of a row adjacent; or what it became by `activations`.
        weight: [N, K], its codes contiguous.
        bias: [N].
        activations: what x becomes first; None: it stays.
        out: takes the result where it is given, [T, N] contiguous.
        residual: [T, N] contiguous, of x's dtype, added to the rounded product.
        one_order: a row's result depends on that row of x, the weights and the bias alone, to the bit.
        tile: instead of the one for this number of rows, for tests and measurements.

    Returns:
        [T, N] of x's dtype.

    Raises:
        ValueError: for formats that do not go together, and rows that do not begin at multiples of 16 bytes.
    """
    if isinstance(x, Tensor) and activations is not None:
        x = quantize_tokens(x, activations)
    values, x_scales = (x, None) if isinstance(x, Tensor) else (x.codes, x.scales)
    (rows, in_size), (out_size, _), form = values.shape, weight.codes.shape, weight.form
    packed = form.number is Number.int4
    check(form, activations, in_size)
    if out is None:
        out = torch.empty((rows, out_size), dtype=x.dtype, device=values.device)
    if not rows:
        return out
    dot = DOT_DTYPES[x.dtype]
    if activations is not None:
        dot = tl.int8 if form.number is Number.int8 else tl.float8e4nv
    tile = tile or tile_for(rows, form.number, out_size, in_size, activations is not None)
    if one_order:
        tile = tile._replace(splits=1)
    codes, block_k, code_columns = weight.codes, tile.k, tile.k
    if packed:
        codes, block_k, code_columns = codes.view(torch.int16), form.columns or CHUNK.value, PLANE.value
    if (shared := shared_memory(values.device)) is not None:
        stage = tile.rows * tile.k * values.element_size() + tile.outs * tile.k // (2 if packed else 1)
        tile = tile._replace(num_stages=max(1, min(tile.num_stages, shared // stage)))
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(out_size, tile.outs)
    sums = torch.int32 if dot is tl.int8 else torch.float32
    parts, tickets = scratch(tiles, tile.splits, (tile.outs, tile.rows), sums, values.device)
    _quant_linear_kernel[(tiles, tile.splits)](
        TensorDescriptor.from_tensor(values, [tile.rows, block_k]), x_scales,
        TensorDescriptor.from_tensor(codes, [tile.outs, code_columns]), codes, weight.scales, weight.zeros, bias,
        residual, out, parts, tickets, rows, OUT_SIZE=out_size, IN_SIZE=in_size, BLOCK_ROWS=tile.rows,
        BLOCK_OUT=tile.outs, BLOCK_K=block_k, TALL=8, PACKED=packed, GROUP=form.columns, GROUP_ROWS=form.rows,
        X_GROUP=None if activations is None else activations.columns, SPLITS=tile.splits, DOT=dot,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(values.device),
    )  # fmt: skip
    return out


def check(form: WeightFormat, activations: ActivationFormat | None, in_size: int) -> None:
    """Raises ValueError, saying what there is, for a product that there is not."""
    if form.number is Number.int4:
        if activations is not None or form.columns not in (None, 32, 64, 128) or in_size % 128:
            raise ValueError(
                f"products of int4 weights take activations as they are, groups of 32, 64 or 128 columns or all, and a "
                f"multiple of 128 columns, not {activations}, {form.columns} and {in_size}"
            )
        return
    if activations is not None and activations.number is not form.number:
        raise ValueError(f"weights and activations of one product are of one format, not {form} and {activations}")
    groups = {form.columns, None if activations is None else activations.columns}
    if not groups <= {None, 128} or (groups != {None} and form.number is Number.int8) or in_size % 16:
        raise ValueError(
            f"8-bit weights and activations have a scale a row, or fp8 one for 128 columns, and a multiple of 16 "
            f"columns, not {form}, {activations} and {in_size}"
        )
