"""The operations of lora.py, a launch each.

A program takes a span of tokens of one adapter, 16 at a time, so that whoever shares an adapter reads it once (SGMV of
Punica, arXiv:2310.18547), and a span of one token is a product of a matrix and a vector (its BGMV). The tile is the
same for any number of tokens, and sums over K have fixed ends: a token's numbers do not depend on its company.

Programs without tokens end at once. A grid has as many spans as a step of so many tokens can have, so its size does not
depend on what is in the step.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.lora import Groups, LoraWeights, most_spans, span
from mini_infer.kernels.paged_prefill import DOT_DTYPES, shared_memory
from mini_infer.kernels.pdl import launch_options, let_next_start, wait_for_previous

_TOKENS = 16  # a tile
_SPLIT = 512  # inputs that a program of `shrink` adds up
_OUTS, _SHARE = 128, 256  # outputs that a program of `expand` takes at a time, and in all
_CLEAR = 1024  # numbers that a program of `shrink` makes 0 at a time
_AT_ONCE = 128  # spans that `group` writes


@triton.jit(do_not_specialize=["num_tokens", "each", "places"])
def _group_kernel(
    slots_ptr,
    owners_ptr,
    order_ptr,
    spans_ptr,
    num_tokens,
    each,
    places,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
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
    num_spans = tl.cdiv(counts, SPAN)
    place = tl.sum(tl.where(before, num_spans, 0))
    taken = tl.sum(num_spans)
    end = begin + count
    for first in range(0, tl.cdiv(count, SPAN), AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        start = begin + index * SPAN
        to, real = spans_ptr + (place + index) * 3, start < end
        tl.store(to, own, mask=real)
        tl.store(to + 1, start, mask=real)
        tl.store(to + 2, tl.minimum(start + SPAN, end), mask=real)
    for first in range(taken + own * AT_ONCE, places, tl.num_programs(0) * AT_ONCE):  # there are no more
        index = first + tl.arange(0, AT_ONCE)
        tl.store(spans_ptr + index * 3 + 2, 0, mask=index < places)
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
    padded = triton.next_power_of_2(groups.num_slots)
    _group_kernel[(groups.num_slots,)](
        slots, owners, groups.order, groups.spans, num_tokens, num_tokens // max(1, len(owners)),
        len(groups.spans), SLOTS=padded, BLOCK=max(16, min(1024, 8192 // padded)),
        SPAN=span(num_tokens), AT_ONCE=_AT_ONCE, num_warps=4,
    )  # fmt: skip


@triton.jit
def _shrink_kernel(
    x_ptr,
    a_ptr,
    out_ptr,
    clear_ptr,  # None, or what is made 0
    order_ptr,
    spans_ptr,
    slot_stride,
    num_clear,
    IN: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    CLEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    if clear_ptr is not None:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        for first in range(program * CLEAR, num_clear, tl.num_programs(0) * tl.num_programs(1) * CLEAR):
            at = first + tl.arange(0, CLEAR)
            tl.store(clear_ptr + at, 0.0, mask=at < num_clear)
    own = spans_ptr + tl.program_id(0) * 3
    begin, end = tl.load(own + 1), tl.load(own + 2)
    split, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    rank, k = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    a_ptr += tl.load(own).to(tl.int64) * slot_stride + part * RANK * IN
    for first in range(begin, end, TOKENS):
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


def shrink(
    x: Tensor, weights: LoraWeights, groups: Groups, chunk: int | None = None, clear: Tensor | None = None
) -> Tensor:
    _, parts, rank, size = weights.a.shape
    chunk = min(_SPLIT, size) if chunk is None else chunk
    num_clear = 0 if clear is None else clear.numel()
    block_k = min(128, triton.next_power_of_2(chunk), 2**14 // rank)
    stages = 4
    if (shared := shared_memory(x.device)) is not None:
        stages = max(1, min(stages, shared // (block_k * (rank + _TOKENS) * x.itemsize)))
    splits = triton.cdiv(size, chunk)
    out = x.new_empty(len(x), splits, parts, rank, dtype=torch.float32)
    _shrink_kernel[most_spans(groups, len(x)), splits * parts](
        x, weights.a, out, clear, groups.order, groups.spans, weights.a.stride(0), num_clear,
        IN=size, CHUNK=chunk, SPLITS=splits, PARTS=parts, RANK=rank, TOKENS=_TOKENS, BLOCK_K=block_k, CLEAR=_CLEAR,
        DOT=DOT_DTYPES[x.dtype], num_warps=2, num_stages=stages, **launch_options(x.device, ordinary=True),
    )  # fmt: skip
    return out


@triton.jit
def _expand_kernel(
    y_ptr,
    shrunk_ptr,
    b_ptr,
    order_ptr,
    spans_ptr,
    shares_ptr,
    slot_stride,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    own = spans_ptr + tl.program_id(1) * 3
    begin, end = tl.load(own + 1), tl.load(own + 2)  # in place since before `shrink`, which waited for all before it
    wait_for_previous(PDL)
    if begin < end:
        share = shares_ptr + tl.program_id(0) * 3
        part, rank = tl.load(share), tl.arange(0, RANK)
        # Without these hints each number is read and written by itself.
        first_out, last_out = tl.multiple_of(tl.load(share + 1), ALIGNED), tl.multiple_of(tl.load(share + 2), ALIGNED)
        b_ptr += tl.load(own).to(tl.int64) * slot_stride
        for first in range(begin, end, TOKENS):
            at = first + tl.arange(0, TOKENS)
            real = at < end
            token = tl.load(order_ptr + at, mask=real, other=0).to(tl.int64)
            s = tl.zeros([TOKENS, RANK], tl.float32)
            for split in tl.static_range(SPLITS):  # so that all are asked for at once
                row = (token * SPLITS + split) * PARTS + part
                s += tl.load(shrunk_ptr + row[:, None] * RANK + rank[None, :], mask=real[:, None], other=0.0)
            rounded = s.to(y_ptr.dtype.element_ty).to(DOT)
            for start in range(first_out, last_out, OUTS):
                out = tl.multiple_of(start, ALIGNED) + tl.arange(0, OUTS)
                inside = out < last_out
                mask = real[:, None] & inside[None, :]
                to = y_ptr + token[:, None] * OUT + out[None, :]
                b = tl.load(b_ptr + out[None, :] * RANK + rank[:, None], mask=inside[None, :], other=0.0)
                y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
                y = tl.dot(rounded, b.to(DOT), y, input_precision="ieee")
                tl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


def expand(y: Tensor, shrunk: Tensor, weights: LoraWeights, groups: Groups, *, joins: bool = False) -> None:
    _, outs, rank = weights.b.shape
    spans = most_spans(groups, len(y))
    shares, aligned = _shares(weights.parts, y.device)
    at_once = min(_OUTS, 2**15 // rank)
    _expand_kernel[len(shares), spans](
        y, shrunk, weights.b, groups.order, groups.spans, shares, weights.b.stride(0), OUT=outs, SPLITS=shrunk.shape[1],
        PARTS=len(weights.parts), RANK=rank, TOKENS=_TOKENS, OUTS=at_once, ALIGNED=aligned, DOT=DOT_DTYPES[y.dtype],
        num_warps=4, num_stages=1, **launch_options(y.device, ordinary=joins),
    )  # fmt: skip


@cache
def _shares(parts: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """[programs, 3] int32: the part that a program's outputs are of, the first of them, and the end. And what
    divides these two, of 16."""
    found, start = [], 0
    for part, size in enumerate(parts):
        end = start + size
        found += [(part, first, min(first + _SHARE, end)) for first in range(start, end, _SHARE)]
        start = end
    aligned = gcd(16, *(place for _, *places in found for place in places))
    return torch.tensor(found, dtype=torch.int32, device=device), aligned
