"""A PyTorch model, its KV store and its attention backends, as one part of the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mini_infer.attention.backend import AttentionBackend, Requirements, select_backend
from mini_infer.attention.context import AttentionBatch, AttentionContext
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.swap import HostStore
from mini_infer.core.config import AttentionConfig
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.slots import StepInput


@dataclass(frozen=True)
class AttentionBackends:
    prefill: AttentionBackend
    decode: AttentionBackend

    @classmethod
    def select(
        cls, config: AttentionConfig, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionBackends:
        """Raises ConfigError where a chosen backend cannot serve this model here."""
        needs = Requirements(
            head_size=spec.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
            sliding_window=any(spec.sliding_windows),
        )
        return cls(
            prefill=select_backend(config.prefill, "prefill", needs),
            decode=select_backend(config.decode, "decode", needs),
        )


class TorchModel:
    def __init__(self, model: Decoder, store: KVStore, host: HostStore | None, backends: AttentionBackends) -> None:
        self._model = model
        self._store = store
        self._host = host
        self._backends = backends
        self._windows = model.spec.sliding_windows
        self._scale = model.spec.head_dim**-0.5

    def forward(self, step: StepInput) -> torch.Tensor:
        """Computes the step's tokens and returns the sampled rows' logits, float32 [S, vocab_size]."""
        device = self._store.device
        batch = AttentionBatch.build(step, device)
        context = AttentionContext(
            batch, self._store, self._backends.prefill, self._backends.decode, self._windows, self._scale
        )
        hidden = self._model(torch.from_numpy(step.token_ids).to(device), batch.positions, context)
        return self._model.compute_logits(hidden[torch.from_numpy(step.sampled_tokens).to(device)])

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self._host is not None
        self._host.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self._host is not None
        self._host.swap_in(pairs)
