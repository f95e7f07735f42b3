"""y = x W^T + b for a few rows of x, where the time is the time to read W once.

Two kernels, by the number of rows T. A program owns a few rows of W and all of K, so no program waits for another and
the order of every sum is fixed: equal inputs give equal bits.

  T <= 3    `_fma_kernel`: 16-byte loads of W straight into registers, fp32 multiply-adds, many small programs an SM.
  T <= 16   `_dot_kernel`: as rows are added the multiply-adds get dearer than the loads; the tensor cores take them.
            (In fp32, which they would round, and at T = 4 with few rows of W, `_fma_kernel` stays.)

On Hopper and later both are launched as programmatic dependents (kernels/pdl.py): a program is in place while the
kernel before it still runs. `_fma_kernel` asks for its first weights, which depend on nobody, before it waits for x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.pdl import launch_options

MAX_ROWS = 16
_MAX_FMA_ROWS = 3
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SMS = 132  # of the H200 that the parameters below were measured on


def gemv_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, summed in float32. Arguments as `gemv`."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


@triton.jit
def _add_products(
    sums,
    w,
    x_ptr,
    stride_x,
    columns,
    K,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """sums[t] [BLOCK_N, BLOCK_K / VECTOR] plus the products of one tile of W, summed over the vector of a load."""
    w = w.to(tl.float32)
    new = ()
    for t in tl.static_range(T):
        x_ptrs = x_ptr + t * stride_x + columns
        if EVEN_K:
            x = tl.load(x_ptrs, eviction_policy="evict_last")
        else:
            x = tl.load(x_ptrs, mask=columns < K, other=0.0, eviction_policy="evict_last")
        products = tl.reshape(w * x.to(tl.float32)[None, :], [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
        new += (sums[t] + tl.sum(products, axis=2),)  # type: ignore[assignment]
    return new


@triton.jit
def _fma_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    stride_x,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    inside = rows < N
    w_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if EVEN:
        w = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        w = tl.load(w_ptrs, mask=inside[:, None] & (columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),) * T
    sums = _add_products(sums, w, x_ptr, stride_x, columns, K, T, BLOCK_N, BLOCK_K, VECTOR, EVEN)
    for start in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=UNROLL):
        here = columns + start
        if EVEN:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
        else:
            mask = inside[:, None] & (here < K)[None, :]
            w = tl.load(w_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
        sums = _add_products(sums, w, x_ptr, stride_x, here, K, T, BLOCK_N, BLOCK_K, VECTOR, EVEN)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    for t in tl.static_range(T):
        y = tl.sum(sums[t], axis=1) + bias
        tl.store(out_ptr + t * N + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    stride_x,
    T,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, BLOCK_T)
    some = tokens < T
    w_rows = tl.minimum(rows, N - 1)
    w_ptrs = weight_ptr + w_rows.to(tl.int64)[:, None] * K + columns[None, :]
    x_ptrs = x_ptr + tokens[None, :] * stride_x + columns[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=some[None, :], other=0.0)
        else:
            left = columns < K - start
            w = tl.load(w_ptrs + start, mask=left[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=left[:, None] & some[None, :], other=0.0)
        if _INTERPRETED:  # its products take bfloat16 for integers
            w, x = w.to(tl.float32), x.to(tl.float32)
        y = tl.dot(w, x, y)
    if HAS_BIAS:
        y += tl.load(bias_ptr + w_rows).to(tl.float32)[:, None]
    out_ptrs = out_ptr + tokens[None, :] * N + rows[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=some[None, :] & (rows < N)[:, None])


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x W^T + bias -> [T, N] in x's dtype, summed in float32. Can be captured in a CUDA graph; never waits for the GPU.

    Args:
        x: [T, K] with T <= MAX_ROWS, bf16, fp16 or fp32, elements of a row adjacent.
        weight: [N, K], contiguous, of x's dtype; not still being written on the GPU (rule 3 of kernels/pdl.py).
        bias: [N], contiguous, or None.
        out: where the result goes, [T, N], contiguous, of x's dtype; None: new memory.

    Raises:
        ValueError: more rows than MAX_ROWS, or other strides, shapes or dtypes.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"gemv takes up to {MAX_ROWS} rows, not {rows}")
    if weight.shape[1] != k or not weight.is_contiguous() or x.stride(1) != 1 or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit gemv"
        )
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if _uses_dot(rows, n, x.dtype):
        block_n = 16
        block_k, stages = _dot_tile(n)
        _dot_kernel[(triton.cdiv(n, block_n),)](
            x, weight, bias, out, n, k, x.stride(0), rows, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_T=MAX_ROWS,
            STAGES=stages, EVEN_K=k % block_k == 0, HAS_BIAS=bias is not None, num_warps=1, **launch_options(x.device),
        )  # fmt: skip
        return out
    block_n, vector = 4, 16 // x.element_size()
    warps, loads, unroll = _fma_tile(rows, n, k)
    block_k = 32 * warps * vector * loads
    _fma_kernel[(triton.cdiv(n, block_n),)](
        x, weight, bias, out, n, k, x.stride(0), T=rows, BLOCK_N=block_n, BLOCK_K=block_k, VECTOR=vector,
        EVEN=n % block_n == 0 and k % block_k == 0, UNROLL=unroll, HAS_BIAS=bias is not None,
        num_warps=warps, **launch_options(x.device),
    )  # fmt: skip
    return out


def worth_it(rows: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether `gemv` of x [rows, k] and weight [n, k] beats cuBLAS on an H200.

    Always up to 4 rows. Up to 16, unless few programs (n / 16) go a long way (k) each: [1536, 8960] takes 19 us to
    cuBLAS's 11; every other product of Qwen2.5-7B, Qwen2.5-1.5B and Qwen3-0.6B is as fast or faster. Never where rows
    of the weight do not start on 16 bytes, nor in fp32.
    """
    if dtype not in (torch.bfloat16, torch.float16) or k % 8 or rows > MAX_ROWS:
        return False
    return rows <= 4 or n >= 3072 or k <= 4096


def _uses_dot(rows: int, n: int, dtype: torch.dtype) -> bool:
    if dtype == torch.float32:  # no tensor cores for it: they would round to TF32
        return False
    return rows > _MAX_FMA_ROWS + 1 or (rows > _MAX_FMA_ROWS and n >= 3072)


def _fma_tile(rows: int, n: int, k: int) -> tuple[int, int, int]:
    """(warps a program, loads of a row a thread, unrolled iterations), as measured.

    A program reads 4 rows of W. The fewer there are, the more warps share a row, so that enough loads are in flight;
    the more rows of x, the fewer, since the sum across a warp is paid for every row of x.
    """
    if rows == 1:
        warps, unroll = 8 if n <= 2048 else 4, 1
    elif rows == 2:
        warps, unroll = 8 if n <= 2048 else 4 if n <= 5000 else 2, 1
    else:
        warps, unroll = 8 if n <= 1024 else 4 if n <= 2048 else 2 if n < 6000 else 1, 2 if n < 6000 else 1
    chunks = triton.next_power_of_2(triton.cdiv(k, 256))  # warp-wide loads in a row
    warps = min(warps, chunks)
    return warps, 2 if rows == 1 and chunks >= 2 * warps else 1, unroll


def _dot_tile(n: int) -> tuple[int, int]:
    """(BLOCK_K, stages): the most bytes in flight with which all programs of 16 rows still run at once."""
    programs = triton.cdiv(n, 16)
    if programs <= 2 * _SMS:
        return 512, 4  # 96 KiB of shared memory each: two an SM
    return (256, 4) if programs <= 4 * _SMS else (256, 3)
