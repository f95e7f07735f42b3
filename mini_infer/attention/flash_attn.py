"""FlashAttention-4 (`flash_attn.cute` of the package flash-attn-4) over the paged cache, on Hopper and Blackwell.

The kernels are CuTe programs in Python that are compiled at run time, about two seconds for each variant: warm_up does
it before the first step. Decode works, and is there to compare with: on Hopper it reads the keys of a row with as many
thread blocks as there are KV heads, where Flash Decoding (kernels/flash_decode.py) takes the whole GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend, AttentionStep, Capabilities, Kind, step_of
from mini_infer.attention.context import AttentionBatch, ModelAttention, Rows
from mini_infer.kernels.limits import AttentionLimits

# Of a paged cache, on both generations.
_LIMITS = AttentionLimits(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    head_sizes=frozenset({*range(16, 129, 16), 256}),
    unequal_pairs=frozenset({(192, 128)}),  # DeepSeek's
)
# Above this many rows the package's scheduler looks rows up in a table, which is a further variant.
_ROWS_WITHOUT_TABLE = 256


class FlashAttnBackend(AttentionBackend):
    capabilities = Capabilities(
        prefill=_LIMITS,
        decode=_LIMITS,
        devices=frozenset({"cuda"}),
        sliding_window=True,
        graph_safe=True,
        gpu_generations=frozenset({9, 10}),
    )
    mixed_graphs = ("prefill",)

    def __init__(self) -> None:
        try:
            # Compiled kernels, of seconds each, are kept on disk, as Triton keeps its own. The package asks when it is
            # imported; where somebody has decided otherwise, that stays.
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ImportError(f"it is not installed ({error}): pip install -e '.[flash]'") from error
        self._kernels = _Kernels(_flash_attn_fwd)

    def decode(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return step_of(
            self._kernels, batch.decode_rows(), attention, attention.windows_within(batch.max_decode_seq_len)
        )

    def prefill(self, batch: AttentionBatch, attention: ModelAttention) -> AttentionStep:
        return step_of(
            self._kernels, batch.prefill_rows(), attention, attention.windows_within(batch.max_prefill_seq_len)
        )

    def variants(self, kind: Kind) -> list[tuple[int, int]]:
        return [(1, 1), (_ROWS_WITHOUT_TABLE + 1, 1)]


class _Kernels:
    """Calls the package, and from the second call of a variant on its compiled kernel alone.

    The package's own call spends 70 us of CPU on checks and on choosing a kernel, and the launch takes 8 us. So what it
    calls the kernel with is noted once, and from then on only the arguments that change are put in their places.
    """

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._variants: dict[tuple, _Call | None] = {}  # None: it has more that changes than we know of

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *tensors: Tensor,
        scale: float,
        window: int | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`tensors` are those of Rows."""
        rows = Rows(*tensors)
        left = None if window is None else window - 1  # keys to the left of a query
        variant = (q.dtype, q.shape[1:], keys.shape[1:], window is None, rows.seq_lens.shape[0] > _ROWS_WITHOUT_TABLE)
        call = self._variants.get(variant)
        if call is None:
            return self._through_package(variant, q, keys, values, rows, scale, left, out)
        out = q.new_empty(*q.shape[:2], values.shape[-1]) if out is None else out
        arguments = list(call.arguments)
        for place, argument in _changing(q, keys, values, out, rows, scale, left).items():
            arguments[place] = argument
        call.kernel(*arguments)
        return out

    def _through_package(
        self,
        variant: tuple,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        scale: float,
        left: int | None,
        out: Tensor | None,
    ) -> Tensor:
        """Notes at a variant's first call what the kernel is called with."""
        forward, cache = self._forward, getattr(self._forward, "compile_cache", None)
        listener = None if cache is None or variant in self._variants else _Listener(cache)
        if listener is not None:
            forward.compile_cache = listener
        try:
            out = forward(
                q,
                keys,
                values,
                cu_seqlens_q=rows.query_starts,
                seqused_k=rows.seq_lens,
                page_table=rows.block_tables,
                softmax_scale=scale,
                causal=True,
                window_size_left=left,
                out=out,
            )[0]
        finally:
            if listener is not None:
                forward.compile_cache = cache
        if listener is not None and listener.call is not None:
            changing = _changing(q, keys, values, out, rows, scale, left)
            self._variants[variant] = _understood(listener.call, changing)
        return out


def _changing(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, rows: Rows, scale: float, left: int | None
) -> dict[int, Any]:
    """Place among the kernel's arguments -> argument."""
    starts, lens, tables = rows.query_starts, rows.seq_lens, rows.block_tables
    return {0: q, 1: keys, 2: values, 3: out, 5: scale, 6: starts, 9: lens, 10: tables, 11: left}


class _Call(NamedTuple):
    kernel: Callable
    arguments: Sequence[Any]


def _understood(call: _Call, changing: dict[int, Any]) -> _Call | None:
    """The call, if what changes from call to call stands where we think, and nothing else does."""
    fixed = [None if place in changing else argument for place, argument in enumerate(call.arguments)]
    known = len(call.arguments) > max(changing) and all(
        _same(argument, changing[place]) if place in changing else _is_fixed(argument)
        for place, argument in enumerate(call.arguments)
    )
    return _Call(call.kernel, fixed) if known else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
    return type(one) is type(other) and one == other


def _is_fixed(argument: Any) -> bool:
    """Nothing, or a side of a window that is 0: no tensor and no length, which another step would have others of."""
    return not isinstance(argument, Tensor) and argument in (None, 0, (None, None))


class _Listener:
    """The package's cache of compiled kernels, noting which one is called, and with what."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.call: _Call | None = None

    def __contains__(self, key: tuple) -> bool:
        return key in self._cache

    def __setitem__(self, key: tuple, kernel: Callable) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: tuple) -> Callable:
        kernel = self._cache[key]

        def call(*arguments: Any) -> None:
            self.call = _Call(kernel, arguments)
            kernel(*arguments)

        return call
