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
    def scaled(self) -> bool:
        """In 8 bits, with a scale for each head that all tokens share, beside the store's tensors."""
        return self.dtype.itemsize == 1

    @property
    def bytes_per_token(self) -> int:
        return sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in self.stored)


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
    def of_heads(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> KVLayout:
        """Keys and values (default: of the keys' size) of every layer; no token has scales of its own."""
        sizes = {"k": head_dim, "v": value_dim or head_dim}
        return cls.alike(num_layers, *(Plane(name, (num_kv_heads, size), dtype) for name, size in sizes.items()))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> tuple[Plane, Plane] | None:
        """Planes "k" and "v" of shape (num_kv_heads, size), where all layers keep those alike, as of `of_heads`."""
        planes = self.layers[0] if self.layers else ()
        if len(planes) != 2 or any(len(plane.shape) != 2 for plane in planes):
            return None
        k, v = planes
        num_kv_heads, head_dim = k.shape
        plain = KVLayout.of_heads(self.num_layers, num_kv_heads, head_dim, k.dtype, v.shape[1])
        return (k, v) if self == plain else None

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""
        return sum(plane.bytes_per_token for planes in self.layers for plane in planes)

    def bytes_per_block(self, block_size: int) -> int:
        """Of all layers."""
        return block_size * self.bytes_per_token

    def groups(self) -> list[tuple[list[int], tuple[Plane, ...]]]:
        """Layers that keep the same, wherever they stand, with what they keep."""
        layers_of: dict[tuple[Plane, ...], list[int]] = {}
        for layer, planes in enumerate(self.layers):
            layers_of.setdefault(planes, []).append(layer)
        return [(layers, planes) for planes, layers in layers_of.items()]
