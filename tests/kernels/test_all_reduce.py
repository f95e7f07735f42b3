"""Ranks are processes that share memory, which the interpreter reads by its addresses as a GPU its peers'."""

from __future__ import annotations

import multiprocessing as mp
import time

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.all_reduce import Shared, all_reduce_add_norm, all_reduce_add_norm_reference

CALLS, EPS, DEADLINE_S = 5, 1e-6, 60
DTYPES = [torch.float32, torch.float16]


class Group:
    """The memory of `world` ranks for sums of at most `rows` rows of `size`; two of everything, by turns."""

    def __init__(self, world: int, rows: int, size: int, dtype: torch.dtype, two_shots: bool) -> None:
        self.two_shots = two_shots
        self.parts, self.norms, self.totals = (
            torch.zeros(2, world, rows, size, dtype=dtype).share_memory_() for _ in range(3)
        )
        self.flags = torch.zeros(world, rows, world, dtype=torch.int32).share_memory_()

    def shared(self, rank: int, turn: int) -> Shared:
        outs = tables = None
        if self.two_shots:
            outs = self.norms[turn, rank], self.totals[turn, rank]
            tables = addresses(self.norms[turn]), addresses(self.totals[turn])
        return Shared(rank, addresses(self.parts[turn]), addresses(self.flags), outs, tables)


def addresses(of_ranks: Tensor) -> Tensor:
    return torch.tensor([own.data_ptr() for own in of_ranks])


def part(call: int, rank: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(10 * call + rank)).to(dtype)


def sums(rank: int, group: Group, rows: list[int], size: int, dtype: torch.dtype, out: Tensor) -> None:
    """What a rank does, which is late now and then: its own part, then the sum, again and again."""
    torch.set_num_threads(1)
    weight = torch.linspace(0.5, 2, size).to(dtype)
    for call in range(CALLS):
        residual = part(call, 9, rows[call], size, dtype)
        group.parts[call % 2, rank, : rows[call]] = part(call, rank, rows[call], size, dtype)
        time.sleep(0.02 * ((call + rank) % 3))
        normed, total = all_reduce_add_norm(group.shared(rank, call % 2), residual, weight, EPS)
        out[call, rank, 0, : rows[call]], out[call, rank, 1, : rows[call]] = normed, total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("world", "two_shots"), [(2, False), (2, True), (3, True), (3, False)])
def test_all_ranks_get_the_sum_of_all_parts(world: int, two_shots: bool, dtype: torch.dtype) -> None:
    rows, size = [3, 1, 4, 4, 2], 40
    group = Group(world, max(rows), size, dtype, two_shots)
    out = torch.zeros(CALLS, world, 2, max(rows), size, dtype=dtype).share_memory_()
    context = mp.get_context("fork")
    ranks = [context.Process(target=sums, args=(rank, group, rows, size, dtype, out)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * world
    weight = torch.linspace(0.5, 2, size).to(dtype)
    for call in range(CALLS):
        parts = [part(call, rank, rows[call], size, dtype) for rank in range(world)]
        expected = all_reduce_add_norm_reference(parts, part(call, 9, rows[call], size, dtype), weight, EPS)
        for rank in range(world):
            for got, want in zip(out[call, rank, :, : rows[call]], expected, strict=True):
                torch.testing.assert_close(got, want, rtol=2.5 * torch.finfo(dtype).eps, atol=1e-6)
            assert torch.equal(out[call, rank], out[call, 0]), "ranks must agree to the bit"
    assert not group.flags.any(), "flags are as they were, so that a captured graph can be replayed"
