"""Tokens to the experts of other ranks and back, one kernel each: the direct form of parallel/expert.py.

    rank 0   token --> its row, and a note of its experts there --> rank 1's inbox --> experts of rank 1
             total <-- sum over ranks <------- rank 0's inbox <-- one row of the results of each token
             '--> every rank's inbox: all ranks get all totals

A token has a place, and each rank's inbox a slot for every place of every other rank. So nobody counts anything before
the tokens travel, the host knows nothing of where they go (a CUDA graph has it all), and no token finds its slot taken.
Only rows that have an expert there are sent; a note is sent of each place, and says "nowhere" of the others. As in
kernels/all_reduce.py a number says by itself that it has come: in an empty slot all bits are one. Who has read a slot
empties it. Rows and notes have two slots by turns: a peer writes to one again when it has this rank's note of the
dispatch in between, which this rank sends when it has ended the one before. Results and totals need no second slot,
since a dispatch comes between any two combines.

The low-latency kernels of DeepEP (Zhao et al. 2025) have fixed slots like these, counters that are raised behind the
rows, and rows that are sent once for each expert. Within a machine a row that is sent once to a rank is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.all_reduce import _FLOATS, _INTS, _LOOKS, Box, _as_ints
from mini_infer.kernels.interface import Routes
from mini_infer.kernels.moe.experts_kernels import with_residual
from mini_infer.kernels.pdl import launch_options, take_turn
from mini_infer.kernels.rms_norm import num_warps

TURNS = 2  # of rows and notes
_TURNS = tl.constexpr(TURNS)
_NOWHERE = tl.constexpr(-2)
_MOST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class DispatchShape:
    """What both kernels are compiled for, which call it S."""

    places: int
    size: int
    block: int  # size, or the next power of two
    chosen: int  # experts of a token
    k: int  # as in a note
    per_rank: int  # experts
    rank: int
    world: int
    one_by_one: bool
    notes: int  # where the sections of an inbox begin
    results: int
    totals: int
    bits: tl.dtype  # of integers
    dtype: tl.dtype  # of results
    nan: int


@triton.jit
def _memory(inboxes_ptr, rank, BYTES: tl.constexpr, BITS: tl.constexpr):
    """A rank's inbox from so many bytes on."""
    address = tl.load(inboxes_ptr + rank) + BYTES
    return tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)


@triton.jit
def _received(ptrs, mask, stop_ptr):
    """What a peer stores there, once all of it has come. The slot is empty then."""
    found = tl.load(ptrs, mask=mask, other=0, volatile=True)
    missing = tl.max((found == -1).to(tl.int32), axis=0)
    looks = missing * 0
    while missing > 0:
        found = tl.load(ptrs, mask=mask, other=0, volatile=True)
        missing = tl.max((found == -1).to(tl.int32), axis=0)
        looks += 1
        if looks % _LOOKS == 0:  # what is computed then nobody reads
            missing = tl.where(tl.load(stop_ptr, volatile=True) == 0, missing, 0)
    tl.debug_barrier()  # no thread looks any more
    tl.store(ptrs, tl.zeros_like(found) - 1, mask=mask)
    return found


@triton.jit
def _written_down(note, text, slot, ids_ptr, shares_ptr, CHOSEN: tl.constexpr, K: tl.constexpr):
    """Stores a note as a slot's experts and their weights. Returns whether there are any."""
    choice, said = note % K, note % K < CHOSEN
    here = said & (note < K)
    tl.store(ids_ptr + slot * CHOSEN + choice, tl.where(text < 0, -1, text), mask=here)
    tl.store(shares_ptr + slot * CHOSEN + choice, text, mask=said & (note >= K))
    return tl.max(tl.where(here, text, -1), axis=0) >= 0


@triton.jit(do_not_specialize=["count"])
def _dispatch_kernel(
    x_ptr,  # integers of x's width
    ids_ptr,
    shares_ptr,  # int32
    out_ptr,  # integers of x's width
    out_ids_ptr,
    out_shares_ptr,  # int32
    box,
    count,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a place: of one of this rank's tokens, and of one of every other rank's."""
    take_turn(PDL)
    BLOCK: tl.constexpr = S.block
    CHOSEN: tl.constexpr = S.chosen
    K: tl.constexpr = S.k
    WORLD: tl.constexpr = S.world
    place, places = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < S.size
    note = tl.arange(0, 2 * K)  # experts, then weights
    choice = note % K
    said = choice < CHOSEN
    turn = tl.load(box.turns + place)
    real = S.rank * places + place < count
    ids = tl.load(ids_ptr + place * CHOSEN + choice, mask=said & real, other=-1)
    shares = tl.load(shares_ptr + place * CHOSEN + choice, mask=said & real, other=0)
    shares = tl.where(shares == -1, _MOST, shares)
    row = tl.load(x_ptr + place * S.size + columns, mask=inside & real, other=0)
    row = tl.where(row == -1, S.nan, row).to(S.bits)
    for step in tl.static_range(1, WORLD):
        target = (S.rank + step) % WORLD
        there = (ids >= target * S.per_rank) & (ids < (target + 1) * S.per_rank)
        text = tl.where(note < K, tl.where(there, ids - target * S.per_rank, _NOWHERE), shares)
        slot = (turn * WORLD + S.rank) * S.places + place
        tl.store(_memory(box.inboxes, target, S.notes, tl.int32) + slot * (2 * K) + note, text, mask=said)
        if tl.max(there.to(tl.int32), axis=0) > 0:
            tl.store(_memory(box.inboxes, target, 0, S.bits) + slot * S.size + columns, row, mask=inside)
    there = (ids >= S.rank * S.per_rank) & (ids < (S.rank + 1) * S.per_rank)
    text = tl.where(note < K, tl.where(there, ids - S.rank * S.per_rank, _NOWHERE), shares)
    if _written_down(note, text, S.rank * places + place, out_ids_ptr, out_shares_ptr, CHOSEN, K):
        tl.store(out_ptr + (S.rank * places + place) * S.size + columns, row, mask=inside)
    for step in tl.static_range(1, WORLD):
        source = (S.rank + WORLD - step) % WORLD
        slot = (turn * WORLD + source) * S.places + place
        notes = _memory(box.inboxes, S.rank, S.notes, tl.int32) + slot * (2 * K)
        text = _received(notes + note, said, box.stop)
        target = source * places + place
        if _written_down(note, text, target, out_ids_ptr, out_shares_ptr, CHOSEN, K):
            found = _received(_memory(box.inboxes, S.rank, 0, S.bits) + slot * S.size + columns, inside, box.stop)
            tl.store(out_ptr + target * S.size + columns, found, mask=inside)
    tl.debug_barrier()  # all threads have read which turn it is
    tl.store(box.turns + place, (turn + 1) % _TURNS)


@triton.jit(do_not_specialize=["count"])
def _combine_kernel(
    y_ptr,  # integers of the results' width
    slot_ids_ptr,
    ids_ptr,
    shares_ptr,
    residual_ptr,  # None: nothing is added
    out_ptr,  # integers of the results' width
    box,
    count,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a place: it sends back what was computed for the tokens there, adds up what comes for its own, and
    tells it to all."""
    take_turn(PDL)
    BLOCK: tl.constexpr = S.block
    CHOSEN: tl.constexpr = S.chosen
    WORLD: tl.constexpr = S.world
    ROWS: tl.constexpr = CHOSEN if S.one_by_one else 1  # of a slot
    LANES: tl.constexpr = CHOSEN if S.one_by_one else WORLD  # of a place
    place, places = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns, choice = tl.arange(0, BLOCK), tl.arange(0, S.k)
    inside = columns < S.size
    for step in tl.static_range(1, WORLD):
        source = (S.rank + step) % WORLD
        slot = source * places + place
        inbox = _memory(box.inboxes, source, S.results, S.bits)
        own = tl.load(slot_ids_ptr + slot * CHOSEN + choice, mask=choice < CHOSEN, other=-1)
        for row in range(ROWS):
            picked = (choice == row) if S.one_by_one else (choice < CHOSEN)
            if tl.max(tl.where(picked, own, -1), axis=0) >= 0:
                sent = tl.load(y_ptr + (slot * ROWS + row) * S.size + columns, mask=inside, other=0)
                sent = tl.where(sent == -1, S.nan, sent).to(S.bits)
                lane = row if S.one_by_one else S.rank
                tl.store(inbox + (place * LANES + lane) * S.size + columns, sent, mask=inside)
    home = S.rank * places + place
    if home < count:
        inbox = _memory(box.inboxes, S.rank, S.results, S.bits)
        ids = tl.load(ids_ptr + place * CHOSEN + choice, mask=choice < CHOSEN, other=-1)
        total = tl.zeros([BLOCK], tl.float32)
        for lane in range(LANES):
            # A lane is one of the token's experts, or a rank.
            picked = (choice == lane) if S.one_by_one else (ids // S.per_rank == lane) & (ids >= 0)
            expert = tl.max(tl.where(picked, ids, -1), axis=0)
            if expert >= 0:
                if expert // S.per_rank == S.rank:
                    at = home * ROWS + (lane if S.one_by_one else 0)
                    part = tl.load(y_ptr + at * S.size + columns, mask=inside, other=0)
                else:
                    part = _received(inbox + (place * LANES + lane) * S.size + columns, inside, box.stop)
                y = part.to(S.dtype, bitcast=True).to(tl.float32)
                if S.one_by_one:
                    total += y * tl.load(shares_ptr + place * CHOSEN + lane)
                else:
                    total += y
        bits = with_residual(total, residual_ptr, place, columns, inside, S.size, S.dtype).to(S.bits, bitcast=True)
        tl.store(out_ptr + home * S.size + columns, bits, mask=inside)
        bits = tl.where(bits == -1, S.nan, bits).to(S.bits)
        for step in tl.static_range(1, WORLD):
            inbox = _memory(box.inboxes, (S.rank + step) % WORLD, S.totals, S.bits)
            tl.store(inbox + (S.rank * S.places + place) * S.size + columns, bits, mask=inside)
    inbox = _memory(box.inboxes, S.rank, S.totals, S.bits)
    for step in tl.static_range(1, WORLD):
        source = (S.rank + WORLD - step) % WORLD
        if source * places + place < count:
            found = _received(inbox + (source * S.places + place) * S.size + columns, inside, box.stop)
            tl.store(out_ptr + (source * places + place) * S.size + columns, found, mask=inside)


@triton.jit
def _stamp_kernel(clock_ptr, spans_ptr, STAGE: tl.constexpr):
    now = tl.extra.cuda.globaltimer()
    if STAGE >= 0:
        tl.store(spans_ptr + STAGE, tl.load(spans_ptr + STAGE) + now - tl.load(clock_ptr))
    tl.store(clock_ptr, now)


def stamp(clock: Tensor, spans: Tensor, stage: int) -> None:
    """On a GPU, once all that was launched before has ended: adds the nanoseconds since the last stamp to spans
    [stages] int64, but for the first stamp, of stage -1. In a CUDA graph as outside."""
    _stamp_kernel[(1,)](clock, spans, STAGE=stage, num_warps=1)


class Inboxes(NamedTuple):
    """Of one rank, for layers of one shape: where it and its peers find what they send each other.

    An inbox is a piece of memory, at first all bits one:

        rows     [TURNS, ranks, places, hidden]   of each rank, the tokens that go here
        notes    [TURNS, ranks, places, 2 K]      int32: a token's experts here and their weights, K >= chosen each
        results  [places, lanes, hidden]          of this rank's tokens, from each rank; or of each of their experts
        totals   [ranks, places, hidden]          of each rank's tokens
    """

    rank: int
    memory: object  # kept as long as this is
    addresses: Tensor  # int64 [ranks]: of the inboxes as this rank sees them, multiples of 16
    turns: Tensor  # int32 [places], zeros before the first call
    stop: Tensor  # int32 [1], in memory that the host can write to while a kernel waits: above 0, nobody is waited for
    hidden: int
    chosen: int  # experts of a token, at most
    one_by_one: bool  # results come back one by one, and are weighted and added up at home in the order of the choices

    @property
    def box(self) -> Box:
        return Box(self.addresses, self.turns, self.stop)

    @staticmethod
    def sections(places: int, ranks: int, hidden: int, chosen: int, one_by_one: bool, itemsize: int) -> list[int]:
        """Bytes of an inbox before notes, before results, before totals, and in all."""
        row = hidden * itemsize
        sizes = (
            TURNS * ranks * places * row,
            TURNS * ranks * places * 2 * triton.next_power_of_2(chosen) * 4,
            places * (chosen if one_by_one else ranks) * row,
            ranks * places * row,
        )
        return list(accumulate(size + -size % 16 for size in sizes))


def dispatch(inboxes: Inboxes, x: Tensor, routes: Routes, per_rank: int, count: int) -> tuple[Tensor, Routes]:
    """Sends tokens to the ranks where their experts are, and gets what comes: (rows [slots, H], their routes).

    Slot s * places + t is of token t of rank s, places being ranks' share of `count`, rounded up. Its choices are
    numbers of this rank's own experts, or -1 where they are elsewhere; a row without any is not written. All ranks make
    the same calls in the same order, and a `combine` behind each.

    Args:
        x: [T, H], this rank's tokens, as ParallelContext.rows_of gives them.
        routes: of x.
        per_rank: experts that a rank has.
        count: of all ranks' tokens, of which a rank has at most len(inboxes.turns).
    """
    world = len(inboxes.addresses)
    places = triton.cdiv(count, world)
    rows = x.new_empty((world * places, inboxes.hidden))
    ids = routes.ids.new_empty((world * places, routes.ids.shape[1]))
    shares = routes.weights.new_empty(ids.shape)
    assert places <= len(inboxes.turns)
    if places:
        shape = _shape(inboxes, x, routes, per_rank)
        _dispatch_kernel[(places,)](
            _as_ints(x), routes.ids, routes.weights.view(torch.int32), _as_ints(rows), ids, shares.view(torch.int32),
            inboxes.box, count, shape, num_warps=num_warps(shape.block), **launch_options(x.device),
        )  # fmt: skip
    return rows, Routes(ids, shares)


def combine(
    inboxes: Inboxes,
    results: Tensor,
    slot_ids: Tensor,
    routes: Routes,
    per_rank: int,
    count: int,
    residual: Tensor | None = None,
) -> Tensor:
    """Sends results back, adds up those of this rank's tokens in float32, rank by rank, and gets those of all ranks:
    [count, H], the same on each.

    Args:
        results: [slots, H] of the sums of each slot's experts, as dispatched; of inboxes `one_by_one` [slots * k, H] of
            its experts, which are multiplied by their weights here.
        slot_ids: [slots, k], as dispatched.
        routes: of this rank's tokens.
        residual: [T, H] of this rank's tokens, added behind the sum.
    """
    out = results.new_empty((count, inboxes.hidden))
    if count:
        shape = _shape(inboxes, results, routes, per_rank)
        _combine_kernel[(len(slot_ids) // len(inboxes.addresses),)](
            _as_ints(results), slot_ids, *routes, residual, _as_ints(out), inboxes.box, count, shape,
            num_warps=num_warps(shape.block), **launch_options(results.device),
        )  # fmt: skip
    return out


def _shape(inboxes: Inboxes, x: Tensor, routes: Routes, per_rank: int) -> DispatchShape:
    """For tokens, or results, of x's dtype."""
    places, world, itemsize = len(inboxes.turns), len(inboxes.addresses), x.element_size()
    _, bits, nan = _INTS[itemsize]
    sections = Inboxes.sections(places, world, inboxes.hidden, inboxes.chosen, inboxes.one_by_one, itemsize)
    return DispatchShape(
        places=places,
        size=inboxes.hidden,
        block=triton.next_power_of_2(inboxes.hidden),
        chosen=routes.ids.shape[1],
        k=triton.next_power_of_2(inboxes.chosen),
        per_rank=per_rank,
        rank=inboxes.rank,
        world=world,
        one_by_one=inboxes.one_by_one,
        notes=sections[0],
        results=sections[1],
        totals=sections[2],
        bits=bits,
        dtype=_FLOATS[x.dtype],
        nan=nan,
    )
