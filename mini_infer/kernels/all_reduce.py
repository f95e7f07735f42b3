"""What ranks say to each other in a decode step, one kernel each: a sum over the ranks, with the residual addition and
the norm behind it, and the columns that they gather. (And what is left of a prompt's sums where copies bring the parts:
`add_copied`, for parallel/copied_sums.py.)

Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) needs two sums a layer. A decode step's are some kilobytes, of which
the links take a microsecond and a collective ten. Here every rank stores its part where the others look for it, in
memory that all ranks can write to:

    rank 0   x --> into every rank's inbox --.      .--> the parts of all ranks, from its own inbox: sum, residual, norm
                                              >----<
    rank 1   x --> into every rank's inbox --'      '--> the same, to the bit: parts are added up in one order

A number says by itself that it is there: in an empty inbox all bits are one, and who reads waits until no such number
is left. So a part travels the link once, and no flag or fence has to follow it (the LL protocol of NCCL; the Lamport
kernels of TensorRT-LLM). All bits one is a NaN that no product makes; a part that has one all the same sends another.

Every program has places of its own in each inbox, the same on all ranks. There are three, which it takes in turns: it
reads one, and empties the one that it read before. A peer may write there again two calls later, when it has this
rank's part of the call in between, which this rank sends when it has ended this one. Which turn it is a program keeps
in memory, so a captured graph can be replayed, and a rank that is ahead waits at its next call.

So a row travels to every other rank. With more than two ranks and many rows that is more than the links need carry,
and a sum is made in two shots: each rank adds up one piece of the row, and sends the sum of it to all. That is twice
the way and 2 / ranks of the bytes; the sums are the same to the bit.

    one shot   rank 0   row      --> all inboxes --> sum of the row
    two shots  rank 0   pieces   --> one to each --> sum of piece 0 --> all inboxes --> sums of all pieces
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.pdl import launch_options, let_next_start, take_turn, wait_for_previous
from mini_infer.kernels.rms_norm import add_rms_norm_reference, num_warps

TURNS = 3
_TURNS = tl.constexpr(TURNS)
# Between two looks at `stop`, which lies in the host's memory.
_LOOKS = tl.constexpr(16 if triton.knobs.runtime.interpret else 1024)
_GATHERED = 4096  # columns a program gathers
_COPIED = 4096  # numbers a program adds
# By the width of numbers: integers of it, and a NaN that is not the one of empty places.
_INTS = {2: (torch.int16, tl.int16, 2**15 - 1), 4: (torch.int32, tl.int32, 2**31 - 1)}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Box(NamedTuple):
    """The tensors of a Mailbox, as kernels take them."""

    inboxes: Tensor
    turns: Tensor
    stop: Tensor


@dataclass(frozen=True)
class MailShape:
    """What kernels of a Mailbox are compiled for, which call it S."""

    places: int
    size: int
    block: int  # size, or the next power of two
    rank: int
    world: int
    ranks: int  # world, or the next power of two
    bits: tl.dtype  # of integers
    nan: int


@triton.jit
def _send(
    bits,  # [BLOCK]
    to,  # a rank
    now,  # where its inbox has this turn's place
    box,
    S: tl.constexpr,
):
    columns = tl.arange(0, S.block)
    inbox = tl.multiple_of(tl.load(box.inboxes + to).to(tl.pointer_type(S.bits)), 16)
    tl.store(inbox + now + S.rank * S.size + columns, bits, mask=columns < S.size)


@triton.jit
def _of_all_ranks(
    bits,  # [BLOCK] of this rank
    place,
    box,
    S: tl.constexpr,
):
    """Every rank's bits [RANKS, BLOCK], zeros beyond WORLD and S.size."""
    turn = tl.load(box.turns + place)
    now = (turn * S.places + place) * (S.world * S.size)
    bits = tl.where(bits == -1, S.nan, bits).to(S.bits)
    for step in tl.static_range(1, S.world + 1):  # this rank's own inbox is the last
        _send(bits, (S.rank + step) % S.world, now, box, S)
    return _receive(place, turn, box, S)


@triton.jit
def _pieces_of_all_ranks(
    row_ptr,  # of this rank's row
    there,  # whether it has one: zeros else
    place,
    box,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Likewise, of the piece of the row that this rank adds up: each rank gets its own."""
    columns = tl.arange(0, S.block)
    turn = tl.load(box.turns + place)
    now = (turn * S.places + place) * (S.world * S.size)
    for step in tl.static_range(1, S.world + 1):
        to = (S.rank + step) % S.world
        piece = to * S.size + columns
        bits = tl.load(row_ptr + piece, mask=there & (columns < S.size) & (piece < WIDTH), other=0)
        _send(tl.where(bits == -1, S.nan, bits).to(S.bits), to, now, box, S)
    return _receive(place, turn, box, S)


@triton.jit
def _receive(place, turn, box, S: tl.constexpr):
    """What every rank has sent [RANKS, BLOCK], zeros beyond WORLD and S.size."""
    BLOCK: tl.constexpr = S.block
    WORLD: tl.constexpr = S.world
    RANKS: tl.constexpr = S.ranks
    columns = tl.arange(0, BLOCK)
    inside = columns < S.size
    now = (turn * S.places + place) * (WORLD * S.size)
    own = tl.multiple_of(tl.load(box.inboxes + S.rank).to(tl.pointer_type(S.bits)), 16)
    ranks = tl.arange(0, RANKS)[:, None]
    parts = ranks * S.size + columns[None, :]
    there = (ranks < WORLD) & inside[None, :]
    before = ((turn + _TURNS - 1) % _TURNS * S.places + place) * (WORLD * S.size)
    tl.store(own + before + parts, tl.full([RANKS, BLOCK], -1, S.bits), mask=there)
    found = tl.load(own + now + parts, mask=there, other=0, volatile=True)
    missing = tl.max(tl.max((found == -1).to(tl.int32), axis=1), axis=0)
    looks = missing * 0
    while missing > 0:
        found = tl.load(own + now + parts, mask=there, other=0, volatile=True)
        missing = tl.max(tl.max((found == -1).to(tl.int32), axis=1), axis=0)
        looks += 1
        if looks % _LOOKS == 0:  # what is computed then nobody reads
            missing = tl.where(tl.load(box.stop, volatile=True) == 0, missing, 0)
    tl.debug_barrier()  # all threads have read which turn it is
    tl.store(box.turns + place, (turn + 1) % _TURNS)
    return found


@triton.jit
def _sum_kernel(
    x_ptr,  # integers of x's width
    ids_ptr,  # None; or which row of x each row is, of which this rank has `known` from `first` on, and zeros else
    residual_ptr,  # None: nothing is added
    weight_ptr,  # None: no norm
    total_ptr,
    normed_ptr,
    box,
    eps,
    first,
    known,
    S: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row
    SHOTS: tl.constexpr,
    LEVELS: tl.constexpr,  # RANKS = 2 ** LEVELS
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    place, columns = tl.program_id(0), tl.arange(0, S.block)
    in_row, inside = columns, columns < S.size
    if SHOTS == 2:  # a piece of each rank: [RANKS, BLOCK]
        in_row = tl.arange(0, S.ranks)[:, None] * S.size + columns[None, :]
        inside = inside[None, :] & (in_row < WIDTH)
    weight = tl.zeros_like(in_row).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + in_row, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row = place.to(tl.int64)
    at, there = row * WIDTH + in_row, row >= 0
    if ids_ptr is not None:
        row = tl.load(ids_ptr + place) - first
        there = (row >= 0) & (row < known)
    bits = columns
    if SHOTS == 1:
        bits = tl.load(x_ptr + row * WIDTH + columns, mask=inside & there, other=0)
    residual = tl.zeros_like(in_row).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SHOTS == 1:
        sums = _added_up(_of_all_ranks(bits, place, box, S), S, LEVELS, DTYPE)
    else:
        piece = _added_up(_pieces_of_all_ranks(x_ptr + row * WIDTH, there, place, box, S, WIDTH), S, LEVELS, DTYPE)
        pieces = _of_all_ranks(piece.to(DTYPE).to(S.bits, bitcast=True), place + S.places // 2, box, S)
        sums = pieces.to(DTYPE, bitcast=True).to(tl.float32)
    # Rounded as a product of one rank is before it is added.
    total = sums.to(total_ptr.dtype.element_ty)
    if residual_ptr is not None:
        total = (total.to(tl.float32) + residual).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, total, mask=inside)
    if weight_ptr is not None:
        wide = total.to(tl.float32)
        squares = wide * wide
        if SHOTS == 2:
            squares = tl.sum(squares, axis=0)
        normed = wide * tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps) * weight
        tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _added_up(parts, S: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr):
    """Bits [RANKS, BLOCK] -> their sum, float32 [BLOCK], as a balanced tree: neighbours, then neighbours of these."""
    BLOCK: tl.constexpr = S.block
    sums = parts.to(DTYPE, bitcast=True).to(tl.float32)
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [S.ranks >> (level + 1), 2, BLOCK]), axis=1)
    return tl.reshape(sums, [BLOCK])


@triton.jit
def _gather_kernel(
    x_ptr,  # integers of x's width
    out_ptr,  # likewise
    box,
    S: tl.constexpr,
    OWN: tl.constexpr,  # columns a rank has
    OUT: tl.constexpr,  # columns of the result
    PDL: tl.constexpr,
):
    take_turn(PDL)
    TILES: tl.constexpr = (OWN + S.size - 1) // S.size
    row, column = tl.program_id(0) // TILES, tl.program_id(0) % TILES * S.size + tl.arange(0, S.size)
    bits = tl.load(x_ptr + row.to(tl.int64) * OWN + column, mask=column < OWN, other=0)
    found = _of_all_ranks(bits, tl.program_id(0), box, S)
    ranks = tl.arange(0, S.ranks)[:, None]
    to = ranks * OWN + column[None, :]
    real = (ranks < S.world) & (column < OWN)[None, :] & (to < OUT)
    tl.store(out_ptr + row.to(tl.int64) * OUT + to, found, mask=real)


@triton.jit(do_not_specialize=["number"])
def _add_copied_kernel(x_ptr, inbox, flag, stop_ptr, number, size, BLOCK: tl.constexpr):
    flag_ptr = flag.to(tl.pointer_type(tl.int32))
    seen = tl.load(flag_ptr, volatile=True)
    looks = seen * 0
    while seen != number:
        seen = tl.load(flag_ptr, volatile=True)
        looks += 1
        if looks % _LOOKS == 0:
            seen = tl.where(tl.load(stop_ptr, volatile=True) == 0, seen, number)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    inbox_ptr = tl.multiple_of(inbox.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    # Not from a cache that an earlier sum has filled.
    other = tl.load(inbox_ptr + at, mask=inside, other=0.0, volatile=True).to(tl.float32)
    own = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, (own + other).to(x_ptr.dtype.element_ty), mask=inside)


class Mailbox(NamedTuple):
    """Of one rank: where it and its peers find what they send each other.

    An inbox is [TURNS, places, ranks, size] of numbers of one width, at first all bits one.
    """

    rank: int
    size: int  # numbers at a place, together a multiple of 16 bytes
    inboxes: Tensor  # int64 [ranks]: their addresses as this rank sees them, multiples of 16
    turns: Tensor  # int32 [places], zeros before the first call
    stop: Tensor  # int32 [1], in memory that the host can write to while a kernel waits: above 0, nobody is waited for
    shots: int = 1  # that a sum takes: with 2, half of the places are for the second one

    @property
    def box(self) -> Box:
        return Box(self.inboxes, self.turns, self.stop)

    @classmethod
    def num_bytes(cls, places: int, ranks: int, size: int, itemsize: int) -> int:
        """Of an inbox."""
        return TURNS * places * ranks * size * itemsize


def gather_places(rows: int, columns: int) -> tuple[int, int]:
    """(places that `gather_columns` takes for x [rows, columns], their size)."""
    return rows * triton.cdiv(columns, _GATHERED), _GATHERED


def two_shot_places(rows: int, width: int, ranks: int, itemsize: int) -> tuple[int, int]:
    """(places of a mailbox for sums of rows [rows, width] in two shots, their size)."""
    line = 16 // itemsize
    return 2 * rows, triton.cdiv(triton.cdiv(width, ranks), line) * line


def all_reduce(mailbox: Mailbox, x: Tensor) -> Tensor:
    """The sum of all ranks' x [T, size], contiguous, added up in float32 as a balanced tree over the ranks in their
    order and rounded once: new, of x's dtype.

    Every rank of the group makes the same calls with a mailbox in the same order: one with places of `size` numbers, T
    of them at least, or one of `two_shot_places`.
    """
    total = torch.empty_like(x)
    _launch_sum(mailbox, x, total)
    return total


def look_up(mailbox: Mailbox, token_ids: Tensor, table: Tensor, first: int, known: int) -> Tensor:
    """Rows token_ids [T] int64 of a table of which this rank has `known` rows from `first` on, [at least known, size],
    and other ranks the others -> [T, size]. Otherwise as `all_reduce`."""
    total = table.new_empty((len(token_ids), table.shape[1]))
    _launch_sum(mailbox, table, total, token_ids, first=first, known=known)
    return total


def all_reduce_add_norm(
    mailbox: Mailbox, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total), both new, where total is residual plus what `all_reduce` gives.

    x as there, residual of its shape and dtype, contiguous; weight [size], which is read early, as in `rms_norm`.
    """
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch_sum(mailbox, x, total, None, residual, weight, normed, eps)
    return normed, total


def gather_columns(mailbox: Mailbox, x: Tensor, out: Tensor) -> Tensor:
    """Every rank's x [T, columns] side by side, as far as out [T, at most ranks * columns] goes; both contiguous.
    A mailbox of `gather_places`."""
    places, size = gather_places(*x.shape)
    assert size == mailbox.size
    if places:
        _gather_kernel[(places,)](
            _as_ints(x), _as_ints(out), mailbox.box, _shape(mailbox, x, size), OWN=x.shape[1], OUT=out.shape[1],
            num_warps=8, **launch_options(x.device),
        )  # fmt: skip
    return out


def add_copied(x: Tensor, inbox: int, flag: int, number: int, stop: Tensor) -> None:
    """Adds to x, contiguous, as many numbers at the address `inbox`, a multiple of 16, once the int32 at the address
    `flag` is `number`. `stop` as in Mailbox."""
    grid = (triton.cdiv(x.numel(), _COPIED),)
    _add_copied_kernel[grid](x, inbox, flag, stop, number, x.numel(), BLOCK=_COPIED, num_warps=8)


def _launch_sum(
    mailbox: Mailbox,
    x: Tensor,
    total: Tensor,
    token_ids: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    normed: Tensor | None = None,
    eps: float = 0.0,
    first: int = 0,
    known: int = 0,
) -> None:
    rows, width = total.shape
    assert (mailbox.size == width) if mailbox.shots == 1 else (mailbox.size * len(mailbox.inboxes) >= width)
    assert rows <= len(mailbox.turns) // mailbox.shots
    if rows:
        shape = _shape(mailbox, x, triton.next_power_of_2(mailbox.size))
        _sum_kernel[(rows,)](
            _as_ints(x), token_ids, residual, weight, total, normed, mailbox.box, eps, first, known, shape,
            WIDTH=width, SHOTS=mailbox.shots, LEVELS=shape.ranks.bit_length() - 1, DTYPE=_FLOATS[x.dtype],
            num_warps=num_warps(triton.next_power_of_2(width)), **launch_options(x.device),
        )  # fmt: skip


def _as_ints(x: Tensor) -> Tensor:
    return x.view(_INTS[x.element_size()][0])


def _shape(mailbox: Mailbox, x: Tensor, block: int) -> MailShape:
    world, (_, bits, nan) = len(mailbox.inboxes), _INTS[x.element_size()]
    ranks = triton.next_power_of_2(world)
    return MailShape(len(mailbox.turns), mailbox.size, block, mailbox.rank, world, ranks, bits, nan)


def all_reduce_add_norm_reference(
    parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition. Arguments as `all_reduce_add_norm`, the parts [T, H] by rank."""
    total = torch.stack(parts).float().sum(0).to(residual.dtype)
    return add_rms_norm_reference(total, residual, weight, eps)
