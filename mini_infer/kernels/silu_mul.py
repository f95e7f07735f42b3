"""The activation of SwiGLU (Shazeer 2020, arXiv:2002.05202) over a merged gate and up projection."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.pdl import launch_options, take_turn

_BLOCK = 1024  # of 512 to 4096 the best on an H200, or within 1 % of it, at any size


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The definition. Arguments as `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def gated(gate_ptr, columns, SIZE: tl.constexpr):
    """Of a row whose gate begins at gate_ptr, and up SIZE behind it, rounded as between torch operations; 0 beyond
    SIZE."""
    inside = columns < SIZE
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = gate_ptr.dtype.element_ty
    return ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    take_turn(PDL)
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * SIZE + columns, gated(gate_up_ptr + row * 2 * SIZE, columns, SIZE), mask=columns < SIZE)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], gate first, contiguous -> silu(gate) * up [T, I] of the same dtype; computed in float32."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    if rows:
        grid = (rows * triton.cdiv(size, _BLOCK),)
        _silu_mul_kernel[grid](gate_up, out, SIZE=size, BLOCK=_BLOCK, num_warps=4, **launch_options(gate_up.device))
    return out
