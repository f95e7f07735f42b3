"""Ranks are processes that share memory, which the interpreter reads by its addresses as a GPU its peers'."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime import interpreter

if torch.cuda.is_available():
    pytest.skip("ranks of a CPU, in Triton's interpreter", allow_module_level=True)

from mini_infer.kernels.all_reduce import (
    Mailbox,
    all_reduce,
    all_reduce_add_norm,
    all_reduce_add_norm_reference,
    gather_columns,
    gather_places,
    look_up,
    two_shot_places,
)
from mini_infer.parallel.context import tree_sum

EPS, DEADLINE_S = 1e-6, 60
ROWS, SIZE = [3, 1, 4, 2, 4], 40


class Group:
    """Inboxes of `world` ranks, for numbers of a dtype."""

    def __init__(self, world: int, places: int, size: int, dtype: torch.dtype, shots: int = 1) -> None:
        self._shots = shots
        if shots == 2:
            places, size = two_shot_places(places, size, world, dtype.itemsize)
        num_bytes = Mailbox.num_bytes(places, world, size, dtype.itemsize)
        self._places, self._size = places, size
        self.inboxes = torch.full((world, num_bytes), 255, dtype=torch.uint8).share_memory_()

    def mailbox(self, rank: int) -> Mailbox:
        addresses = torch.tensor([own.data_ptr() for own in self.inboxes])
        turns, stop = torch.zeros(self._places, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        return Mailbox(rank, self._size, addresses, turns, stop, self._shots)


def drawn(seed: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# A GPU reads and writes a number at once, which kernels rely on whose numbers say by themselves that they have come.
# The interpreter's memcpy does not: of 2 bytes it takes the first one and then both, and writes both and the first one
# once more. So half a number could come, and a slot that a peer has just emptied be full again.


def _at(address: np.uint64, itemsize: int) -> Any:
    return getattr(ctypes, f"c_uint{8 * itemsize}").from_address(int(address))


def load_at_once(ptrs: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
    found = np.array(other, dtype)
    bits = found.view(f"u{found.itemsize}")
    for place in np.flatnonzero(mask):
        bits.flat[place] = _at(ptrs.flat[place], found.itemsize).value
    return found


def store_at_once(ptrs: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    for place in np.flatnonzero(mask):
        _at(ptrs.flat[place], values.itemsize).value = int(bits.flat[place])


def _on_rank(rank: int, work: Callable[..., None], *given: Any) -> None:
    interpreter._interpreter.load, interpreter._interpreter.store = load_at_once, store_at_once
    work(rank, *given)


def on_ranks(world: int, work: Callable[..., None], *given: Any) -> None:
    context = mp.get_context("fork")
    ranks = [context.Process(target=_on_rank, args=(rank, work, *given)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * world


def sums(rank: int, groups: list[Group], dtype: torch.dtype, out: Tensor) -> None:
    """What a rank does, which is late now and then: its own part, then the sum, again and again. Groups take turns."""
    torch.set_num_threads(1)
    mailboxes, weight = [group.mailbox(rank) for group in groups], torch.linspace(0.5, 2, SIZE).to(dtype)
    for call, rows in enumerate(ROWS):
        x, residual = drawn(10 * call + rank, rows, SIZE, dtype), drawn(10 * call + 9, rows, SIZE, dtype)
        time.sleep(0.01 * ((call + rank) % 3))
        found = [*all_reduce_add_norm(mailboxes[call % 2], x, residual, weight, EPS)]
        found += [all_reduce(mailbox, x) for mailbox in mailboxes]
        out[call, rank, :4, :rows] = torch.stack(found)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float32)])
def test_all_ranks_get_the_sum_of_all_parts(world: int, dtype: torch.dtype) -> None:
    groups = [Group(world, max(ROWS), SIZE, dtype, shots) for shots in (1, 2)]
    out = torch.zeros(len(ROWS), world, 4, max(ROWS), SIZE, dtype=dtype).share_memory_()
    on_ranks(world, sums, groups, dtype, out)
    weight = torch.linspace(0.5, 2, SIZE).to(dtype)
    for call, rows in enumerate(ROWS):
        parts = [drawn(10 * call + rank, rows, SIZE, dtype) for rank in range(world)]
        residual = drawn(10 * call + 9, rows, SIZE, dtype)
        expected = all_reduce_add_norm_reference(parts, residual, weight, EPS)
        for rank in range(world):
            for got, want in zip(out[call, rank, :2, :rows], expected, strict=True):
                torch.testing.assert_close(got, want, rtol=2.5 * torch.finfo(dtype).eps, atol=1e-6)
            assert torch.equal(out[call, rank], out[call, 0]), "ranks must agree to the bit"
        assert torch.equal(out[call, 0, 2], out[call, 0, -1]), "two shots add up as one does"
        if world != 3:
            whole = tree_sum(torch.stack(parts).float()).to(dtype)
            assert torch.equal(out[call, 0, 2, :rows], whole), "parts are added up as a balanced tree"


def numbers_that_are_none(rank: int, group: Group, out: Tensor) -> None:
    bits = torch.tensor([[-1, 0x7FC00000, 0, 0x7F800000]], dtype=torch.int32)  # EMPTY's, a NaN, 0, infinity
    x = bits.view(torch.float32) if rank else torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    out[rank] = all_reduce(group.mailbox(rank), x)[0]


def test_nobody_waits_for_a_number_that_looks_as_if_it_was_not_there() -> None:
    out = torch.zeros(2, 4).share_memory_()
    on_ranks(2, numbers_that_are_none, Group(2, 1, 4, torch.float32), out)
    assert torch.equal(out[0].isnan(), torch.tensor([True, True, False, False]))
    assert out[0, 2:].tolist() == [3.0, float("inf")]
    assert torch.equal(out.isnan()[0], out.isnan()[1])


def looks_up(rank: int, group: Group, tables: list[Tensor], ids: Tensor, out: Tensor) -> None:
    mailbox = group.mailbox(rank)
    known = [3, 2][rank]
    for call in range(2):
        out[rank, call] = look_up(mailbox, ids, tables[rank], 3 * rank, known)


def test_rows_of_a_table_that_ranks_share() -> None:
    whole = drawn(0, 5, SIZE, torch.float16)
    tables = [whole[:3].contiguous(), torch.cat((whole[3:], torch.full((1, SIZE), 7.0))).half()]  # the last is padding
    ids = torch.tensor([0, 4, 2, 3])
    out = torch.zeros(2, 2, 4, SIZE, dtype=torch.float16).share_memory_()
    on_ranks(2, looks_up, Group(2, 4, SIZE, torch.float16), tables, ids, out)
    assert (out == whole[ids]).all()


def gathers(rank: int, group: Group, x: Tensor, out: Tensor) -> None:
    mailbox = group.mailbox(rank)
    for call in range(4):
        gather_columns(mailbox, x[rank] + call, out[rank, call])


def test_columns_of_all_ranks_side_by_side() -> None:
    """Of more than one program a row; the last rank's last columns are padding."""
    columns = 4100
    places, size = gather_places(2, columns)
    assert places == 4
    x = drawn(0, 4, columns, torch.float32).unflatten(0, (2, 2))
    out = torch.zeros(2, 4, 2, 2 * columns - 3).share_memory_()
    on_ranks(2, gathers, Group(2, places, size, torch.float32), x, out)
    for call in range(4):
        assert torch.equal(out[0, call], torch.cat(list(x + call), dim=1)[:, :-3])
        assert torch.equal(out[1, call], out[0, call])


def test_who_is_told_to_stop_waits_for_nobody() -> None:
    group = Group(2, 1, SIZE, torch.float32)
    mailbox = group.mailbox(0)
    mailbox.stop.fill_(1)
    assert all_reduce(mailbox, torch.ones(1, SIZE)).shape == (1, SIZE)
