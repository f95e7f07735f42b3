"""What an attention backend is, what it declares it can do, and how one is chosen.

A new backend is one file with an AttentionBackend, one line in BACKENDS and its place in AUTO_ORDER.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.attention.context import AttentionBatch, ModelAttention, Rows
from mini_infer.cache.layout import KVLayout
from mini_infer.core.config import AttentionChoice, MLAForm
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.limits import AttentionLimits, names

Kind = Literal["prefill", "decode"]

# AttentionChoice -> module:class. Imported when asked for, since a backend's own dependencies may not be installed.
BACKENDS: dict[AttentionChoice, str] = {
    AttentionChoice.flash_attn: "mini_infer.attention.flash_attn:FlashAttnBackend",
    AttentionChoice.triton: "mini_infer.attention.triton:TritonBackend",
    AttentionChoice.sdpa: "mini_infer.attention.torch_sdpa:SdpaBackend",
    AttentionChoice.batch_invariant: "mini_infer.attention.invariant:InvariantBackend",
}

# What `auto` tries on a device, best first. FlashAttention-4 does not split the keys of a decode row over the SMs of a
# Hopper GPU, as Flash Decoding does.
_ANYWHERE = (AttentionChoice.sdpa, AttentionChoice.batch_invariant)
AUTO_ORDER: dict[str, dict[Kind, Sequence[AttentionChoice]]] = {
    "cuda": {
        "prefill": (AttentionChoice.flash_attn, AttentionChoice.triton, *_ANYWHERE),
        "decode": (AttentionChoice.triton, AttentionChoice.flash_attn, *_ANYWHERE),
    },
    "cpu": {"prefill": _ANYWHERE, "decode": _ANYWHERE},
}


@dataclass(frozen=True)
class Latent:
    """A cache of latents [rank + rope_dim], of which each head's keys [head_dim] and values [value_dim] are made, and
    how it is attended to (attention/mla.py)."""

    num_heads: int
    head_dim: int
    value_dim: int
    rank: int
    rope_dim: int
    form: MLAForm
    crossover: int  # rows of no more new tokens absorb, where `form` is auto

    def expanded(self, dtype: torch.dtype) -> KVLayout:
        """What kernels see where keys and values of all heads are made of the latents."""
        return KVLayout.of_heads(1, self.num_heads, self.head_dim, dtype, self.value_dim)

    def absorbed(self, dtype: torch.dtype) -> KVLayout:
        """What kernels see where the latents themselves are keys, and the first of their numbers values."""
        return KVLayout.of_heads(1, 1, self.rank + self.rope_dim, dtype, self.rank)


@dataclass(frozen=True)
class Requirements:
    """What a model, a cache and a machine ask of a backend."""

    layout: KVLayout
    block_size: int
    dtype: torch.dtype  # of queries
    device: torch.device
    sliding_window: bool  # some layer has one
    graphs: bool = False  # decode steps will be captured in CUDA graphs
    batch_invariant: bool = False  # numbers must not depend on a row's company
    latent: Latent | None = None  # None: the cache has keys and values


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do: what its kernels take of keys and values, which all of them want in two planes."""

    prefill: AttentionLimits | None  # None: it has none
    decode: AttentionLimits | None
    devices: Collection[str]
    sliding_window: bool
    graph_safe: bool  # decode may be captured in a CUDA graph and replayed with other lengths
    gpu_generations: Collection[int] | None = None  # major compute capabilities; None: any
    batch_invariant: bool = False  # a query's numbers depend on its position, the keys and the values alone

    def refusal(self, kind: Kind, needs: Requirements) -> str | None:
        """Why this backend cannot serve, or None if it can."""
        limits = self.prefill if kind == "prefill" else self.decode
        if limits is None:
            return f"it has no {kind}"
        if needs.device.type not in self.devices:
            return f"it runs on {names(self.devices)}, not {needs.device.type}"
        if needs.device.type == "cuda" and self.gpu_generations is not None:
            major, minor = torch.cuda.get_device_capability(needs.device)
            if major not in self.gpu_generations:
                takes = names([f"{generation}.x" for generation in self.gpu_generations])
                return f"it takes GPUs of compute capability {takes}, not {major}.{minor}"
        keys, values = needs.layout.heads or (None, None)
        if keys is None or values is None or keys.dtype not in (needs.dtype, *limits.scaled_dtypes):
            also = f" or {names(limits.scaled_dtypes)}" if limits.scaled_dtypes else ""
            kept = "" if keys is None else f", not {keys.dtype}"
            return (
                f"it takes keys and values [heads, head size] of the queries' {needs.dtype}{also}, alike in all "
                f"layers{kept}"
            )
        least = limits.scaled_capability if keys.scaled and needs.device.type == "cuda" else None
        if least is not None and torch.cuda.get_device_capability(needs.device) < least:
            return f"it takes {keys.dtype} on GPUs of compute capability {least[0]}.{least[1]} and above"
        refusal = limits.refusal(keys.shape[1], needs.block_size, needs.dtype, values.shape[1])
        if refusal is not None:
            return refusal
        if needs.sliding_window and not self.sliding_window:
            return "it has no sliding window, which this model needs"
        if needs.batch_invariant and not self.batch_invariant:
            return "it is not batch-invariant, which numerics=batch_invariant needs"
        if kind == "decode" and needs.graphs and not self.graph_safe:
            return "its decode cannot be captured in a CUDA graph"
        return None


class AttentionStep(Protocol):
    """Decode rows or prefill rows of one step: q [tokens of these rows, num_heads, head_dim] attends to what is in the
    cache, where the K and V of these same tokens are already -> [tokens, num_heads, value_dim] of q's dtype, in `out`,
    contiguous, where it is given."""

    def __call__(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor: ...


def step_of(
    kernel: Any, rows: Rows, attention: ModelAttention, windows: Sequence[int | None], **fixed: Any
) -> AttentionStep:
    """The step of a kernel that takes (q, keys, values, *rows, window and `fixed` by name)."""
    store, scale = attention.store, attention.scale

    def step(layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        keys, values, window = store.keys(layer), store.values(layer), windows[layer]
        scales = {} if (own := store.scales(layer)) is None else {"kv_scales": own}
        return kernel(q, keys, values, *rows, scale=scale, window=window, out=out, **scales, **fixed)

    return step


class AttentionBackend(ABC):
    """Makes, once a step, the callables that every layer of that step shares.

    num_heads is a multiple of num_kv_heads, and head h reads KV head h // group. A token's heads are contiguous in q,
    and its tokens may lie apart. Decode rows have batch.decode_query_len tokens each; rows that differ in their number
    of tokens are prefill rows.

    The constructor takes nothing, and raises ImportError with the remedy where an optional dependency is missing.
    """

    capabilities: Capabilities
    # Which rows may be captured beside others in one q (runtime/graphs/mixed.py): their query_starts begin anywhere in
    # it, and what belongs to no row, or to a row of length 0, is left as it is.
    mixed_graphs: tuple[Kind, ...] = ()

    @abstractmethod
    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep: ...

    @abstractmethod
    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep: ...

    def check(self, device: torch.device) -> None:  # noqa: B027 most have nothing to try
        """Raises whatever error shows that the backend, although it can be imported, does not work on this machine."""

    def variants(self, kind: Kind) -> Sequence[tuple[int, int]]:
        """(rows, tokens of the longest one) of steps that between them run every variant of the kernels."""
        return ()

    @torch.inference_mode()
    def warm_up(self, kind: Kind, attention: ModelAttention, num_heads: int, max_rows: int) -> None:
        """Compiles everything that steps of up to max_rows rows will run, so that none of them waits for a compiler:
        by steps of one-token rows at the start of block 0, with every window in force, and with none. The cache stays
        as it is."""
        store, windows = attention.store, attention.windows
        device, dtype = store.device, attention.dtype or store.keys(0).dtype
        lengths = {1, 1 + max((window for window in windows if window is not None), default=0)}
        for (num_rows, max_query_len), length in itertools.product(self.variants(kind), lengths):
            if num_rows > max_rows:
                continue
            zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
            batch = AttentionBatch(
                positions=zeros,
                slot_mapping=zeros,
                block_tables=zeros.int()[:, None],
                query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
                seq_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
                num_decode_rows=num_rows if kind == "decode" else 0,
                max_decode_seq_len=length,
                max_prefill_query_len=max_query_len,  # only what the step says of its longest row
                max_prefill_seq_len=length,
                host_query_starts=np.arange(num_rows + 1),
                host_seq_lens=np.ones(num_rows, dtype=np.int64),
            )
            step = (self.decode if kind == "decode" else self.prefill)(batch, attention)
            q = torch.zeros(num_rows, num_heads, attention.head_dim, dtype=dtype, device=device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a compiler's, about its own package
                for window in set(windows):
                    step(windows.index(window), q)


@dataclass(frozen=True)
class Selection:
    """A backend, and how it came to be chosen."""

    backend: AttentionBackend
    choice: AttentionChoice  # which of BACKENDS it is
    passed_over: tuple[str, ...] = ()  # those that `auto` would have preferred, each with the reason
    what: str = ""  # it attends to, where that is not what is cached

    def __str__(self) -> str:
        """For a run's record: "triton (flash_attn: it is not installed ...)"."""
        name = self.choice.value + self.what
        return f"{name} ({'; '.join(self.passed_over)})" if self.passed_over else name


def select_backend(
    choice: AttentionChoice,
    kind: Kind,
    needs: Requirements,
    backends: Mapping[AttentionChoice, str] | None = None,
) -> Selection:
    """The chosen one of `backends` (default: BACKENDS), or for `auto` the first in AUTO_ORDER that can. Raises
    ConfigError with the reasons."""
    if needs.latent is not None:
        from mini_infer.attention.mla import select_latent_backend  # which needs this module

        return select_latent_backend(choice, kind, needs, needs.latent)
    backends = BACKENDS if backends is None else backends
    candidates = AUTO_ORDER[needs.device.type][kind] if choice is AttentionChoice.auto else (choice,)
    refusals: list[str] = []
    for candidate in candidates:
        where = backends.get(candidate)
        backend = "it does not attend to latents as they are" if where is None else _load(where, kind, needs)
        if isinstance(backend, AttentionBackend):
            return Selection(backend, candidate, tuple(refusals))
        refusals.append(f"{candidate.value}: {backend}")
    others = ", ".join(c.value for c in (AttentionChoice.auto, *backends) if c is not choice)
    raise ConfigError(
        f"attention.{kind}={choice.value} cannot serve this model: {'; '.join(refusals)}. Others: {others}"
    )


def _load(where: str, kind: Kind, needs: Requirements) -> AttentionBackend | str:
    """The backend, or why it cannot serve. `where`: module:class."""
    module, _, name = where.partition(":")
    try:
        backend: type[AttentionBackend] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return f"it cannot be imported ({error})"
    refusal = backend.capabilities.refusal(kind, needs)
    if refusal is not None:
        return refusal
    try:
        instance = backend()
        instance.check(needs.device)
    except ImportError as error:
        return str(error)
    except Exception as error:  # a compiler's, the driver's
        return f"it does not work here ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    return instance
