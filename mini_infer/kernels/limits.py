"""What an attention kernel takes, as a value that stands beside the kernel: its own checks and what a backend declares
are made from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AttentionLimits:
    """Of keys and values [num_blocks, block_size, num_kv_heads, head_dim] of q's dtype, or of one of `scaled_dtypes`,
    with a scale for each head. None where it takes any."""

    dtypes: Collection[torch.dtype]
    head_sizes: Collection[int] | None = None
    block_sizes: Collection[int] | None = None
    unequal_values: bool = False  # values may be of another size than keys
    unequal_pairs: Collection[tuple[int, int]] = ()  # or just these sizes of keys and values
    scaled_dtypes: Collection[torch.dtype] = ()
    scaled_capability: tuple[int, int] | None = None  # the least of a GPU for these; None: any

    def refusal(self, head_size: int, block_size: int, dtype: torch.dtype, value_size: int | None = None) -> str | None:
        """Why the kernel cannot, or None if it can. Values are of the keys' size, unless said."""
        pair = (head_size, value_size) in self.unequal_pairs
        if value_size not in (None, head_size) and not self.unequal_values and not pair:
            return f"it takes keys and values of one size, not {head_size} and {value_size}"
        if dtype not in self.dtypes:
            return f"it takes {names(self.dtypes)}, not {dtype}"
        if not pair and self.head_sizes is not None and head_size not in self.head_sizes:
            return f"it takes head sizes {names(self.head_sizes)}, not {head_size}"
        if self.block_sizes is not None and block_size not in self.block_sizes:
            return f"it takes block sizes {names(self.block_sizes)}, not {block_size}"
        return None


# Of Triton's kernels.
FP8_GPUS = (8, 9)  # compute capability, at least
FP8_CACHE: dict[str, Any] = {"scaled_dtypes": (torch.float8_e4m3fn,), "scaled_capability": FP8_GPUS}


def names(values: Collection) -> str:
    """For a message: in order, a range by its ends."""
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(str(value) for value in sorted(values, key=lambda value: (len(str(value)), str(value))))
