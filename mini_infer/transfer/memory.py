"""A connector: the engine that computes writes into the memory of the one that decodes. On GPUs that is peer memory,
over NVLink where there is any; on CPUs shared memory. Nothing is staged, and the decoding engine does nothing."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import Connector, ParallelConfig
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.peer_memory import reachable_memory
from mini_infer.transfer.blocks import Pairs, Target, tensor_at
from mini_infer.transfer.nixl import Agent, Reachable
from mini_infer.transfer.shares import Holding, Share


class Shared(NamedTuple):
    """Memory of a rank, for other processes.

    share: of the KV, that is in it.
    num_blocks: of its KV store.
    handles: of the store's tensors.
    gpu: that they are on, by a name that all processes have for it; "" on a CPU.
    """

    share: Share
    num_blocks: int
    handles: list[list[int]]
    gpu: str

    @classmethod
    def of(cls, share: Sequence[int], *others: Any) -> Shared:
        """Of plain lists."""
        return cls(Share(*share), *others)


class SharedAllocator:
    """Allocates tensors that other processes of the machine can write to; as KVStore's `allocate`."""

    def __init__(self, device: torch.device) -> None:
        self._device = _numbered(device)
        self._memory = reachable_memory(self._device)
        self._handles: list[list[int]] = []

    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """Raises OSError where there is too little memory."""
        self._handles.append(self._memory.allocate(math.prod(shape) * dtype.itemsize, 0))
        return tensor_at(self._memory.address, shape, dtype, self._device)

    def shared(self, share: Share, num_blocks: int) -> Shared:
        return Shared(share, num_blocks, self._handles, _name(self._device))


def hold(
    store: KVStore, share: Share, parallel: ParallelContext = ONE_RANK, connector: Connector = Connector.memory
) -> Holding:
    """What other engines are told of this rank's store. Every rank calls it at once."""
    shares = [Share(*row) for row in parallel.exchange(share)]
    if connector is Connector.nixl:
        agent = Agent(store)
        told = parallel.tell(json.dumps(agent.reachable(share)))
        return Holding(store, parallel.number, shares, [Reachable.of(*json.loads(text)) for text in told], agent)
    if not isinstance(store.allocate, SharedAllocator):
        return Holding(store, parallel.number, shares)
    told = parallel.tell(json.dumps(store.allocate.shared(share, store.num_blocks)))
    return Holding(store, parallel.number, shares, [Shared.of(*json.loads(text)) for text in told])


def shared_memory(parallel: ParallelConfig, device: torch.device) -> SharedAllocator | None:
    """For the KV of an engine that others write to; None where nobody does."""
    return SharedAllocator(device) if parallel.decode and parallel.connector is Connector.memory else None


class _Mapped:
    """Finds what another process has allocated, in the same order; as KVStore's `allocate`."""

    def __init__(self, shared: Shared, device: torch.device) -> None:
        self._device = _numbered(device)
        self._memory = reachable_memory(self._device)
        self._handles = iter(shared.handles)
        self._peer: list[int] = []  # its index, as this process counts GPUs
        if device.type == "cuda":
            names = [_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
            if shared.gpu not in names:
                raise OSError(f"GPU {shared.gpu} is not visible here")
            self._peer = [names.index(shared.gpu)]

    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        handle = next(self._handles)
        if self._peer:
            handle = [*handle[:-1], *self._peer]
        return tensor_at(self._memory.open(handle), shape, dtype, self._device)


class MemoryTarget(Target):
    """The KV memory of another engine's ranks, as far as this rank has a part in filling it. Raises OSError where it
    cannot be reached."""

    # Between two H200s a layer of 2,048 tokens of a 7B, 4.2 MB, takes 11 us at the link's 395 GB/s. A launch of its own
    # took 17 us alone, and 57 in a step, most likely waiting for multiprocessors that products have. Copy engines need
    # none, but took 32 beside a product, and 20 for every 4.2 MB more. Seven layers at once are 75 us at the link's
    # rate, a small part of the 1.6 ms that the last of them is computed for.
    group_bytes = 28 * 2**20

    def __init__(self, memories: Sequence[Shared], holding: Holding) -> None:
        self._stores: list[KVStore] = []  # with which the memory goes

        def open_store(rank: int) -> KVStore:
            shared = memories[rank]
            mapped = _Mapped(shared, holding.store.device)
            self._stores.append(holding.store_like(shared.share, shared.num_blocks, mapped))
            return self._stores[-1]

        parts = holding.parts([shared.share for shared in memories], open_store)
        alike: dict[Any, list[tuple[int, Tensor, Tensor]]] = {}
        for layer in sorted(parts):
            for _, own, theirs in parts[layer]:
                kind = own.dtype, own.shape[2:], own.stride()[1:], theirs.stride()[1:]
                alike.setdefault(kind, []).extend((layer, *both) for both in zip(own, theirs, strict=True))
        make = plane_copies(holding.store.device)
        self._alike = [
            _Alike([layer for layer, _, _ in planes], planes[0][1][0].nbytes, make([both for _, *both in planes]))
            for planes in alike.values()
        ]

    def write(self, layers: range, pairs: Pairs) -> int:
        num_bytes = 0
        for planes in self._alike:
            first, end = (bisect_left(planes.layers, layer) for layer in (layers.start, layers.stop))
            if first < end:
                planes.copies.push(first, end, pairs.here, pairs.there)
                num_bytes += (end - first) * len(pairs.numbers) * planes.block_bytes
        return num_bytes


class _Alike(NamedTuple):
    """Planes of blocks that lie alike, so that one launch takes those of any layers next to each other."""

    layers: list[int]  # of each plane, in their order
    block_bytes: int  # of a plane
    copies: Any


def plane_copies(device: torch.device) -> Any:
    if device.type == "cpu":
        return CopiesOnCpu
    from mini_infer.kernels.push_blocks import PlaneCopies  # which needs Triton

    return PlaneCopies


class CopiesOnCpu:
    """As PlaneCopies, which this is the reference of."""

    def __init__(self, planes: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._planes = planes

    def push(self, first: int, end: int, here: Tensor, there: Tensor) -> None:
        for source, target in self._planes[first:end]:
            target.index_copy_(0, there, source.index_select(0, here))


def _numbered(device: torch.device) -> torch.device:
    """A GPU with its index."""
    return (
        device
        if device.type == "cpu" or device.index is not None
        else torch.device("cuda", torch.cuda.current_device())
    )


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
