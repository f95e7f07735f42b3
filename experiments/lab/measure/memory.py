"""How much memory a pass took."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.core.plan import StepRecord
from mini_infer.modeling.loader import load_spec, outline, resolve_device, resolve_dtype, with_cache


class MemoryWatch:
    """Bytes at the fullest moment of a pass.

    On a GPU: what torch's allocator had given out, which includes the whole KV pool. On a CPU the process's own high
    water would mostly be torch itself, so it is the weights and the KV blocks in use at the fullest step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._dry = config.model.load_format is LoadFormat.dry
        if self._dry:
            return
        spec = with_cache(load_spec(config.model), config.cache)
        self._device = resolve_device(config.model)
        dtype = resolve_dtype(config.model, spec, self._device)
        model = outline(spec, dtype)
        self._weights, self._block = model.weight_bytes(), model.kv_layout.bytes_per_block(config.cache.block_size)
        self._reserved = 0

    def start(self) -> None:
        if not self._dry and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._reserved = torch.cuda.memory_reserved(self._device)

    def peak(self, records: Sequence[StepRecord]) -> int | None:
        """Since `start`; None of the dry model, which holds no weights and no KV."""
        if self._dry:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._weights + self._block * max((record.kv.used_blocks for record in records), default=0)

    def growth(self) -> int:
        """Bytes that torch's allocator took from the GPU since `start`."""
        if self._dry or self._device.type != "cuda":
            return 0
        return max(0, int(torch.cuda.memory_reserved(self._device)) - self._reserved)
