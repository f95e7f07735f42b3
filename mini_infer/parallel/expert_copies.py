"""Hot experts placed twice: where ranks share experts, a step waits for the rank whose experts get most tokens.

    slots of a rank    own experts, in their order | room for copies of others'

Each rank counts the tokens that it sends to each expert. Every so many steps the ranks add these counts up, all choose
the same copies, and who has an expert sends its weights to where its copy is to be. From then on tokens go to the slot
on their own rank where there is one, and else to the expert and to its copy by turns. Weights of a copy are equal, and
so is what is made of a token: where sums have one order, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer.kernels.interface import Routes
from mini_infer.parallel.context import ParallelContext

FIRST, PLACE_EVERY = 16, 256  # steps; at first sooner, each time after as many again


def choose_copies(load: Sequence[int], ranks: int, room: int) -> list[list[int]]:
    """Experts of which each rank gets a copy, at most `room` of them, by the tokens of all experts: the busiest first,
    each to the rank with least to do, as long as the busier of the two has less to do then."""
    per_rank = len(load) // ranks
    work = [float(sum(load[rank * per_rank :][:per_rank])) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda expert: -load[expert]):
        home, half = expert // per_rank, load[expert] / 2
        free = [rank for rank in range(ranks) if rank != home and len(found[rank]) < room]
        target = min(free, key=work.__getitem__, default=home)
        if half and target != home and work[target] + half < work[home]:
            found[target].append(expert)
            work[home] -= half
            work[target] += half
    return found


class ExpertCopies:
    """Of a layer.

    Args:
        ranks: which share the experts.
        redundant: copies that there is room for, on all ranks together.
        weights: [slots of this rank, ...], all that is kept of the experts.

    Attributes:
        load: [E] int64, the tokens of this rank that went to each expert.
        held: the experts that have a copy on each rank, by the place of their slot; None where there is none.
    """

    def __init__(
        self, ranks: ParallelContext, num_experts: int, redundant: int, weights: Sequence[Tensor], device: torch.device
    ) -> None:
        self._ranks, self._weights = ranks, weights
        self._own, self._room = num_experts // ranks.size, redundant // ranks.size
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.held: list[list[int | None]] = [[None] * self._room for _ in range(ranks.size)]
        self._slots = torch.tensor(self._slots_by_turns(), dtype=torch.int32, device=device)

    def routed(self, routes: Routes) -> Routes:
        """The routes of this rank's tokens, to slots instead of experts."""
        ids = routes.ids.long()
        self.load.index_add_(0, ids.flatten(), torch.ones_like(ids).flatten())
        turns = torch.arange(len(ids), device=ids.device)[:, None] % 2
        return Routes(self._slots[turns, ids], routes.weights)

    def place(self, load: Sequence[int]) -> None:
        """By the tokens that each expert got on all ranks, which call it at once."""
        moves = []  # (expert, rank, place among its copies)
        for rank, chosen in enumerate(choose_copies(load, self._ranks.size, self._room)):
            held = [expert if expert in chosen else None for expert in self.held[rank]]
            for expert in (expert for expert in chosen if expert not in held):
                place = held.index(None)
                held[place] = expert
                moves.append((expert, rank, place))
            self.held[rank] = held
        if moves:
            for weight in self._weights:
                self._send(weight.data, moves)
        self._slots.copy_(torch.tensor(self._slots_by_turns(), dtype=torch.int32))

    def _send(self, weight: Tensor, moves: list[tuple[int, int, int]]) -> None:
        """Brings experts of `weight` [slots, ...] to where their copies are to be."""
        size, own = self._ranks.size, self._ranks.rank
        weight = weight.view(torch.uint8) if weight.itemsize == 1 else weight  # float8 has no indexing on a CPU
        going = [(expert % self._own, rank) for expert, rank, _ in moves if expert // self._own == own]
        coming = [(expert // self._own, place) for expert, rank, place in moves if rank == own]
        coming.sort(key=lambda move: move[0])  # as they arrive; `going` is by rank already
        rows = weight[[slot for slot, _ in going]].flatten(1).contiguous()
        counts = ([[rank for _, rank in going].count(r) for r in range(size)],
                  [[rank for rank, _ in coming].count(r) for r in range(size)])  # fmt: skip
        arrived = self._ranks.all_to_all(rows.view(torch.uint8), *counts).view(weight.dtype)
        weight[[self._own + place for _, place in coming]] = arrived.view(len(coming), *weight.shape[1:])

    def _slots_by_turns(self) -> list[list[int]]:
        """[2, E]: the slot of each expert for this rank's tokens, by turns."""
        per_rank, turns = self._own + self._room, []
        for expert in range(len(self.load)):
            slots = {expert // self._own: expert // self._own * per_rank + expert % self._own}
            for rank, held in enumerate(self.held):
                if expert in held:
                    slots[rank] = rank * per_rank + self._own + held.index(expert)
            here = slots.get(self._ranks.rank)
            turns.append((min(slots.values()), max(slots.values())) if here is None else (here, here))
        return [list(turn) for turn in zip(*turns, strict=True)]


class HotExperts:
    """Of all layers, whose copies are placed between steps. All ranks make the same steps."""

    def __init__(self, ranks: ParallelContext, layers: Sequence[ExpertCopies]) -> None:
        self._ranks, self._layers = ranks, layers
        self._steps, self._next = 0, min(FIRST, PLACE_EVERY)

    def before_step(self) -> None:
        self._steps += 1
        if self._steps < self._next:
            return
        self._next += min(self._steps, PLACE_EVERY)
        loads = self._ranks.all_reduce(torch.stack([layer.load for layer in self._layers])).tolist()
        for layer, load in zip(self._layers, loads, strict=True):
            layer.place(load)
            layer.load //= 2  # what was before counts less
