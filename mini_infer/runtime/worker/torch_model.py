"""A PyTorch model, its KV store and its attention backends, as one part of the runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mini_infer.attention.backend import Requirements, Selection, select_backend
from mini_infer.attention.context import AttentionContext
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import AttentionConfig
from mini_infer.modeling.model import Model
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.mixed import MixedAttention
from mini_infer.runtime.graphs.pieces import PiecewiseGraphs
from mini_infer.runtime.worker.startup import CaptureReport
from mini_infer.runtime.worker.step_input import StepInput


class AttentionBackends(NamedTuple):
    prefill: Selection
    decode: Selection

    @classmethod
    def select(cls, config: AttentionConfig, needs: Requirements) -> AttentionBackends:
        """Raises ConfigError where a chosen backend cannot serve."""
        return cls(select_backend(config.prefill, "prefill", needs), select_backend(config.decode, "decode", needs))


class TorchModel:
    """`known_tokens` are those of a draft model beside a target that has more: what is no token here stands for
    nothing, but must not be looked up."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        backends: AttentionBackends,
        known_tokens: int | None = None,
    ) -> None:
        self._model = model
        self._last_token = None if known_tokens is None else known_tokens - 1
        self.store = store
        self.expert_counts, self.rank_counts = model.expert_counts, model.rank_counts
        self.expert_meter, self.hot_experts = model.expert_meter, model.hot_experts
        self.adapters = model.adapters
        self.samples = model.spec.is_last
        self.on_layer: Callable[[int], None] | None = None  # told of each layer whose K and V of a step are stored
        self._backends = backends
        self._pieces: dict[bool, PiecewiseGraphs] = {}  # of steps without adapters, and of those with some
        self._attention = model.attention(store)

    @property
    def module(self) -> Model:
        return self._model

    def forward(self, step: StepInput) -> torch.Tensor:
        """Computes the step's tokens and returns their hidden states [T, hidden_size], which stay until the next
        call."""
        batch, token_ids = step.batch, self._known(step.token_ids)
        pieces = self._pieces.get(self._adapted(step))
        hidden = None if pieces is None else pieces.replay(token_ids, batch, lambda: self._context(step))
        return self._model.forward(token_ids, batch.positions, self._context(step)) if hidden is None else hidden

    def forward_eagerly(self, step: StepInput) -> torch.Tensor:
        """`forward` by operations that can be captured, if attention's can."""
        self._adapted(step)
        return self._model.forward(self._known(step.token_ids), step.batch.positions, self._context(step))

    def _adapted(self, step: StepInput) -> bool:
        """Whether tokens of the step have adapters, which are told whose they are."""
        if self.adapters is None:
            return False
        self.adapters.group(step.owners, len(step.token_ids))
        return self.adapters.active

    def _known(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids if self._last_token is None else token_ids.clamp(max=self._last_token)

    def _context(self, step: StepInput) -> AttentionContext:
        backends = self._backends
        chosen = backends.prefill.backend, backends.decode.backend
        return AttentionContext(step.batch, self._attention, *chosen, self.on_layer)

    def capture_pieces(
        self, sizes: Sequence[int], memory: GraphMemory, most_rows: int, max_model_len: int
    ) -> CaptureReport:
        """Captures steps of these numbers of tokens, with adapters where these are active, which `forward` then
        replays: of at most so many decode rows of so many tokens each as whole steps, where attention can be and nobody
        is told of each layer."""
        backends = self._backends.prefill.backend, self._backends.decode.backend
        mixed = None
        if self.on_layer is None and MixedAttention.captures(*backends):
            mixed = MixedAttention(self._attention, *backends, most_rows, max_model_len)
        pieces = PiecewiseGraphs(self._model, self.store, sizes, mixed=mixed)
        report = pieces.capture(memory)
        self._pieces[self.adapters is not None and self.adapters.active] = pieces
        return replace(report, in_pieces=mixed is None)

    def release_pieces(self) -> None:
        self._pieces.clear()

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [N, hidden_size] -> [N, vocab_size], in `out` where it is given."""
        return self._model.compute_logits(hidden, out)

    def new_logits(self, num_rows: int) -> torch.Tensor:
        """Memory for `compute_logits`, [num_rows, vocab_size], where there are any."""
        model = self._model
        size = num_rows if self.samples else 0, model.spec.vocab_size
        return torch.empty(size, dtype=model.dtype, device=model.device)

    def warm_up(self, max_rows: int) -> None:
        """Compiles what attention will run, so that no step waits for a compiler."""
        heads = self._model.spec.attention.num_heads
        self._backends.prefill.backend.warm_up("prefill", self._attention, heads, max_rows)
        self._backends.decode.backend.warm_up("decode", self._attention, heads, max_rows)
