"""KV memory as blocks of bytes, layer by layer, whatever they hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore


@dataclass(frozen=True)
class Pairs:
    """Blocks, and those of another store that they are copied to.

    Attributes:
        numbers: of both.
        here, there: the same, [n] int64 on the device.
    """

    numbers: Sequence[tuple[int, int]]
    here: Tensor
    there: Tensor


class Target:
    """Where a prompt's blocks go: a connector's end.

    Attributes:
        group_bytes: layers that are computed wait for others until they are so many bytes together.
    """

    group_bytes = 0

    def write(self, layers: range, pairs: Pairs) -> int:
        """Copies blocks of layers, on the current stream or behind it. Their bytes."""
        return sum(self.write_layer(layer, pairs) for layer in layers)

    def write_layer(self, layer: int, pairs: Pairs) -> int:
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until no copy that was not made on the stream reads anything here."""

    def end(self) -> float:
        """Waits for those copies. The seconds that they took; raises OSError where they did not all work."""
        return 0.0


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A GPU's kernels reach peer memory by its address: to torch it is as good as the device's own."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).view(dtype).view(shape)


def words_of(store: KVStore, layer: int, heads: tuple[int, int] | None = None) -> list[Tensor]:
    """What a layer keeps, or some heads [first, end) of it: [planes, num_blocks, rows, words] each, a row the part of a
    block that lies together. Wider words first: where tensors are put one behind the other, each begins at a multiple
    of its own word."""
    return sorted((_as_words(t, heads) for t in store.of_layer(layer)), key=lambda words: -words.itemsize)


def _as_words(tensor: Tensor, heads: tuple[int, int] | None) -> Tensor:
    """[planes, num_blocks, rows, bytes or 8 of them]"""
    if heads is None:
        rows, unit = tensor.flatten(2)[:, :, None], tensor[0, 0].nbytes
    else:
        rows, unit = tensor[:, :, :, heads[0] : heads[1]].flatten(3), tensor[0, 0, 0, 0].nbytes
    return rows.view(torch.int64 if unit % 8 == 0 else torch.uint8)


def gather(words: Sequence[Tensor], index: Tensor) -> Tensor:
    """What these blocks [n] hold of a layer's words, as bytes: uint8 [some], of an order that `scatter` knows."""
    parts = [tensor.index_select(1, index).flatten().view(torch.uint8) for tensor in words]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def scatter(words: Sequence[Tensor], index: Tensor, data: Tensor) -> None:
    """Puts what `gather` gave of as many blocks, here or elsewhere, into these."""
    first = 0
    for tensor in words:
        shape = tensor.shape[0], len(index), *tensor.shape[2:]
        size = math.prod(shape) * tensor.itemsize
        tensor.index_copy_(1, index, data[first : first + size].view(tensor.dtype).view(shape))
        first += size
