"""A PyTorch model, its KV store and its attention backends, as one part of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mini_infer.attention.backend import Kind, Requirements, Selection, select_backend
from mini_infer.attention.context import AttentionContext
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.swap import HostStore
from mini_infer.core.config import AttentionConfig
from mini_infer.modeling.decoder import Decoder
from mini_infer.runtime.slots import StepInput


@dataclass(frozen=True)
class AttentionBackends:
    prefill: Selection
    decode: Selection

    @classmethod
    def select(cls, config: AttentionConfig, needs: Requirements) -> AttentionBackends:
        """Raises ConfigError where a chosen backend cannot serve."""
        return cls(select_backend(config.prefill, "prefill", needs), select_backend(config.decode, "decode", needs))


class TorchModel:
    def __init__(self, model: Decoder, store: KVStore, host: HostStore | None, backends: AttentionBackends) -> None:
        self._model = model
        self._store = store
        self._host = host
        self._backends = backends
        self._windows = model.spec.sliding_windows
        self._scale = model.spec.head_dim**-0.5

    def forward(self, step: StepInput) -> torch.Tensor:
        """Computes the step's tokens and returns their hidden states [T, hidden_size]."""
        context = AttentionContext(
            step.batch,
            self._store,
            self._backends.prefill.backend,
            self._backends.decode.backend,
            self._windows,
            self._scale,
        )
        return self._model(step.token_ids, step.batch.positions, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size]"""
        return self._model.compute_logits(hidden)

    def warm_up(self, max_rows: int) -> None:
        """Compiles what attention will run, so that no step waits for a compiler."""
        kinds: dict[Kind, Selection] = {"prefill": self._backends.prefill, "decode": self._backends.decode}
        for kind, selection in kinds.items():
            heads = self._model.spec.num_heads
            selection.backend.warm_up(kind, self._store, heads, self._windows, self._scale, max_rows)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self._host is not None
        self._host.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self._host is not None
        self._host.swap_in(pairs)
