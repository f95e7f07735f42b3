"""What the runtime knows of a model. `modeling/decoder.py` is one, `modeling/transformers_model.py` another.

T tokens of a step, S of them sampled, hidden size H, vocabulary V.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mini_infer.attention.context import AttentionContext, ModelAttention
from mini_infer.cache.kv_store import KVStore
from mini_infer.modeling.spec import ModelSpec
from mini_infer.parallel.expert_copies import HotExperts
from mini_infer.parallel.expert_meter import Meter

if TYPE_CHECKING:
    from mini_infer.modeling.adapters import Adapters


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """One tensor of a checkpoint, and what becomes of it.

    Attributes:
        load: takes what is read of it, on the CPU and in the dtype of its file, to its place: copied, converted,
            transposed, packed or quantized. Called once.
        memory: the part of a parameter that becomes equal to it but for the dtype, [*shape], of any strides; None
            where it is stored in another form.
        required: a checkpoint without it is refused.
        other_shapes: that it may have as well.
        whole: every rank reads all of it.
        reads: shape -> the part of a tensor of this shape that is read, where a rank has no use for all of it.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], object]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    memory: Tensor | None = None
    required: bool = True
    other_shapes: tuple[tuple[int, ...], ...] = ()
    whole: bool = False
    reads: Mapping[tuple[int, ...], tuple[slice, ...]] = field(default_factory=dict)

    @classmethod
    def copied_to(cls, memory: Tensor) -> CheckpointTensor:
        return cls(tuple(memory.shape), memory.copy_, memory=memory)


class Model(nn.Module):
    """A decoder-only model on one device, with hidden states and logits of one `dtype`.

    On the meta device it takes no memory, and all but `forward` and `compute_logits` can be asked of it: that is how
    sizes are known before weights are loaded.

    Attributes:
        kv_scales: [layers, 2, num_kv_heads] float32, what 8-bit keys and values are multiplied by; None where they are
            kept in `dtype`.
        expert_counts: [layers with experts, E] int32, to which each step adds its tokens by the expert that they went
            to; None where they are not counted.
        rank_counts: [layers with experts, ranks] int32, the same by the rank that computes them; None where one does.
        expert_meter: of bringing them there, where ranks share experts and tokens are counted.
        hot_experts: what places copies of experts between steps; None where there is no room for any.
        adapters: that tokens may have; None where there are none.
        inbox: [most tokens, H], where a stage that is not the first reads its hidden states; None where it is.
    """

    kv_scales: Tensor | None
    expert_counts: Tensor | None = None
    rank_counts: Tensor | None = None
    expert_meter: Meter | None = None
    hot_experts: HotExperts | None = None
    adapters: Adapters | None = None
    inbox: Tensor | None = None

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.device = spec, dtype, device
        self.kv_layout = spec.kv_layout(dtype)
        scaled = spec.fp8_kv and spec.attention.latent is None  # latents are normalised, and need no scales
        scales = torch.ones(spec.num_layers, 2, spec.attention.num_kv_heads, device=device) if scaled else None
        self.register_buffer("kv_scales", scales)

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, H], of `dtype`, after the last norm, or for the stage
        behind this one.

        Each layer stores K and V of the T tokens through `context` and then attends. T depends on the step; within a
        CUDA graph all else that the model reads has a fixed address, and nothing waits for the device.
        """

    def attention(self, store: KVStore) -> ModelAttention:
        """What attention knows of the model, whose cache is `store`."""
        return ModelAttention(store, self.spec.windows, self.spec.attention.scale, self.dtype)

    @abstractmethod
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] -> [S, V], of `dtype`; in `out`, contiguous, where it is given. Of the last stage alone."""

    @abstractmethod
    def checkpoint_tensors(self) -> Mapping[str, CheckpointTensor]:
        """Checkpoint name -> what becomes of that tensor. Together they fill every weight."""

    def elsewhere(self) -> tuple[str, ...]:
        """What the names of a checkpoint's tensors begin with that only other ranks take."""
        return ()

    def loaded(self) -> None:
        """Called once, when every tensor of a checkpoint has been taken to its place. Raises ModelError where what came
        is not whole."""

    @abstractmethod
    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        """Random weights of the true shapes, norms' ones apart, which are 1. `draw` fills a floating tensor in place;
        called in one order, it draws the same from run to run and, but for rounding, in every dtype."""

    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device, shared ones once; also where they are not loaded."""
        return sum(parameter.nbytes for parameter in self.parameters())
