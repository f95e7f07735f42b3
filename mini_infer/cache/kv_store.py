"""The tensors behind the block pool: what a KVLayout keeps of every token, for every block and slot."""

from __future__ import annotations

import math
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.cache.layout import KVLayout, Plane


class Allocate(Protocol):
    def __call__(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor: ...


class PagedHeads(Protocol):
    """What attention kernels see of a cache: keys and values of heads in blocks, whatever is stored."""

    num_blocks: int
    block_size: int
    device: torch.device

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""

    def values(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, value_dim]"""

    def blocks(self, layer: int) -> Tensor | None:
        """[2 * num_blocks, block_size * num_kv_heads * head_dim]: row b is block b's keys, num_blocks + b its values;
        None where they are not in one tensor."""

    def scales(self, layer: int) -> Tensor | None:
        """What 8-bit keys and values are multiplied by, [2, num_kv_heads] float32; None where they are in the model's
        dtype."""


class KVStore:
    """Paged storage (Kwon et al. 2023, arXiv:2309.06180). Layers that keep the same share tensors, one for all their
    planes of one shape and dtype:

        tensor [layers, planes, num_blocks, block_size, *shape]      of keys and values: planes 0 and 1
                                |  \\_____ one block _____/

    A slot is a token's place: slot = block * block_size + offset. Within a layer each plane is contiguous, as paged
    kernels expect; keys and values are one tensor, so that a gather of both is one operation. It starts as zeros,
    because readers that gather whole blocks multiply unwritten slots by a probability of 0.

    Args:
        scales: [layers, 2, num_kv_heads] float32, what 8-bit keys and values are multiplied by; default: ones.
        allocate: gives the tensors, zeros of a shape and dtype on `device`; their memory is there as long as it is.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        scales: Tensor | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        self.allocate = allocate or partial(_zeros, device=device)
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.tensors: list[Tensor] = []
        self._scales: list[Tensor] | None = None
        if (heads := layout.heads) is not None and heads[0].scaled:
            scales = torch.ones(layout.num_layers, 2, heads[0].shape[0], device=device) if scales is None else scales
            self._scales = list(scales.detach())
        self._of_layer: dict[int, list[Tensor]] = {}
        # Views are made once: on a CPU, indexing costs as much as a small kernel.
        self._planes: dict[tuple[int, str], Tensor] = {}
        self._slots: dict[tuple[int, str], Tensor] = {}
        self._blocks: dict[tuple[int, str], Tensor] = {}
        for layers, planes in layout.groups():
            for names, like in _alike(planes):
                shape = (len(layers), len(names), num_blocks, block_size, *like.shape)
                tensor = self.allocate(shape, dtype=like.dtype)
                self.tensors.append(tensor)
                for layer, own in zip(layers, tensor, strict=True):
                    self._of_layer.setdefault(layer, []).append(own)
                    for name, plane in zip(names, own, strict=True):
                        self._planes[layer, name] = plane
                        self._slots[layer, name] = plane.flatten(0, 1)
                        self._blocks[layer, name] = own.view(len(names) * num_blocks, -1)

    def of_layer(self, layer: int) -> list[Tensor]:
        """All that it keeps: [planes, num_blocks, block_size, *shape] each."""
        return self._of_layer[layer]

    def plane(self, layer: int, name: str) -> Tensor:
        """[num_blocks, block_size, *shape], contiguous"""
        return self._planes[layer, name]

    def slots(self, layer: int, name: str) -> Tensor:
        """[num_blocks * block_size, *shape], the memory of plane(layer, name)"""
        return self._slots[layer, name]

    # --- as PagedHeads ----------------------------------------------------------------------------------------------

    def scales(self, layer: int) -> Tensor | None:
        return None if self._scales is None else self._scales[layer]

    def blocks(self, layer: int) -> Tensor | None:
        blocks = self._blocks[layer, "k"]
        return blocks if len(blocks) == 2 * self.num_blocks else None

    def keys(self, layer: int) -> Tensor:
        return self._planes[layer, "k"]

    def values(self, layer: int) -> Tensor:
        return self._planes[layer, "v"]


def _alike(planes: tuple[Plane, ...]) -> list[tuple[list[str], Plane]]:
    """Names of what is stored, those of one shape and dtype together, with one of them."""
    found: dict[tuple, tuple[list[str], Plane]] = {}
    for plane in planes:
        for stored in plane.stored:
            found.setdefault((stored.shape, stored.dtype), ([], stored))[0].append(stored.name)
    return list(found.values())


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU a page that nothing has been written to takes neither time nor memory, which torch's own zeros do."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
