"""What the runtime knows of a model. `modeling/decoder.py` is one, `modeling/transformers_model.py` another.

T tokens of a step, S of them sampled, hidden size H, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mini_infer.attention.context import AttentionContext

if TYPE_CHECKING:
    from mini_infer.cache.layout import KVLayout
    from mini_infer.modeling.linear_methods.base import Build
    from mini_infer.modeling.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """One tensor of a checkpoint, and what becomes of it.

    Attributes:
        shape: that it has in the checkpoint.
        load: takes it, on the CPU and in the dtype of its file, to its place: copied, converted, transposed, packed,
            quantized or cut to a shard. Called once.
        dtypes: that it may have in its file.
        memory: the part of a parameter that becomes equal to it but for the dtype, [*shape], of any strides; None
            where it is stored in another form.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], object]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    memory: Tensor | None = None

    @classmethod
    def copied_to(cls, memory: Tensor) -> CheckpointTensor:
        return cls(tuple(memory.shape), memory.copy_, memory=memory)


class Model(Protocol):
    """A decoder-only model on one device.

    On the meta device it takes no memory, and all but `forward` and `compute_logits` can be asked of it: that is how
    sizes are known before weights are loaded.
    """

    @property
    def spec(self) -> ModelSpec:
        """Vocabulary, longest sequence, end-of-sequence ids, and what each layer is made of: heads, windows, scale."""

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits."""

    @property
    def device(self) -> torch.device: ...

    @property
    def kv_layout(self) -> KVLayout:
        """What the KV cache holds of a token in each layer."""

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, H], of `dtype`, after the last norm.

        Each layer stores K and V of the T tokens through `context` and then attends. T depends on the step; within a
        CUDA graph all else that the model reads has a fixed address, and nothing waits for the device.
        """

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] -> [S, V], of `dtype`; in `out`, contiguous, where it is given."""

    def weight_bytes(self) -> int:
        """Bytes that the weights take on the device, shared ones once; also where they are not loaded."""

    def checkpoint_tensors(self) -> Mapping[str, CheckpointTensor]:
        """Checkpoint name -> what becomes of that tensor. Together they fill every weight."""

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        """Random weights of the true shapes, norms' ones apart, which are 1.

        `draw` fills a floating tensor in place. Called in one order, it draws the same from run to run and, but for
        rounding, in every dtype.
        """


# (spec, max_len, build) -> the model on build.device, weights empty, for positions below max_len.
ModelFactory = Callable[["ModelSpec", int, "Build"], Model]
