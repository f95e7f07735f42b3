"""y = x W^T + b for a few rows of x, where the time is the time to read W once; and what stands around it in a decoder.

Two kernels, by the number of rows T. A program owns a few rows of W and all of K, so no program waits for another and
the order of every sum is fixed: equal inputs give equal bits.

  T <= 3    `_fma_kernel`: 16-byte loads of W straight into registers, fp32 multiply-adds, many small programs an SM.
  T <= 16   `_dot_kernel`: as rows are added the multiply-adds get dearer than the loads; the tensor cores take them.
            (`_fma_kernel` stays in fp32, which they would round, and at T = 4 with few rows of W; at T = 3 it leaves
            large models to the other.)

At this size a kernel costs more to start and to end than to run, so they can do their neighbours' work as well:

    x --> [ RMSNorm ] --> W, b --> [ SiLU(gate) * up ] --> [ + residual ] --> out       gemv
                               '-> [ rotary embedding ] --> q, and into the KV cache    qkv_gemv

  norm       `_fma_kernel` only. Every program reads all of x anyway: it sums the squares of x beside the products of
             x * g, of which the norm is a multiple, and multiplies at the end.
  SiLU-mul   A program owns the same rows of gate and of up.
  residual   A program adds what belongs to the rows it owns.
  rotary     A program owns rows in pairs, i and i + D/2 of one head, which turn together.

On Hopper and later both are launched as programmatic dependents (kernels/pdl.py): a program is in place while the
kernel before it still runs. `_fma_kernel` asks for its first weights, which depend on nobody, before it waits for x.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mini_infer.kernels.gemv_kernels import Ends, _dot_kernel, _fma_kernel
from mini_infer.kernels.interface import Places
from mini_infer.kernels.paged_prefill import shared_memory
from mini_infer.kernels.pdl import launch_options
from mini_infer.kernels.rope_and_store import rope_and_store_reference
from mini_infer.kernels.silu_mul import silu_mul_reference

MAX_ROWS = 16
_MAX_FMA_ROWS = 3
_MMA_ROWS = 16  # of W, that a warp's tensor core takes; a multiple of what `_fma_kernel` takes
_SMS = 132  # of the H200 that the parameters below were measured on


def gemv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """The definition, summed in float32. Arguments as `gemv`."""
    wide = x.float()
    if norm is not None:
        norm_weight, eps = norm
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm_weight.float()
    y = wide @ weight.float().T
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    if silu_mul:
        y = silu_mul_reference(y)
    return y if residual is None else residual + y


def qkv_gemv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """The definition. Arguments as `qkv_gemv`."""
    return rope_and_store_reference(gemv_reference(x, weight, bias, norm=norm), None, places)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """x W^T + bias -> [T, N] in x's dtype, summed in float32. Can be captured in a CUDA graph; never waits for the GPU.

    Rounded to x's dtype are the product, silu(gate) and the result, as if each was an operation of its own. Not so the
    norm of x: it stays float32.

    Args:
        x: [T, K] with T <= MAX_ROWS, bf16, fp16 or fp32, elements of a row adjacent.
        weight: [N, K], contiguous, of x's dtype; not still being written on the GPU (rule 3 of kernels/pdl.py), as
            little as bias and the norm's weight.
        bias: [N], contiguous, or None.
        out: where the result goes, [T, N], contiguous, of x's dtype; None: new memory.
        norm: weight [K], contiguous, and eps: of x first its RMSNorm. Worth it where `takes_norm` says so.
        residual: [T, N], contiguous, of x's dtype, added to the product.
        silu_mul: weight and bias are gate over up: silu(gate) * up, [T, N / 2].

    Raises:
        ValueError: more rows than MAX_ROWS, or other strides, shapes or dtypes.
    """
    rows, outs = x.shape[0], weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if residual is not None and (residual.shape != (rows, outs) or not residual.is_contiguous()):
        raise ValueError(f"the residual of gemv is contiguous, {(rows, outs)}, not {tuple(residual.shape)}")
    if out is None:
        out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, norm, out, residual=residual, silu_mul=silu_mul)
    return out


def qkv_gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, *, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """`gemv` to q | k | v heads, and of that `rope_and_store` without QK-norm -> q [T, Hq, D], contiguous.

    Rounded as if each was an operation of its own.

    Args:
        x, weight, bias, norm: of `gemv`, where N = (Hq + 2 Hkv) * D.
        places: such as `takes_heads` says. Of tokens that share a slot, any one stays.

    Raises:
        ValueError: as `gemv`, or `takes_heads` says no, or weight's rows are no such heads.
    """
    (_, kv_heads, head_dim), n = places.key_slots.shape, weight.shape[0]
    q_heads = n // head_dim - 2 * kv_heads
    if not takes_heads(x.dtype, places) or n % head_dim or q_heads < 1:
        raise ValueError(
            f"qkv_gemv takes heads of a multiple of {_MMA_ROWS} dimensions and a cache of x's dtype, not "
            f"x {x.dtype}, weight {tuple(weight.shape)} and slots {tuple(places.key_slots.shape)} "
            f"{places.key_slots.dtype}. Call gemv and rope_and_store"
        )
    q = x.new_empty((x.shape[0], q_heads, head_dim))
    _launch(x, weight, bias, norm, q, places=places)
    return q


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    places: Places | None = None,
) -> None:
    """Arguments as `gemv` and `qkv_gemv`, whose own are checked."""
    (rows, k), n = x.shape, weight.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"gemv takes up to {MAX_ROWS} rows, not {rows}")
    if weight.shape[1] != k or not weight.is_contiguous() or x.stride(1) != 1 or x.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit gemv"
        )
    norm_weight, eps = (None, 0.0) if norm is None else norm
    if norm_weight is not None and norm_weight.shape != (k,):
        raise ValueError(f"the weight of gemv's norm is {(k,)}, not {tuple(norm_weight.shape)}")
    if not out.numel():
        return
    outs = n // 2 if silu_mul else n
    rotary_stride = 0 if places is None else places.cos.stride(0)
    if norm is None and _uses_dot(rows, n, k, x.dtype):
        block_n, block_k, stages = _dot_tile(rows, n, k)
        block_t = 8 if rows <= 8 else 16
        if (shared := shared_memory(x.device)) is not None:
            stages = max(1, min(stages, shared // ((block_n + block_t) * block_k * x.element_size())))
        ends = Ends.of(block_n, silu_mul, residual, out, places)
        _dot_kernel[(triton.cdiv(n, ends.block_n),)](
            x, weight, bias, residual, out, places, outs, k, x.stride(0), rotary_stride, rows, ENDS=ends,
            BLOCK_K=block_k, BLOCK_T=block_t, STAGES=stages, EVEN_K=k % block_k == 0,
            num_warps=ends.block_n // _MMA_ROWS, **launch_options(x.device),
        )  # fmt: skip
        return
    vector = 16 // x.element_size()
    block_n, warps, loads, unroll = _fma_tile(rows, n, k)
    block_k = 32 * warps * vector * loads
    _fma_kernel[(triton.cdiv(n, block_n),)](
        x, norm_weight, weight, bias, residual, out, places, outs, k, x.stride(0), rotary_stride, eps, rows,
        ENDS=Ends.of(block_n, silu_mul, residual, out, places), BLOCK_K=block_k, VECTOR=vector,
        EVEN_K=k % block_k == 0, UNROLL=unroll, NORM=norm is not None, num_warps=warps, **launch_options(x.device),
    )  # fmt: skip


def worth_it(rows: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether `gemv` of x [rows, k] and weight [n, k] beats cuBLAS on an H200.

    Up to 4 rows always, though called alone (reports/fused_kernels.md) two products of Qwen2.5-7B are slower for 4:
    QKV takes 11.7 us to cuBLAS's 10.7, down 45 to 37. Above, unless few programs go a long way (k) each: [1536, 8960]
    takes 15 us for 8 rows to cuBLAS's 11, [3584, 18944] 42 us for 16 to its 39. Every other product of Qwen2.5-7B,
    Qwen2.5-1.5B and Qwen3-0.6B is as fast or faster. Never where rows of the weight do not start on 16 bytes, nor in
    fp32.
    """
    if dtype not in (torch.bfloat16, torch.float16) or k % 8 or rows > MAX_ROWS:
        return False
    if rows <= 8:
        return rows <= 4 or n >= 3072 or k <= 4096
    return k <= 2048 or (n >= 3072 and k <= 8192)


def takes_norm(rows: int, k: int) -> bool:
    """Whether the norm of x [rows, k] is better done by `gemv` than by a kernel of its own: the squares cost registers,
    which a long row of several x has none to spare of."""
    return rows == 1 or (rows <= _MAX_FMA_ROWS and k <= 2048)


def takes_heads(dtype: torch.dtype, places: Places) -> bool:
    """Whether `qkv_gemv` of x of this dtype can: where a cache is of that dtype, and a program's rows of one head."""
    return places.key_slots.shape[2] % _MMA_ROWS == 0 and places.key_slots.dtype == dtype


def _uses_dot(rows: int, n: int, k: int, dtype: torch.dtype) -> bool:
    if dtype == torch.float32:  # no tensor cores for it: they would round to TF32
        return False
    if rows == _MAX_FMA_ROWS:
        # The multiply-adds have begun to show: in large models, and there in all products, since kernels that want L1
        # and kernels that want shared memory slow each other down.
        return min(n, k) > 2048
    return rows > _MAX_FMA_ROWS + 1 or (rows > _MAX_FMA_ROWS and n >= 3072)


# What two ranks have of Qwen2.5-7B: qkv, o, gate and up, down, the head. A layer takes 56 us so, and 60 by the rule.
_HALVES = {
    (2304, 3584): (4, 8, 1, 1),
    (3584, 1792): (2, 4, 1, 1),
    (18944, 3584): (4, 8, 1, 1),
    (3584, 9472): (2, 8, 1, 1),
    (76032, 3584): (2, 8, 1, 1),
}


def _fma_tile(rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    """(rows of W a program, its warps, loads of a row a thread, unrolled iterations), as measured.

    The fewer rows of W there are, the more warps share a row, so that enough loads are in flight; the more rows of x,
    the fewer, since the sum across a warp is paid for every row of x.
    """
    if rows == 1 and (n, k) in _HALVES:
        return _HALVES[n, k]
    if rows == 1:
        warps, unroll = 8 if n <= 2048 else 2 if k <= 1024 else 4, 1
    elif rows == 2:
        warps, unroll = 8 if n <= 2048 else 4 if n <= 4096 else 2, 2 if 4096 < n < 6000 else 1
    else:
        warps, unroll = 8 if n <= 1024 else 4 if n <= 2048 else 2 if n < 6000 else 1, 2 if n < 6000 else 1
    chunks = triton.next_power_of_2(triton.cdiv(k, 256))  # warp-wide loads in a row
    warps = min(warps, chunks)
    if n <= 1024 and k > (4096 if rows == 1 else 2048) and rows <= 2:  # few programs that go a long way: twice as many
        return 2, warps, 1, unroll
    return 4, warps, 2 if rows == 1 and k > 1024 and chunks >= 2 * warps else 1, unroll


def _dot_tile(rows: int, n: int, k: int) -> tuple[int, int, int]:
    """(rows of W a program, BLOCK_K, stages), as measured in chains of layers: many bytes in flight, and room for all
    programs at once.

    Each program reads all of x. So for many rows of x, or of W, it owns more rows of W: sixteen of each were as much to
    read again as W itself (gate and up of Qwen2.5-7B took 101 us instead of 65).
    """
    if rows > 8 and n >= 4096:
        return 64, 128, 3 if n >= 8192 else 4
    if n >= 8192:
        return 32, 256, 4
    few = n <= 2 * 16 * _SMS and (k <= 8192 or rows > 8)
    if few and k % 512 == 0:
        return 16, 512, 4
    return 16, 256, 8 if few and rows <= 8 else 6
