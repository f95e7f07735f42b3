"""A connector: the engine that computes writes into the memory of the one that decodes. On GPUs that is peer memory,
over NVLink where there is any; on CPUs shared memory. Nothing is staged, and the decoding engine does nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import Connector, ParallelConfig
from mini_infer.kernels.compile_ahead import compiled_in_parallel
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.peer_memory import copy_planes, reachable_memory
from mini_infer.transfer.blocks import Pairs, Target, tensor_at
from mini_infer.transfer.nixl import Agent, Reachable
from mini_infer.transfer.shares import Holding, Share

MOST_RUNS = 4  # of neighbouring blocks, each a copy engine's copy: they take no multiprocessor, but the host some time


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

    def __init__(self, memories: Sequence[Shared], holding: Holding) -> None:
        self._stores: list[KVStore] = []  # with which the memory goes

        def open_store(rank: int) -> KVStore:
            shared = memories[rank]
            mapped = _Mapped(shared, holding.store.device)
            self._stores.append(holding.store_like(shared.share, shared.num_blocks, mapped))
            return self._stores[-1]

        self._parts = holding.parts([shared.share for shared in memories], open_store)
        every = [part for parts in self._parts.values() for part in parts]
        device, self._push, self._copies = holding.store.device, _push_on_cpu, False
        if device.type == "cuda":
            from mini_infer.kernels.push_blocks import push_blocks  # which needs Triton

            self._push = push_blocks
            # On one GPU there is no link to keep busy, and its copies take multiprocessors, too.
            elsewhere = all(shared.gpu != _name(device) for shared in memories)
            self._copies = elsewhere and all(whole_blocks(words) for _, *both in every for words in both)
            index = torch.zeros(1, dtype=torch.int64, device=device)
            with compiled_in_parallel():  # now, and not when blocks first lie apart
                for _, own, theirs in every:
                    push_blocks(own, theirs, index, index)

    def write(self, layer: int, pairs: Pairs) -> int:
        parts = self._parts.get(layer, ())
        for _, own, theirs in parts:
            if self._copies and len(pairs.runs) <= MOST_RUNS:
                for source, target, count in pairs.runs:
                    copy_planes(theirs[:, target : target + count], own[:, source : source + count])
            else:
                self._push(own, theirs, pairs.here, pairs.there)
        return len(pairs.numbers) * sum(own[:, 0].nbytes for _, own, _ in parts)


def whole_blocks(words: Tensor) -> bool:
    """Whether blocks next to each other lie without a gap, and planes no further apart than a copy engine can step."""
    block = words[0, 0]
    return block.is_contiguous() and words.stride(1) == block.numel() and words.stride(0) * words.itemsize < 2**31


def _push_on_cpu(source: Tensor, target: Tensor, here: Tensor, there: Tensor) -> None:
    target.index_copy_(1, there, source.index_select(1, here))


def _numbered(device: torch.device) -> torch.device:
    """A GPU with its index."""
    return (
        device
        if device.type == "cpu" or device.index is not None
        else torch.device("cuda", torch.cuda.current_device())
    )


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
