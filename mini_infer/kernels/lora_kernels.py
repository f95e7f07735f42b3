"""The operations of lora.py, a launch each.

A program takes tokens of one adapter, 16 at a time, so that whoever shares an adapter reads it once (SGMV of Punica,
arXiv:2310.18547), and a group of one token is a product of a matrix and a vector (its BGMV). The tile is the same for
any number of tokens, and sums over K have fixed ends: a token's numbers do not depend on its company.

Programs without tokens end at once. A grid has as many groups as there are slots, or tokens where those are fewer, so
its size does not depend on what is in the step.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.lora import Groups, LoraWeights
from mini_infer.kernels.paged_prefill import DOT_DTYPES

_TOKENS = 16  # a tile
_SPLIT = 1024  # inputs that a program of `shrink` adds up
_OUTS = 128  # outputs of a program of `expand`
_SPREAD = 512  # tokens of one adapter that programs side by side share, each so many


@triton.jit(do_not_specialize=["num_tokens", "each"])
def _group_kernel(
    slots_ptr, owners_ptr, order_ptr, of_slot_ptr, num_tokens, each, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """A program a slot. It counts all slots' tokens to find its own place, and then puts its own there."""
    own = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    counts = tl.zeros([SLOTS], tl.int32)
    for first in range(0, num_tokens, BLOCK):
        of_token = _slots_of(slots_ptr, owners_ptr, first + tl.arange(0, BLOCK), num_tokens, each)
        counts += tl.sum((of_token[None, :] == slot[:, None]).to(tl.int32), axis=1)
    before = slot < own
    begin = tl.sum(tl.where(before, counts, 0))
    count = tl.sum(tl.where(slot == own, counts, 0))
    taken = (counts > 0).to(tl.int32)
    # Groups come first, and behind them as many places as there are slots without tokens.
    place = tl.sum(tl.where(before, taken, 0))
    if count == 0:
        place = tl.sum(taken) + own - place
    end = tl.where(count > 0, begin + count, 0)
    tl.store(of_slot_ptr + place * 3, own)
    tl.store(of_slot_ptr + place * 3 + 1, begin)
    tl.store(of_slot_ptr + place * 3 + 2, end)
    if count > 0:
        for first in range(0, num_tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            mine = _slots_of(slots_ptr, owners_ptr, token, num_tokens, each) == own
            tl.store(order_ptr + begin + tl.cumsum(mine.to(tl.int32), 0) - 1, token, mask=mine)
            begin += tl.sum(mine.to(tl.int32))


@triton.jit
def _slots_of(slots_ptr, owners_ptr, token, num_tokens, each):
    real = token < num_tokens
    owner = tl.load(owners_ptr + token // each, mask=real, other=0)
    return tl.load(slots_ptr + owner, mask=real, other=-1)


def group(groups: Groups, slots: Tensor, owners: Tensor, num_tokens: int) -> None:
    num_slots = len(groups.of_slot)
    padded = triton.next_power_of_2(num_slots)
    _group_kernel[(num_slots,)](
        slots, owners, groups.order, groups.of_slot, num_tokens, num_tokens // max(1, len(owners)), SLOTS=padded,
        BLOCK=max(16, 8192 // padded), num_warps=4,
    )  # fmt: skip


@triton.jit
def _shrink_kernel(
    x_ptr,
    a_ptr,
    out_ptr,
    order_ptr,
    of_slot_ptr,
    slot_stride,
    IN: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    own = of_slot_ptr + tl.program_id(0) * 3
    begin, end = tl.load(own + 1), tl.load(own + 2)
    split, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    rank, k = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    a_ptr += tl.load(own).to(tl.int64) * slot_stride + part * RANK * IN
    for first in range(begin + tl.program_id(2) * TOKENS, end, tl.num_programs(2) * TOKENS):
        at = first + tl.arange(0, TOKENS)
        real = at < end
        token = tl.load(order_ptr + at, mask=real, other=0).to(tl.int64)
        acc = tl.zeros([TOKENS, RANK], tl.float32)
        for step in range(0, CHUNK, BLOCK_K):
            column = split * CHUNK + step + k
            inside = (step + k < CHUNK) & (column < IN)
            x = tl.load(x_ptr + token[:, None] * IN + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_ptr + rank[None, :] * IN + column[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(x.to(DOT), a.to(DOT), acc, input_precision="ieee")
        to = out_ptr + ((token * SPLITS + split) * PARTS + part)[:, None] * RANK + rank[None, :]
        tl.store(to, acc, mask=real[:, None])


def shrink(x: Tensor, weights: LoraWeights, groups: Groups, chunk: int | None = None) -> Tensor:
    slots, parts, rank, size = weights.a.shape
    chunk = min(_SPLIT, size) if chunk is None else chunk
    splits = triton.cdiv(size, chunk)
    out = x.new_empty(len(x), splits, parts, rank, dtype=torch.float32)
    _shrink_kernel[_grid(len(x), slots, splits * parts)](
        x, weights.a, out, *groups, weights.a.stride(0), IN=size, CHUNK=chunk, SPLITS=splits, PARTS=parts, RANK=rank,
        TOKENS=_TOKENS, BLOCK_K=min(128, triton.next_power_of_2(chunk)), DOT=DOT_DTYPES[x.dtype], num_warps=2,
        num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _expand_kernel(
    y_ptr,
    shrunk_ptr,
    b_ptr,
    order_ptr,
    of_slot_ptr,
    blocks_ptr,
    slot_stride,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTS: tl.constexpr,
    DOT: tl.constexpr,
):
    own = of_slot_ptr + tl.program_id(0) * 3
    begin, end = tl.load(own + 1), tl.load(own + 2)
    begin += tl.program_id(2) * TOKENS
    if begin < end:
        block = blocks_ptr + tl.program_id(1) * 3
        part, out = tl.load(block), tl.load(block + 1) + tl.arange(0, OUTS)
        inside, rank = out < tl.load(block + 2), tl.arange(0, RANK)
        b_ptr += tl.load(own).to(tl.int64) * slot_stride
        b = tl.load(b_ptr + out[None, :] * RANK + rank[:, None], mask=inside[None, :], other=0.0)
        for first in range(begin, end, tl.num_programs(2) * TOKENS):
            at = first + tl.arange(0, TOKENS)
            real = at < end
            token = tl.load(order_ptr + at, mask=real, other=0).to(tl.int64)
            s = tl.zeros([TOKENS, RANK], tl.float32)
            for split in range(SPLITS):
                row = (token * SPLITS + split) * PARTS + part
                s += tl.load(shrunk_ptr + row[:, None] * RANK + rank[None, :], mask=real[:, None], other=0.0)
            s = s.to(y_ptr.dtype.element_ty)
            mask = real[:, None] & inside[None, :]
            to = y_ptr + token[:, None] * OUT + out[None, :]
            y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
            y = tl.dot(s.to(DOT), b.to(DOT), y, input_precision="ieee")
            tl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


def expand(y: Tensor, shrunk: Tensor, weights: LoraWeights, groups: Groups) -> None:
    slots, outs, rank = weights.b.shape
    blocks = _blocks(weights.parts, y.device)
    _expand_kernel[_grid(len(y), slots, len(blocks))](
        y, shrunk, weights.b, *groups, blocks, weights.b.stride(0), OUT=outs, SPLITS=shrunk.shape[1],
        PARTS=len(weights.parts), RANK=rank, TOKENS=_TOKENS, OUTS=_OUTS, DOT=DOT_DTYPES[y.dtype], num_warps=4,
    )  # fmt: skip


def _grid(tokens: int, slots: int, blocks: int) -> tuple[int, int, int]:
    return min(slots, tokens), blocks, triton.cdiv(tokens, _SPREAD)


@cache
def _blocks(parts: tuple[int, ...], device: torch.device) -> Tensor:
    """[blocks, 3] int32: the part that a program's outputs are of, the first of them, and the end of the part."""
    found, start = [], 0
    for part, size in enumerate(parts):
        found += [(part, first, start + size) for first in range(start, start + size, _OUTS)]
        start += size
    return torch.tensor(found, dtype=torch.int32, device=device)
