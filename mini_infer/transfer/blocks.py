"""KV memory as blocks of bytes, layer by layer, whatever they hold; and what pushes them while steps compute them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.transfer import AtOnce, SideStream
from mini_infer.core.plan import Push


class KVBlocks:
    """
    Args:
        layers: of each layer, what it keeps: tensors [planes, num_blocks, ...], each plane contiguous.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        words = [[_words(tensor.flatten(2)) for tensor in tensors] for tensors in layers]
        # Wider ones first: where they are put one behind the other, each begins at a multiple of its own size.
        self._layers = [sorted(tensors, key=lambda tensor: -tensor.itemsize) for tensors in words]
        self.device = layers[0][0].device

    @classmethod
    def of(cls, store: KVStore) -> KVBlocks:
        return cls([store.of_layer(layer) for layer in range(store.layout.num_layers)])

    def layer(self, layer: int) -> list[Tensor]:
        """[planes, num_blocks, words] each."""
        return self._layers[layer]

    def block_bytes(self, layer: int) -> int:
        return sum(tensor[:, 0].nbytes for tensor in self._layers[layer])

    def gather(self, layer: int, index: Tensor) -> Tensor:
        """What these blocks [n] of a layer hold, as bytes: uint8 [n * block_bytes], of any order that `scatter`
        knows."""
        parts = [tensor.index_select(1, index).flatten().view(torch.uint8) for tensor in self._layers[layer]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def scatter(self, layer: int, index: Tensor, data: Tensor) -> None:
        """Puts what `gather` gave of as many blocks, here or elsewhere, into these."""
        first = 0
        for tensor in self._layers[layer]:
            shape = len(tensor), len(index), tensor.shape[2]
            size = shape[0] * shape[1] * shape[2] * tensor.itemsize
            tensor.index_copy_(1, index, data[first : first + size].view(tensor.dtype).view(shape))
            first += size


def _words(tensor: Tensor) -> Tensor:
    """[planes, num_blocks, bytes or 8 of them]"""
    fits = tensor.shape[2] * tensor.itemsize % 8 == 0
    return tensor.view(torch.int64 if fits else torch.uint8)


class Target(Protocol):
    """Where a prompt's blocks go: a connector's end."""

    def write(self, blocks: KVBlocks, layer: int, here: Tensor, there: Tensor, there_listed: list[int]) -> None:
        """Copies blocks `here` [n] of a layer to blocks `there` [n], on the current stream."""


@dataclass
class _Open:
    target: Target
    num_bytes: int = 0
    seconds: float = 0.0  # on a CPU
    laps: list[tuple[Any, Any]] = field(default_factory=list)  # on a GPU: events around copies


class Pusher:
    """Copies what a step computes to other engines, each layer as soon as it is there, beside the layers that follow.

    begin(pushes)      of the step
    layer(i)           as often as there are layers: layer i of the step's tokens is in the cache
    end()              an event behind all copies
    """

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._on_gpu = blocks.device.type == "cuda"
        self._stream = SideStream(blocks.device) if self._on_gpu else AtOnce()
        self._open: dict[int, _Open] = {}
        self._step: list[tuple[_Open, Tensor, Tensor, list[int]]] = []
        self._last: Any = None  # an event

    def open(self, transfer_id: int, target: Target) -> None:
        """The pushes of this transfer go there."""
        self._open[transfer_id] = _Open(target)

    def close(self, transfer_id: int) -> tuple[float, int]:
        """Waits until nothing of it is being copied. What its copies took in seconds, and their bytes."""
        transfer = self._open.pop(transfer_id)
        if self._last is not None:
            self._last.synchronize()
        return transfer.seconds + sum(a.elapsed_time(b) for a, b in transfer.laps) / 1e3, transfer.num_bytes

    def begin(self, pushes: Sequence[Push]) -> None:
        """Before anything of a step is launched: blocks that are still being copied may be written to by it."""
        if self._last is not None and self._on_gpu:
            torch.cuda.current_stream(self._blocks.device).wait_event(self._last)
        self._step = []
        for push in pushes:
            transfer = self._open.get(push.transfer_id)
            if transfer is not None and push.pairs:  # else it has ended meanwhile
                pairs = torch.tensor(push.pairs, pin_memory=self._on_gpu)
                here, there = pairs.to(self._blocks.device, non_blocking=True).T.contiguous()
                self._step.append((transfer, here, there, [block for _, block in push.pairs]))

    def layer(self, layer: int) -> None:
        if self._step:
            self._last = self._stream.run(lambda: self._push(layer))

    def end(self) -> Any:
        """None where nothing was copied."""
        pushed, self._step = self._step, []
        for _, here, there, _ in pushed:
            self._stream.uses(here)
            self._stream.uses(there)
        return self._last if pushed else None

    def _push(self, layer: int) -> None:
        for transfer, here, there, listed in self._step:
            lap = self._lap()
            transfer.target.write(self._blocks, layer, here, there, listed)
            lap(transfer)
            transfer.num_bytes += len(listed) * self._blocks.block_bytes(layer)

    def _lap(self) -> Callable[[_Open], None]:
        if not self._on_gpu:
            started = time.perf_counter()

            def stop(transfer: _Open) -> None:
                transfer.seconds += time.perf_counter() - started

            return stop
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()

        def stop_on_gpu(transfer: _Open) -> None:
            end.record()
            transfer.laps.append((begin, end))

        return stop_on_gpu
