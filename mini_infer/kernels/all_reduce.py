"""The sum over the ranks of a tensor-parallel group, in one kernel with the residual addition and the norm after it.

Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) needs two such sums a layer. A decode step's are some kilobytes, of
which the links take a microsecond and a collective ten. Here each rank's product writes its part of the sum into memory
that the others can read (symmetric memory), and one kernel a rank reads all parts:

    rank 0    product --> part 0 --.             .--> total = residual + part 0 + part 1, norm(total)
                                    >-- meet --<
    rank 1    product --> part 1 --'             '--> the same, to the bit: parts are added in the order of ranks

  one shot    Every rank reads every row of every part: (n - 1) x size over a rank's link, and one meeting.
  two shots   A rank adds up every n-th row and writes what comes of it to all ranks: 2 (n - 1) / n x size, and a second
              meeting. With two ranks it has no use.

A meeting is between programs of one index. Each sets a flag of its own at every peer, from 0 to 1, and waits until the
peers' flags with itself are 1, which it sets back to 0. So flags need no count, and a captured CUDA graph can be
replayed.

Who calls it alternates between two memories: when a rank writes part k + 2 it has met the others for sum k + 1, and so
they have ended sum k, the last that read the place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.paged_prefill import DOT_DTYPES
from mini_infer.kernels.pdl import launch_options
from mini_infer.kernels.rms_norm import add_rms_norm_reference, num_warps


@triton.jit
def _meet(flags_ptr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """What the peers' programs of this index wrote before is visible after.

    flags_ptr: int64 [WORLD], the addresses of each rank's flags, int32 [programs, WORLD].
    """
    tl.debug_barrier()  # all threads of the program have written what they write
    place = tl.program_id(0) * WORLD
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            flag = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32)) + place + RANK
            while tl.atomic_cas(flag, 0, 1, sem="release", scope="sys") != 0:
                pass
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            flag = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + place + peer
            while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()


@triton.jit
def _all_reduce_kernel(
    parts_ptr,  # int64 [WORLD], addresses
    flags_ptr,
    residual_ptr,
    weight_ptr,
    totals_ptr,  # one shot: [rows, SIZE]; two shots: int64 [WORLD], addresses of such
    norms_ptr,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if TWO_SHOTS:
        row = row * WORLD + RANK
    places = row.to(tl.int64) * SIZE + columns
    inside &= row < num_rows
    residual = tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    _meet(flags_ptr, RANK, WORLD)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD):
        part_ptr = tl.load(parts_ptr + peer).to(tl.pointer_type(DTYPE))
        total += tl.load(part_ptr + places, mask=inside, other=0.0).to(tl.float32)
    # Rounded as a product of one rank is before it is added.
    total = (total.to(DTYPE).to(tl.float32) + residual).to(DTYPE)
    wide = total.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * weight).to(DTYPE)
    if TWO_SHOTS:
        for peer in tl.static_range(WORLD):
            tl.store(tl.load(totals_ptr + peer).to(tl.pointer_type(DTYPE)) + places, total, mask=inside)
            tl.store(tl.load(norms_ptr + peer).to(tl.pointer_type(DTYPE)) + places, normed, mask=inside)
        _meet(flags_ptr, RANK, WORLD)
    else:
        tl.store(totals_ptr + places, total, mask=inside)
        tl.store(norms_ptr + places, normed, mask=inside)


class Shared(NamedTuple):
    """Memory of all ranks, as one of them sees it. Tables are int64 [WORLD], addresses by rank, on the device."""

    rank: int
    parts: Tensor  # table of parts [rows, H], of the residual's dtype
    flags: Tensor  # table of int32 [programs, WORLD], zeros before the first call
    outs: tuple[Tensor, Tensor] | None = None  # for two shots: this rank's norms and totals [rows, H], and
    out_tables: tuple[Tensor, Tensor] | None = None  # ... where they are at every rank


def all_reduce_add_norm_reference(
    parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition. Arguments as `all_reduce_add_norm`, the parts [T, H] by rank."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for part in parts:
        total += part.float()
    return add_rms_norm_reference(total.to(residual.dtype), residual, weight, eps)


def all_reduce_add_norm(shared: Shared, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total), where total is residual plus the parts' sum. Every rank of the group calls it, with
    equal arguments but for `shared`.

    Args:
        shared: the parts' first T rows are summed; in two shots where it has memory for what comes of it.
        residual: [T, H] contiguous; it does not lie in `shared.outs`.
        weight: [H], which is read early, as in `rms_norm`.

    Returns:
        [T, H] each, of the residual's dtype: new, or of `shared.outs` its first rows.
    """
    (rows, size), world = residual.shape, len(shared.parts)
    if shared.outs is None:
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        norms_ptr, totals_ptr, programs = normed, total, rows
    else:
        normed, total = (out[:rows] for out in shared.outs)
        assert shared.out_tables is not None
        (norms_ptr, totals_ptr), programs = shared.out_tables, triton.cdiv(rows, world)
    if rows:
        block = triton.next_power_of_2(size)
        _all_reduce_kernel[(programs,)](
            shared.parts, shared.flags, residual, weight, totals_ptr, norms_ptr, eps, rows, SIZE=size, BLOCK=block,
            RANK=shared.rank, WORLD=world, TWO_SHOTS=shared.outs is not None, DTYPE=DOT_DTYPES[residual.dtype],
            num_warps=num_warps(block), **launch_options(residual.device),
        )  # fmt: skip
    return normed, total
