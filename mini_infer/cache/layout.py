"""KVLayout: what a model keeps of every token, as a value. Memory, copies and attention backends follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plane:
    """What a layer keeps of a token under one name.

    `scales` are kept beside it, where its numbers are to be multiplied by something: one a head of an 8-bit plane of
    shape (num_kv_heads, head_dim) is Plane("k_scales", (num_kv_heads,), torch.float32).
    """

    name: str
    shape: tuple[int, ...]  # of one token
    dtype: torch.dtype
    scales: Plane | None = None

    @property
    def stored(self) -> tuple[Plane, ...]:
        """What takes memory: itself, and its scales."""
        return (self,) if self.scales is None else (self, *self.scales.stored)

    @property
    def bytes_per_token(self) -> int:
        return sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in self.stored)


@dataclass(frozen=True)
class Heads:
    """Keys and values [num_kv_heads, head_dim] of one dtype, alike in all layers."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scaled(self) -> bool:
        """In 8 bits, with a scale for each head of keys and of values, the same for all tokens."""
        return self.dtype.itemsize == 1


@dataclass(frozen=True)
class KVLayout:
    """The planes of each layer.

        keys and values           (Plane("k", (8, 128), bfloat16), Plane("v", (8, 128), bfloat16))
        a latent vector (MLA)     (Plane("latent", (576,), bfloat16),)

    Raises ValueError where a layer keeps nothing, or two things under one name.
    """

    layers: tuple[tuple[Plane, ...], ...]

    def __post_init__(self) -> None:
        for layer, planes in enumerate(self.layers):
            names = [stored.name for plane in planes for stored in plane.stored]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"a layer has planes of different names, but layer {layer} has {names}")

    @classmethod
    def alike(cls, num_layers: int, *planes: Plane) -> KVLayout:
        """All layers keep the same."""
        return cls((planes,) * num_layers)

    @classmethod
    def of_heads(cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayout:
        """Keys and values of every layer; no token has scales of its own."""
        return cls.alike(num_layers, *(Plane(name, (num_kv_heads, head_dim), dtype) for name in "kv"))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> Heads | None:
        """What `of_heads` was made of; None of any other layout."""
        shape = self.layers[0][0].shape if self.layers else ()
        if len(shape) != 2:
            return None
        heads = Heads(*shape, self.layers[0][0].dtype)
        plain = KVLayout.of_heads(self.num_layers, heads.num_kv_heads, heads.head_dim, heads.dtype)
        return heads if self == plain else None

    def bytes_per_block(self, block_size: int) -> int:
        """Of all layers."""
        return block_size * sum(plane.bytes_per_token for planes in self.layers for plane in planes)

    def groups(self) -> list[tuple[list[int], tuple[Plane, ...]]]:
        """Layers that keep the same, wherever they stand, with what they keep."""
        layers_of: dict[tuple[Plane, ...], list[int]] = {}
        for layer, planes in enumerate(self.layers):
            layers_of.setdefault(planes, []).append(layer)
        return [(layers, planes) for planes, layers in layers_of.items()]
