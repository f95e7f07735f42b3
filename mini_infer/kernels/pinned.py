"""Numbers on their way to a device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device, out: Tensor | None = None) -> Tensor:
    """The array's numbers in a tensor there, `out` if it is given, where kernels of this stream that are launched later
    find them. On a GPU nobody waits for that: a copy from memory that is not page-locked would wait until all that was
    launched before has ended, and what is launched next would begin late."""
    tensor = torch.from_numpy(array.copy())  # torch refuses the strides of a record array's columns
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # which torch keeps until the copy below is done
    return tensor.to(device, non_blocking=True) if out is None else out.copy_(tensor, non_blocking=True)
