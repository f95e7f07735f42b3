"""Expert parallelism (GShard: Lepikhin et al. 2020, arXiv:2006.16668): a rank has some of a layer's experts, and tokens
travel to where theirs are.

    its tokens --> dispatch: to the ranks of their experts --> experts --> combine: back, and added up --> its tokens

    padded     for every expert a buffer as large as the busiest one needs: an all-to-all of equal parts, and padding
               is sent and computed like tokens
    packed     counts first, then just the tokens that go, each once to a rank however many experts it has there; a
               product for each expert
    grouped    packed, and one grouped product over all that arrived
    direct     kernels write the tokens that go into slots in the other rank's memory (kernels/moe/dispatch.py); one
               grouped product over all slots, of which those that nobody wrote to have no expert

A token's results are added up where they were computed, and one row comes back from each rank. Where sums have one
order (numerics=batch_invariant) the results come back one by one, and are added up as one process does it. There is
always room, so no token is dropped: slots are as many as a step can have tokens, buffers as large as the counts say.
These the host reads, so that no CUDA graph has them in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_infer.core.config import Dispatch
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.interface import ExpertWeights, Kernels, Routes
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.expert_meter import Meter
from mini_infer.parallel.peer_memory import NoPeerAccess, PeerMemory


class Parts(NamedTuple):
    """Rows that a rank sends to each, and gets from each."""

    sent: list[int]
    arrives: list[int]


def settled(form: Dispatch, ranks: ParallelContext, device: torch.device, kernels: Kernels) -> Dispatch:
    """What `auto` stands for: the same on every rank, which all call it at once."""
    if form is not Dispatch.auto:
        return form
    if device.type != "cuda" or kernels.dispatch is None:
        return Dispatch.grouped
    first = (device.index or 0) - ranks.rank  # a rank's GPU has its number
    others = [first + rank for rank in range(ranks.size) if rank != ranks.rank]
    reached = max(others) < torch.cuda.device_count() and all(
        torch.cuda.can_device_access_peer(device, gpu) for gpu in others
    )
    return Dispatch.direct if ranks.on_all_ranks(reached) else Dispatch.grouped


class ExpertRanks(NamedTuple):
    """Who shares the experts of each layer, and how tokens get to those of others."""

    context: ParallelContext = ONE_RANK
    dispatch: Dispatch = Dispatch.grouped
    redundant: int = 0  # copies that a layer has room for (expert_copies.py)
    inboxes: Any = None  # of kernels/moe/dispatch.py, where they are open

    @property
    def host_counts(self) -> bool:
        """Whether the host reads how many tokens go where."""
        return self.context.size > 1 and self.dispatch is not Dispatch.direct

    def opened(
        self, kernels: Kernels, device: torch.device, dtype: torch.dtype, hidden: int, chosen: int, most_tokens: int
    ) -> ExpertRanks:
        """With memory in which ranks find what others send, in the direct form. Every rank calls it at once.

        Args:
            dtype, hidden: of a token's row.
            chosen: experts of a token, at most.
            most_tokens: of a step, those of all ranks.

        Raises:
            ConfigError: the ranks cannot reach each other's memory.
        """
        rank, size, collectives = self.context.rank, self.context.size, self.context.collectives
        if collectives is None or self.host_counts:
            return self
        assert kernels.dispatch is not None, "refused before"
        inboxes, places = kernels.dispatch.Inboxes, -(-most_tokens // size)
        *_, num_bytes = inboxes.sections(places, size, hidden, chosen, kernels.invariant, dtype.itemsize)
        try:
            memory = PeerMemory(num_bytes, rank, device, collectives.exchange)
        except NoPeerAccess as why:
            raise ConfigError(f"parallel.dispatch=direct or auto: {why}. Set parallel.dispatch=grouped") from why
        stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        collectives.stops.append(stop)
        addresses = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        turns = torch.zeros(places, dtype=torch.int32, device=device)
        about = hidden, chosen, kernels.invariant
        return self._replace(inboxes=inboxes(rank, memory, addresses, turns, stop, *about))


ALL_EXPERTS = ExpertRanks()  # of a model that is on one rank


class ExpertExchange:
    """Of a layer of num_experts experts, copies included, which the ranks have in equal stretches."""

    _meter: Meter | None

    def __init__(self, ranks: ExpertRanks, num_experts: int, kernels: Kernels) -> None:
        self._ranks, self._form, self._inboxes = ranks.context, ranks.dispatch, ranks.inboxes
        self._num_experts, self._per_rank, self._kernels = num_experts, num_experts // self._ranks.size, kernels

    def experts(
        self,
        x: Tensor,
        routes: Routes,
        weights: ExpertWeights,
        residual: Tensor | None,
        count: int,
        meter: Meter | None = None,
    ) -> Tensor:
        """As Kernels.experts, of `count` tokens that ranks have by parts -> [count, H] on all of them.

        Args:
            x, routes, residual: of this rank's tokens, as ParallelContext.rows_of gives them, who may go to any rank's
                experts.
            weights: of this rank's.
        """
        self._meter = meter
        if meter is not None:
            meter.start()
        if self._form is Dispatch.direct:
            y = self._direct(x, routes, weights, residual, count)
        else:
            y = (self._padded if self._form is Dispatch.padded else self._packed)(x, routes, weights)
            y = self._ranks.gather_rows(y if residual is None else residual + y, count)
        self._ends("combine")
        return y

    def _direct(self, x: Tensor, routes: Routes, weights: ExpertWeights, residual: Tensor | None, count: int) -> Tensor:
        kernel, inboxes = self._kernels.dispatch, self._inboxes
        assert kernel is not None
        assert inboxes is not None, "they are opened before a model is loaded"
        rows, arrived = kernel.dispatch(inboxes, x, routes, self._per_rank, count)
        self._ends("dispatch")
        if inboxes.one_by_one:
            chosen = routes.ids.shape[1]
            single = rows.repeat_interleave(chosen, 0), _only(arrived.ids.flatten())
            y = self._kernels.experts(*single, weights, elsewhere=True)
        else:
            y = self._kernels.experts(rows, arrived, weights, elsewhere=True)
        self._ends("experts")
        if self._meter is not None:
            self._count_slots(x, routes, count)
            self._meter.start()  # counting is no stage
        return kernel.combine(inboxes, y, arrived.ids, routes, self._per_rank, count, residual)

    def _padded(self, x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        size, (tokens, chosen) = self._ranks.size, routes.ids.shape
        ids = routes.ids.flatten().long()
        counts = ids.new_zeros(self._num_experts).index_add_(0, ids, torch.ones_like(ids))
        room = int(self._ranks.all_gather(counts).max())
        order = ids.argsort(stable=True)
        before = torch.empty_like(ids)  # how many pairs of the same expert come before each
        before[order] = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[ids[order]]
        places = ids * room + before
        buffers = x.new_zeros(self._num_experts * room, x.shape[1])
        buffers[places] = x.repeat_interleave(chosen, 0)
        parts = Parts(*([self._per_rank * room] * size for _ in range(2)))
        if self._meter is not None:
            self._count_ideal(x, self._goes(routes).any(-1).sum(1).tolist())
        arrived = self._send(buffers, parts)
        self._ends("dispatch")
        own = torch.arange(self._per_rank, device=ids.device).repeat_interleave(room).repeat(size)
        results = self._products(arrived, own, weights)
        results = self._send_back(results, parts)[places]
        return self._kernels.add_experts(results.unflatten(0, (tokens, chosen)), routes.weights)

    def _packed(self, x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        size, rank, (tokens, chosen) = self._ranks.size, self._ranks.rank, routes.ids.shape
        goes = self._goes(routes)
        target, token = goes.any(-1).nonzero(as_tuple=True)  # a row each, by rank
        there = goes[target, token]  # [rows, k]
        counts = torch.stack((goes.any(-1).sum(1), goes.sum((1, 2))))  # rows to each rank, and pairs
        every = self._ranks.all_gather(counts).tolist()
        rows, pairs = (Parts(every[rank][kind], [of[kind][rank] for of in every]) for kind in range(2))
        if self._meter is not None:
            self._count_ideal(x, rows.sent)
        ids = torch.where(there, routes.ids[token] - target[:, None] * self._per_rank, -1).int()
        about = self._send(torch.cat((ids, routes.weights[token].view(torch.int32)), 1), rows)
        ids, shares = about[:, :chosen], about[:, chosen:].contiguous().view(torch.float32)
        arrived = self._send(x[token], rows)
        self._ends("dispatch")
        row, choice = (ids >= 0).nonzero(as_tuple=True)
        found = self._products(arrived[row], ids[row, choice], weights)
        if self._kernels.invariant:
            results = x.new_empty(tokens, chosen, x.shape[1])
            row, choice = there.nonzero(as_tuple=True)  # in the order in which the other ranks have them
            results[token[row], choice] = self._send_back(found, pairs)
            return self._kernels.add_experts(results, routes.weights)
        results = x.new_zeros(len(arrived), chosen, x.shape[1])
        results[row, choice] = found
        sums = x.new_zeros(size, tokens, x.shape[1])
        sums[target, token] = self._send_back(self._kernels.add_experts(results, shares), rows)
        return sums.sum(0)

    def _goes(self, routes: Routes) -> Tensor:
        """[size, T, k]: whether a token's choice is an expert of that rank."""
        ranks = torch.arange(self._ranks.size, device=routes.ids.device)
        return routes.ids // self._per_rank == ranks[:, None, None]

    def _products(self, x: Tensor, ids: Tensor, weights: ExpertWeights) -> Tensor:
        """x [N, H], each row of one of this rank's experts, ids [N] -> [N, H]."""
        if self._form is not Dispatch.packed:
            y = self._kernels.experts(x, _only(ids), weights)
        else:
            y = torch.empty_like(x)
            for expert in range(self._per_rank):
                if len(own := (ids == expert).nonzero()[:, 0]):
                    y[own] = self._kernels.experts(x[own], _only(ids[own]), weights)
        self._ends("experts")
        return y

    def _send(self, x: Tensor, parts: Parts) -> Tensor:
        self._count_bytes(x, parts.sent)
        return self._ranks.all_to_all(x, *parts)

    def _send_back(self, x: Tensor, parts: Parts) -> Tensor:
        """Results of what `_send` brought."""
        self._count_bytes(x, parts.sent)
        return self._ranks.all_to_all(x, parts.arrives, parts.sent)

    # --- what it takes --------------------------------------------------------------------------------------------

    def _ends(self, stage: str) -> None:
        if self._meter is not None:
            self._meter.ends(stage)

    def _count_bytes(self, x: Tensor, rows: list[int]) -> None:
        if self._meter is not None:
            self._meter.add_bytes(self._to_others(rows) * x.shape[1] * x.element_size(), 0)

    def _count_ideal(self, x: Tensor, rows: list[int]) -> None:
        assert self._meter is not None
        self._meter.add_bytes(0, 2 * self._to_others(rows) * x.shape[1] * x.element_size())

    def _count_slots(self, x: Tensor, routes: Routes, count: int) -> None:
        """Of the direct form, on the device. A note of its experts goes to every rank from every place."""
        assert self._meter is not None
        row, size = x.shape[1] * x.element_size(), self._ranks.size
        goes = torch.cat((self._goes(routes)[: self._ranks.rank], self._goes(routes)[self._ranks.rank + 1 :]))
        there = goes.any(-1).sum()
        back = goes.sum() if self._inboxes.one_by_one else there
        notes = (size - 1) * -(-count // size) * 2 * routes.ids.shape[1] * routes.ids.element_size()
        self._meter.add_bytes((there + back) * row + notes, 2 * there * row)

    def _to_others(self, rows: list[int]) -> int:
        return sum(rows) - rows[self._ranks.rank]


def _only(ids: Tensor) -> Routes:
    """ids [N] of experts, as the one choice of each row."""
    return Routes(ids.int()[:, None], torch.ones_like(ids, dtype=torch.float32)[:, None])
