"""What a GPU says of itself: clock, power, temperature and the energy it has used, from NVIDIA's management library.

The library is part of the driver, and is called as it is: no package is needed. Where it is missing, or does not
answer, nothing is known, and nothing depends on it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_SM, _SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class GpuState:
    """One reading. `joules` counts from when the driver was loaded; None where the GPU has no such counter."""

    clock_mhz: float
    power_w: float
    temperature_c: float
    joules: float | None


class Gpu:
    """A handle of the library on one GPU."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> GpuState | None:
        clock = self._ask(ctypes.c_uint, "nvmlDeviceGetClockInfo", _SM)
        power = self._ask(ctypes.c_uint, "nvmlDeviceGetPowerUsage")
        heat = self._ask(ctypes.c_uint, "nvmlDeviceGetTemperature", _SENSOR)
        energy = self._ask(ctypes.c_ulonglong, "nvmlDeviceGetTotalEnergyConsumption")
        if clock is None or power is None or heat is None:
            return None
        return GpuState(float(clock), power / 1e3, float(heat), None if energy is None else energy / 1e3)

    def _ask(self, kind: Any, function: str, *arguments: int) -> int | None:
        value = kind()
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return None if failed else int(value.value)


def find(device: str) -> Gpu | None:
    """The GPU that `cuda` means in this process; None of a CPU, or where the library does not know it."""
    if device != "cuda":
        return None
    import torch

    try:
        library = ctypes.CDLL(LIBRARY)
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None
    return Gpu(library, handle)
