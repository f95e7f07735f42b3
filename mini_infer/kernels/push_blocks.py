"""KV blocks into memory that a kernel writes to by its address: another GPU's, over NVLink where there is any, or that
of another process. One launch takes blocks of many planes, such as keys and values of several layers.

What a link carries at once is its rate times its latency: of two H200s 395 GB/s, at 2 us 0.8 MB. 48 programs with 32
KiB under way each have twice that, and brought 28 layers of 4,096 tokens over at 355 GB/s (24 programs: 332). Beside
products they waited no longer for multiprocessors, and cost these no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_WORDS = 4096  # that a program has under way: 32 KiB
_PROGRAMS = 48


@dataclass(frozen=True)
class _Shape:
    """What the kernel is compiled for: blocks as rows of words, which lie together. The next block is `..._block`
    words behind, the next row `..._row`."""

    rows: int
    words: int
    source_block: int
    target_block: int
    source_row: int
    target_row: int
    itemsize: int
    aligned: int  # bytes that all addresses are multiples of, up to 16, which one thread moves at once
    part: int  # words of one block that a program takes
    at_once: int  # parts that a program has under way


@triton.jit(  # one variant for any number of planes and blocks: none is compiled in the middle of a load
    do_not_specialize=["count", "num_parts"], do_not_specialize_on_alignment=["planes_ptr", "here_ptr", "there_ptr"]
)
def _push_kernel(planes_ptr, here_ptr, there_ptr, count, num_parts, S: tl.constexpr):
    """A program loads several parts of blocks before it stores the first of them."""
    SIZE: tl.constexpr = S.rows * S.words
    PARTS: tl.constexpr = (SIZE + S.part - 1) // S.part
    for first in range(tl.program_id(0) * S.at_once, num_parts, tl.num_programs(0) * S.at_once):
        number = first + tl.arange(0, S.at_once)
        some, place = number < num_parts, number // PARTS
        plane, index = place // count, place % count
        source = _blocks(planes_ptr, here_ptr, plane, index, some, S.source_block, S)
        target = _blocks(planes_ptr + 1, there_ptr, plane, index, some, S.target_block, S)
        words = (number % PARTS * S.part)[:, None] + tl.arange(0, S.part)[None, :]
        row, word, exists = words // S.words, words % S.words, some[:, None] & (words < SIZE)
        loaded = tl.load(source + row * S.source_row + word, mask=exists)
        tl.store(target + row * S.target_row + word, loaded, mask=exists)


@triton.jit
def _blocks(planes_ptr, numbers_ptr, plane, index, some, APART: tl.constexpr, S: tl.constexpr):
    """Where blocks of planes begin, [parts, 1]."""
    ALIGNED: tl.constexpr = S.aligned
    WORD: tl.constexpr = tl.int64 if S.itemsize == 8 else tl.uint8
    begin = tl.load(planes_ptr + 2 * plane, mask=some, other=0).to(tl.pointer_type(WORD))
    block = begin + tl.load(numbers_ptr + index, mask=some, other=0) * APART
    return tl.multiple_of(block, ALIGNED)[:, None]


class PlaneCopies:
    """Copies blocks of planes here to planes there.

    Args:
        planes: one here and one there each, [any number of blocks, rows, words] int64 or uint8, of which words lie
            together: all alike but for their number of blocks, and on a device that reaches them. They have to be there
            as long as this.
    """

    def __init__(self, planes: Sequence[tuple[Tensor, Tensor]]) -> None:
        source, target = planes[0]
        addresses = [[plane.data_ptr() for plane in both] for both in planes]
        strides = source.stride(0), target.stride(0), source.stride(1), target.stride(1)
        aligned = gcd(16, *(apart * source.itemsize for apart in strides), *(at for both in addresses for at in both))
        _, rows, words = source.shape
        # So many that little of a block's last part is empty, and not too many parts: a thread looks each of its up.
        part = max(gcd(rows * words, _TILE_WORDS), min(256, triton.next_power_of_2(rows * words)))
        at_once = min(16, _TILE_WORDS // part)
        self._shape = _Shape(rows, words, *strides, source.itemsize, aligned, part, at_once)
        self._parts = triton.cdiv(rows * words, part)
        self._addresses = torch.tensor(addresses, device=source.device)
        nothing = self._addresses.new_empty(0)
        self.push(0, len(planes), nothing, nothing)  # the kernel is compiled and loaded now

    def push(self, first: int, end: int, here: Tensor, there: Tensor) -> None:
        """Blocks `here` [n] int64 of planes [first, end) to blocks `there`."""
        planes, num_parts = self._addresses[first:end], (end - first) * len(here) * self._parts
        grid = (max(1, min(triton.cdiv(num_parts, self._shape.at_once), _PROGRAMS)),)
        _push_kernel[grid](planes, here, there, len(here), num_parts, S=self._shape, num_warps=8)
