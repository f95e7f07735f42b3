"""The scales of 8-bit keys and values, as folders have them: one a layer, or one a head of it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mini_infer.core.errors import ModelError
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.parallel.context import ParallelContext

_NAMES = {"k": ("k_scale", "k_proj.k_scale"), "v": ("v_scale", "v_proj.v_scale")}  # today's, and an older one


class KVScales:
    """
    Args:
        scales: [layers, 2, num_kv_heads], ones, of the heads that this rank has.
        names: of the layers' attention: "model.layers.0.self_attn".
        required: a folder without them is refused.
        heads: of all ranks together.
    """

    def __init__(self, scales: Tensor, names: list[str], required: bool, parallel: ParallelContext, heads: int) -> None:
        self._scales, self._names, self._heads = scales, names, heads
        self._own = parallel.part(heads, scales.shape[2])
        self._missing = {(name, kind) for name in names for kind in _NAMES} if required else set()

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        heads = self._heads
        shapes = ((1,), (), (heads,), (heads, 1, 1), (1, heads, 1, 1))
        return {
            f"{name}.{tensor}": CheckpointTensor(
                shapes[0], partial(self._take, layer, name, kind), required=False, other_shapes=shapes[1:]
            )
            for layer, name in enumerate(self._names)
            for kind, tensors in _NAMES.items()
            for tensor in tensors
        }

    def loaded(self) -> None:
        """Raises ModelError where some are missing."""
        for name, kind in sorted(self._missing):
            raise ModelError(
                f"{name}.{kind}_scale is missing, which the quantization_config's kv_cache_scheme asks for: the folder "
                "is not whole. Fetch or copy it again, or take kv_cache_scheme out of its config.json"
            )

    def _take(self, layer: int, name: str, kind: str, scales: Tensor) -> None:
        scales = scales.float()
        if not bool((torch.isfinite(scales) & (scales > 0)).all()):
            raise ModelError(f"{name}.{kind}_scale is {scales.flatten().tolist()}: scales are finite and above 0")
        scales = scales.flatten()
        self._scales[layer, list(_NAMES).index(kind)] = scales if len(scales) == 1 else scales[self._own]
        self._missing.discard((name, kind))
