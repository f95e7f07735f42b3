"""Numbers on their way from the host to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostToDevice:
    """Numbers on their way to the device in one copy, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, *arrays: NDArray[np.integer] | NDArray[np.bool_]) -> list[Tensor]:
        """The arrays as int32 tensors on the device."""
        lengths = [len(array) for array in arrays]
        joined = torch.from_numpy(np.concatenate(arrays).astype(np.int32, copy=False))
        if self._device.type == "cuda":
            target = torch.empty(len(joined), dtype=torch.int32, device=self._device)
            self.send_into(target, joined)
            joined = target
        return list(joined.split(lengths))

    def send_into(self, target: Tensor, numbers: Tensor) -> None:
        """Fills `target` with numbers of its shape and dtype."""
        if target.is_cuda:  # torch keeps page-locked memory for its next user until this copy is done
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers)
        target.copy_(numbers, non_blocking=True)
