"""Ranks are processes that share memory, as in test_all_reduce.py."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("ranks of a CPU, in Triton's interpreter", allow_module_level=True)

from test_all_reduce import drawn, on_ranks

from mini_infer.kernels.interface import ExpertWeights, Routes
from mini_infer.kernels.moe.dispatch import Inboxes, combine, dispatch
from mini_infer.kernels.moe.reference import experts_reference

HIDDEN, INNER, EXPERTS, CHOSEN = 24, 8, 6, 3
COUNTS = [5, 1, 4, 6, 2]  # tokens of each call: places are used now and then, the last rank has fewer tokens or none
PLACES = 3


class Group:
    """Inboxes of `world` ranks."""

    def __init__(self, world: int, dtype: torch.dtype, one_by_one: bool) -> None:
        *_, num_bytes = Inboxes.sections(PLACES, world, HIDDEN, CHOSEN, one_by_one, dtype.itemsize)
        self._one_by_one = one_by_one
        self._memory = torch.full((world, num_bytes), 255, dtype=torch.uint8).share_memory_()

    def inboxes(self, rank: int) -> Inboxes:
        addresses = torch.tensor([own.data_ptr() for own in self._memory])
        turns, stop = torch.zeros(PLACES, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        return Inboxes(rank, self._memory, addresses, turns, stop, HIDDEN, CHOSEN, self._one_by_one)


def step(call: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Routes, Tensor]:
    """(x, routes, residual) of all ranks' tokens. One token has all its choices on one rank, and one the same expert
    more than once."""
    generator = torch.Generator().manual_seed(call)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(count)]).int()
    ids[0] = torch.tensor([1, 0, 1])
    shares = torch.rand(count, CHOSEN, generator=generator)
    return drawn(10 + call, count, HIDDEN, dtype), Routes(ids, shares), drawn(20 + call, count, HIDDEN, dtype)


def weights(dtype: torch.dtype) -> ExpertWeights:
    gate_up = drawn(1, EXPERTS * 2 * INNER, HIDDEN, dtype).view(EXPERTS, 2 * INNER, HIDDEN)
    return ExpertWeights(gate_up, drawn(2, EXPERTS * HIDDEN, INNER, dtype).view(EXPERTS, HIDDEN, INNER))


def layers(rank: int, world: int, group: Group, dtype: torch.dtype, out: Tensor) -> None:
    """What a rank does, which is late now and then: its own tokens, and all that come, again and again."""
    torch.set_num_threads(1)
    inboxes, per_rank = group.inboxes(rank), EXPERTS // world
    own = ExpertWeights(*(part[rank * per_rank : (rank + 1) * per_rank] for part in weights(dtype)[:2]))
    for call, count in enumerate(COUNTS):
        places = -(-count // world)
        x, routes, residual = step(call, count, dtype)
        tokens = slice(rank * places, (rank + 1) * places)
        routes = Routes(*(part[tokens].contiguous() for part in routes))
        time.sleep(0.01 * ((call + rank) % 3))
        rows, arrived = dispatch(inboxes, x[tokens].contiguous(), routes, per_rank, count)
        assert rows.shape == (world * places, HIDDEN)
        if group._one_by_one:
            single = Routes(arrived.ids.reshape(-1, 1), torch.ones(arrived.ids.numel(), 1))
            y = experts_reference(rows.repeat_interleave(CHOSEN, 0), single, own)
        else:
            y = experts_reference(rows, arrived, own)
        out[call, rank, :count] = combine(
            inboxes, y, arrived.ids, routes, per_rank, count, residual[tokens].contiguous() if call % 2 else None
        )


@pytest.mark.parametrize(
    ("world", "dtype", "one_by_one"),
    [(2, torch.float16, False), (3, torch.float32, False), (2, torch.float32, True)],
)
def test_all_ranks_get_what_one_would_compute(world: int, dtype: torch.dtype, one_by_one: bool) -> None:
    out = torch.zeros(len(COUNTS), world, max(COUNTS), HIDDEN, dtype=dtype).share_memory_()
    on_ranks(world, layers, world, Group(world, dtype, one_by_one), dtype, out)
    for call, count in enumerate(COUNTS):
        x, routes, residual = step(call, count, dtype)
        exact = ExpertWeights(*(part.float() for part in weights(dtype)[:2]))
        expected = experts_reference(x.float(), routes, exact, residual.float() if call % 2 else None)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        for rank in range(world):
            found = out[call, rank, :count]
            torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * expected.abs().max())
            assert torch.equal(found, out[call, 0, :count]), "ranks must agree to the bit"


def sends_what_looks_empty(rank: int, group: Group, out: Tensor) -> None:
    bits = torch.full((1, HIDDEN), -1, dtype=torch.int32)
    bits[0, 1] = 0
    x = bits.view(torch.float32)
    routes = Routes(torch.tensor([[4 - 3 * rank] * CHOSEN], dtype=torch.int32), torch.ones(1, CHOSEN))  # the other's
    rows, arrived = dispatch(group.inboxes(rank), x, routes, 3, 2)
    out[rank] = combine(group.inboxes(rank), rows, arrived.ids, routes, 3, 2)


def test_nobody_waits_for_a_number_that_looks_as_if_it_was_not_there() -> None:
    out = torch.zeros(2, 2, HIDDEN).share_memory_()
    on_ranks(2, sends_what_looks_empty, Group(2, torch.float32, False), out)
    assert (out.isnan() == (torch.arange(HIDDEN) != 1)).all()
    assert (out[..., 1] == 0).all()


def test_who_is_told_to_stop_waits_for_nobody() -> None:
    inboxes = Group(2, torch.float32, False).inboxes(0)
    inboxes.stop.fill_(1)
    x, routes = torch.ones(1, HIDDEN), Routes(torch.full((1, CHOSEN), 5, dtype=torch.int32), torch.ones(1, CHOSEN))
    rows, arrived = dispatch(inboxes, x, routes, 3, 2)
    assert combine(inboxes, rows, arrived.ids, routes, 3, 2).shape == (2, HIDDEN)
