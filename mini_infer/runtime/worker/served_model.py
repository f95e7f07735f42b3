"""A model that a worker is to serve, target or draft: what is known of it without its weights, and loading them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch

from mini_infer.attention.backend import Requirements
from mini_infer.cache.layout import KVLayout
from mini_infer.core.config import EngineConfig, LoadFormat, ModelConfig, Numerics, When
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.ops import Kernels
from mini_infer.modeling.checkpoint import resolve_folder
from mini_infer.modeling.loader import load_model, load_spec, outline, resolve_dtype, with_cache
from mini_infer.modeling.model import Model
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.worker.memory import require_room_for_weights
from mini_infer.runtime.worker.torch_model import AttentionBackends

NEEDS_GPU = "CUDA graphs need a GPU, not cpu"


@dataclass(frozen=True)
class ServedModel:
    config: ModelConfig
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    kv_layout: KVLayout
    block_bytes: int  # of KV
    backends: AttentionBackends
    no_graphs: str | None  # why its steps cannot be captured in CUDA graphs; None where they can

    @classmethod
    def plan(
        cls, config: EngineConfig, model: ModelConfig, device: torch.device, uncapturable: str | None
    ) -> ServedModel:
        """Raises ConfigError or ModelError where it cannot be served with these settings.

        Args:
            uncapturable: name of a sampler that cannot be captured; None for one that can.
        """
        if model.hf_config is None:  # a hub name is looked up once; from here on it is a folder
            folder = resolve_folder(model.path, weights=model.load_format is LoadFormat.auto)
            model = dataclasses.replace(model, path=str(folder))
        spec = with_cache(load_spec(model), config.cache)
        dtype = resolve_dtype(model, spec, device)
        kv_layout = spec.kv_layout(dtype)
        invariant = config.numerics is Numerics.batch_invariant
        if invariant and spec.through_transformers:
            raise ConfigError(
                f"numerics=batch_invariant: {model.path} runs through transformers' code, which sums in orders of its "
                "own. Set numerics=fast"
            )
        needs = Requirements(
            kv_layout,
            config.cache.block_size,
            dtype,
            device,
            sliding_window=any(spec.windows),
            batch_invariant=invariant,
        )
        backends, no_graphs = _select_attention(config, needs, uncapturable)
        block_bytes = kv_layout.bytes_per_block(config.cache.block_size)
        return cls(model, spec, dtype, device, kv_layout, block_bytes, backends, no_graphs)

    @cached_property
    def weight_bytes(self) -> int:
        return outline(self.spec, self.dtype).weight_bytes()

    @property
    def quantization(self) -> str:
        """Of the weights, for a run's record."""
        return "none" if self.spec.quantization is None else self.spec.quantization.describe()

    @property
    def kv_dtype(self) -> str:
        """For a run's record."""
        return "float8_e4m3fn, a scale a head" if self.spec.fp8_kv else str(self.dtype).removeprefix("torch.")

    def load(self, max_len: int, kernels: Kernels) -> Model:
        """The weights, for positions below `max_len`. Raises ConfigError where they will not fit."""
        require_room_for_weights(self.weight_bytes, self.config.path, self.dtype, self.device)
        return load_model(self.config, self.spec, self.dtype, self.device, max_len, kernels)


def _select_attention(
    config: EngineConfig, needs: Requirements, uncapturable: str | None
) -> tuple[AttentionBackends, str | None]:
    """The backends, and why decode steps will not be captured in CUDA graphs; None where they will."""
    capture = config.graphs.capture
    if capture is When.never:
        reason = "graphs.capture=never"
    elif needs.device.type != "cuda":
        reason = NEEDS_GPU
    elif uncapturable is not None:
        reason = f"the {uncapturable} sampler cannot be captured"
    else:
        try:
            return AttentionBackends.select(config.attention, dataclasses.replace(needs, graphs=True)), None
        except ConfigError as error:
            reason = str(error)
    if capture is When.always:
        raise ConfigError(f"graphs.capture=always: {reason}. Set graphs.capture=auto or never")
    return AttentionBackends.select(config.attention, needs), reason
