"""The tensors behind the block pool: keys and values of every layer, block and slot."""

from __future__ import annotations

import torch
from torch import Tensor


class KVStore:
    """Paged storage (Kwon et al. 2023, arXiv:2309.06180) of K and V.

        kv [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]
                        |  \\________ one block ________________________/
                        0 keys, 1 values

    A slot is a token's place: slot = block * block_size + offset. Within a layer all keys are contiguous, and so
    are all values, which is what paged kernels expect; keys and values together are one tensor as well, so that a
    gather of both is a single operation.

    It starts as zeros, because readers that gather whole blocks multiply unwritten slots by a probability of 0.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        # Views are made once: on a CPU, indexing costs as much as a small kernel.
        self._keys = [layer[0] for layer in self.kv]
        self._values = [layer[1] for layer in self.kv]
        self._key_slots = [keys.flatten(0, 1) for keys in self._keys]
        self._value_slots = [values.flatten(0, 1) for values in self._values]
        self._blocks = [layer.view(2 * num_blocks, -1) for layer in self.kv]

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> int:
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""
        return self._values[layer]

    def key_slots(self, layer: int) -> Tensor:
        """[num_blocks * block_size, num_kv_heads, head_dim], the memory of keys(layer)"""
        return self._key_slots[layer]

    def value_slots(self, layer: int) -> Tensor:
        """[num_blocks * block_size, num_kv_heads, head_dim], the memory of values(layer)"""
        return self._value_slots[layer]

    def blocks(self, layer: int) -> Tensor:
        """[2 * num_blocks, block_size * num_kv_heads * head_dim]: row b is block b's keys, num_blocks + b its
        values."""
        return self._blocks[layer]
