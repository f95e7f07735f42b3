"""A connector: the engine that computes writes into the memory of the one that decodes. On GPUs that is peer memory,
over NVLink where there is any; on CPUs shared memory. Nothing is staged, and the decoding engine does nothing."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import Connector, ParallelConfig
from mini_infer.parallel.peer_memory import reachable_memory
from mini_infer.transfer.blocks import KVBlocks


class Shared(NamedTuple):
    """Memory of one engine, for another one.

    num_blocks: of its KV store.
    handles: of the store's tensors.
    gpu: that they are on, by a name that all processes have for it; "" on a CPU.
    """

    num_blocks: int
    handles: list[list[int]]
    gpu: str


class SharedAllocator:
    """Allocates tensors that other processes of the machine can write to; as KVStore's `allocate`."""

    def __init__(self, device: torch.device) -> None:
        self._device = _numbered(device)
        self._memory = reachable_memory(self._device)
        self._handles: list[list[int]] = []

    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """Raises OSError where there is too little memory."""
        self._handles.append(self._memory.allocate(math.prod(shape) * dtype.itemsize, 0))
        return _tensor_at(self._memory.address, shape, dtype, self._device)

    def shared(self, num_blocks: int) -> Shared:
        return Shared(num_blocks, self._handles, _name(self._device))


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
        return _tensor_at(self._memory.open(handle), shape, dtype, self._device)


class MemoryTarget:
    """Another engine's KV memory, of the same layout as `like`. Raises OSError where it cannot be reached."""

    def __init__(self, shared: Shared, like: KVStore) -> None:
        self._store = KVStore(
            like.layout,
            num_blocks=shared.num_blocks,
            block_size=like.block_size,
            device=like.device,
            allocate=_Mapped(shared, like.device),
        )
        self._theirs = KVBlocks.of(self._store)
        self._push = _push_on_cpu
        if like.device.type == "cuda":
            from mini_infer.kernels.push_blocks import push_blocks  # which needs Triton

            self._push = push_blocks

    def write(self, blocks: KVBlocks, layer: int, here: Tensor, there: Tensor, there_listed: list[int]) -> None:
        for own, theirs in zip(blocks.layer(layer), self._theirs.layer(layer), strict=True):
            self._push(own, theirs, here, there)


def _push_on_cpu(source: Tensor, target: Tensor, here: Tensor, there: Tensor) -> None:
    target.index_copy_(1, there, source.index_select(1, here))


def _tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A GPU's kernels reach peer memory by its address: to torch it is as good as the device's own."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).view(dtype).view(shape)


def _numbered(device: torch.device) -> torch.device:
    """A GPU with its index."""
    return (
        device
        if device.type == "cpu" or device.index is not None
        else torch.device("cuda", torch.cuda.current_device())
    )


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
