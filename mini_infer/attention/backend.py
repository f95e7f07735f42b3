"""What an attention backend is, what it declares it can do, and how one is chosen.

A new backend is one file with an AttentionBackend and one line in BACKENDS.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from mini_infer.core.config import AttentionChoice
from mini_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from mini_infer.attention.context import AttentionBatch

Kind = Literal["prefill", "decode"]

# AttentionChoice -> module:class, best first: `auto` takes the first that can. Imported when asked for, since a
# backend's own dependencies may not be installed.
BACKENDS: dict[AttentionChoice, str] = {
    AttentionChoice.sdpa: "mini_infer.attention.torch_sdpa:SdpaBackend",
}


class PagedKV(Protocol):
    """What attention needs of the KV cache; cache/kv_store.py is one."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""

    def values(self, layer: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim]"""

    def blocks(self, layer: int) -> Tensor:
        """[2 * num_blocks, block_size * num_kv_heads * head_dim]: row b is block b's keys, num_blocks + b its
        values."""

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Stores k and v [T, num_kv_heads, head_dim] in the slots slot_mapping [T] int64."""


@dataclass(frozen=True)
class Requirements:
    """What a model and a cache ask of a backend."""

    head_size: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: bool  # some layer has one


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. None where it takes any."""

    prefill: bool
    decode: bool
    head_sizes: frozenset[int] | None
    block_sizes: frozenset[int] | None
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str]
    sliding_window: bool
    graph_safe: bool  # may be captured in a CUDA graph and replayed with other lengths

    def refusal(self, kind: Kind, needs: Requirements) -> str | None:
        """Why this backend cannot serve, or None if it can."""
        if not (self.prefill if kind == "prefill" else self.decode):
            return f"it has no {kind}"
        if needs.device.type not in self.devices:
            return f"it runs on {_names(self.devices)}, not {needs.device.type}"
        if needs.dtype not in self.dtypes:
            return f"it takes {_names(self.dtypes)}, not {needs.dtype}"
        if self.head_sizes is not None and needs.head_size not in self.head_sizes:
            return f"it takes head sizes {_names(self.head_sizes)}, not {needs.head_size}"
        if self.block_sizes is not None and needs.block_size not in self.block_sizes:
            return f"it takes block sizes {_names(self.block_sizes)}, not {needs.block_size}"
        if needs.sliding_window and not self.sliding_window:
            return "it has no sliding window, which this model needs"
        return None


class DecodeStep(Protocol):
    """Decode rows of one step: attends with q [num_decode_tokens, num_heads, head_dim] to what is in the cache."""

    def __call__(self, layer: int, q: Tensor) -> Tensor: ...


class PrefillStep(Protocol):
    """Prefill rows of one step: q [Tp, num_heads, head_dim], k and v [Tp, num_kv_heads, head_dim] are the prefill
    rows' own tokens, and are in the cache already."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class AttentionBackend(ABC):
    """Makes, once a step, the callables that every layer of that step shares. Both return q's shape and dtype.

    windows[layer] is the layer's sliding window: a query at position p sees (p - window, p]; None sees [0, p].
    scale multiplies q.k. num_heads is a multiple of num_kv_heads, and head h reads KV head h // group.
    """

    capabilities: Capabilities

    @abstractmethod
    def decode(
        self, batch: AttentionBatch, kv_store: PagedKV, windows: Sequence[int | None], scale: float
    ) -> DecodeStep: ...

    @abstractmethod
    def prefill(
        self, batch: AttentionBatch, kv_store: PagedKV, windows: Sequence[int | None], scale: float
    ) -> PrefillStep: ...


def select_backend(choice: AttentionChoice, kind: Kind, needs: Requirements) -> AttentionBackend:
    """The chosen backend, or for `auto` the first in BACKENDS that can. Raises ConfigError with the reasons."""
    candidates = list(BACKENDS) if choice is AttentionChoice.auto else [choice]
    refusals = []
    for candidate in candidates:
        module, _, name = BACKENDS[candidate].partition(":")
        try:
            backend: type[AttentionBackend] = getattr(importlib.import_module(module), name)
        except ImportError as error:
            refusals.append(f"{candidate.value}: {error}")
            continue
        reason = backend.capabilities.refusal(kind, needs)
        if reason is None:
            return backend()
        refusals.append(f"{candidate.value}: {reason}")
    others = ", ".join(c.value for c in (AttentionChoice.auto, *BACKENDS) if c is not choice)
    raise ConfigError(
        f"attention.{kind}={choice.value} cannot serve this model: {'; '.join(refusals)}. Others: {others}"
    )


def _names(values: frozenset) -> str:
    return ", ".join(sorted(str(value) for value in values))
