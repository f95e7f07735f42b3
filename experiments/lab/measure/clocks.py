"""Whether the machine kept its speed during a pass: a fixed piece of work, timed before it and after it.

What stays changed shows: a lower clock, a throttled container, a neighbour who keeps the core busy. What comes and
goes does not: the fastest of many short pieces counts, and one that is slower than it should be is waited for.

And what a GPU says of itself, from NVIDIA's management library, which is part of the driver. Where it is missing, or
does not answer, nothing depends on it.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

MAX_DRIFT = 0.05  # of a clock, during a pass
HOST_BESIDE_GPU = 0.25  # of the host's, where a GPU computes: what waits for the host is a small part of its time
PIECES = 10
HASHES = 40  # of a block: a millisecond or two
_BLOCK = bytes(32 * 1024)
PATIENCE_S = 1.0  # a busy neighbour is waited for so long
CLOSE = 1.02  # times the wanted time is close enough to stop waiting; beside a GPU what may be drift
CYCLES = 1_000_000  # of a GPU's clock: half a millisecond on an H200
WAITS = 8  # timed together
GPU_S = 0.1  # of waits: an idle GPU lowers its clock, and takes tens of milliseconds to raise it
LIBRARY = "libnvidia-ml.so.1"
_SM, _SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU


@dataclass(frozen=True)
class Drift:
    """Relative changes during a pass: 0.05 where the fixed work took 5 % longer, or 5 % less."""

    host: float = 0.0
    gpu: float | None = None  # None: none computes
    joules: float | None = None  # that the GPU used meanwhile, by its own counter; None where it has none

    @property
    def problem(self) -> str:
        """Why the pass does not count; empty where it does."""
        host = "host", self.host, MAX_DRIFT if self.gpu is None else HOST_BESIDE_GPU
        who, change, allowed = max(host, ("GPU", self.gpu or 0.0, MAX_DRIFT), key=lambda part: part[1] / part[2])
        if change <= allowed:
            return ""
        return f"the {who}'s speed changed by {100 * change:.3g} % during the pass ({100 * allowed:.0f} % are allowed)"


class Speed(NamedTuple):
    """Seconds of the fixed work on the host, and on the GPU where one is measured."""

    host_s: float
    gpu_s: float | None = None


class GpuState(NamedTuple):
    """One reading. `joules` counts from when the driver was loaded; None where the GPU has no such counter."""

    clock_mhz: float
    power_w: float
    temperature_c: float
    joules: float | None
    busy_others: int = 0  # GPUs of the machine that compute, and not for this process


class _Use(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent of the last second or less


class Gpu:
    """A handle of the library on one GPU, and those of the machine's GPUs that this process does not see."""

    def __init__(self, library: Any, handle: ctypes.c_void_p, others: Sequence[ctypes.c_void_p] = ()) -> None:
        self._library, self._handle, self._others = library, handle, others

    def read(self) -> GpuState | None:
        clock = self._ask(ctypes.c_uint, "nvmlDeviceGetClockInfo", _SM)
        power = self._ask(ctypes.c_uint, "nvmlDeviceGetPowerUsage")
        heat = self._ask(ctypes.c_uint, "nvmlDeviceGetTemperature", _SENSOR)
        energy = self._ask(ctypes.c_ulonglong, "nvmlDeviceGetTotalEnergyConsumption")
        if clock is None or power is None or heat is None:
            return None
        use, busy = _Use(), 0
        for other in self._others:
            busy += not self._library.nvmlDeviceGetUtilizationRates(other, ctypes.byref(use)) and use.gpu > 0
        return GpuState(float(clock), power / 1e3, float(heat), None if energy is None else energy / 1e3, busy)

    def _ask(self, kind: Any, function: str, *arguments: int) -> int | None:
        value = kind()
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return None if failed else int(value.value)


def find_gpu(device: str) -> Gpu | None:
    """The GPU that `cuda` means in this process; None of a CPU, or where the library does not know it."""
    if device != "cuda":
        return None
    found, count = dict[bytes, ctypes.c_void_p](), ctypes.c_uint()  # all GPUs of the machine, by UUID
    try:
        library = ctypes.CDLL(LIBRARY)
        seen = [f"GPU-{torch.cuda.get_device_properties(i).uuid}".encode() for i in range(torch.cuda.device_count())]
        if library.nvmlInit_v2() == 0:
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                library.nvmlDeviceGetUUID(handle, uuid, len(uuid))
                found[uuid.value] = handle
        own = found[seen[torch.cuda.current_device()]]
    except (OSError, AttributeError, KeyError, RuntimeError, AssertionError):  # the last two where CUDA does not start
        return None
    return Gpu(library, own, [other for uuid, other in found.items() if uuid not in seen])


class Watch:
    """Clocks of `device` (cpu or cuda) around passes, each of which should start at the best speed seen so far; and
    `states`, what the GPU said of itself at the end of each."""

    def __init__(self, device: str) -> None:
        self.states: list[GpuState] = []
        self._device, self._gpu = device, find_gpu(device)
        self._best: Speed | None = None
        self._state: GpuState | None = None  # at the start of a pass

    def before(self) -> Speed:
        speed = self._take(self._best)
        self._state = self._gpu.read() if self._gpu else None
        return speed

    def look(self) -> GpuState | None:
        """What the GPU says of itself now, at the end of a pass, which `states` keeps; None where there is none."""
        state = self._gpu.read() if self._gpu else None
        if state is not None:
            self.states.append(state)
        return state

    def after(self, before: Speed) -> Drift:
        first, last, joules = self._state, self.look(), None
        if first is not None and last is not None and first.joules is not None and last.joules is not None:
            joules = last.joules - first.joules
        now = self._take(before)
        gpu = abs(now.gpu_s / before.gpu_s - 1) if before.gpu_s and now.gpu_s else None
        return Drift(abs(now.host_s / before.host_s - 1), gpu, joules)

    def summary(self) -> dict[str, float]:
        """Of `states`, by the names that ProcessInfo has for them: medians, and the most others that were busy."""
        if not self.states:
            return {}
        names = ("clock_mhz", "power_w", "temperature_c")
        medians = {name: statistics.median(getattr(state, name) for state in self.states) for name in names}
        return {**medians, "busy_others": max(state.busy_others for state in self.states)}

    def _take(self, wanted: Speed | None) -> Speed:
        found = take(self._device, wanted)
        known = [speed for speed in (self._best, found) if speed]
        gpu_s = min((speed.gpu_s for speed in known if speed.gpu_s is not None), default=None)
        self._best = Speed(min(speed.host_s for speed in known), gpu_s)
        return found


def take(device: str, wanted: Speed | None = None) -> Speed:
    """Times the fixed work on `device` (cpu or cuda), and waits up to PATIENCE_S for the speed `wanted`."""
    close = 1 + HOST_BESIDE_GPU if device == "cuda" else CLOSE
    host_s, gpu_s = wanted or (0.0, None)
    found_s = _patiently(_host_work, close * host_s)
    return Speed(found_s, _patiently(_gpu_work, CLOSE * (gpu_s or 0.0)) if device == "cuda" else None)


def _patiently(work: Callable[[], float], wanted_s: float) -> float:
    """0 seconds are wanted where nobody knows how quick it can be."""
    found, started = work(), time.perf_counter()
    while wanted_s and found > wanted_s and time.perf_counter() - started < PATIENCE_S:
        found = min(found, work())
    return found


def _host_work() -> float:
    """The fastest of some equal pieces. Hashing keeps to registers and the first-level cache; where the objects of an
    interpreter's loop happen to lie changes its time by 20 %, and serving requests moves them."""
    return min(timeit.repeat(lambda: hashlib.sha256(_BLOCK).digest(), repeat=PIECES, number=HASHES))


def _gpu_work() -> float:
    """The fastest of many waits for so many cycles, timed by the device itself. Matrix products would take all the
    power that a GPU may have, which lowers its clock, and by how much depends on the pass before them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WAITS + 1)]
    fastest, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < GPU_S:
        events[0].record()
        for event in events[1:]:
            torch.cuda._sleep(CYCLES)
            event.record()
        torch.cuda.synchronize()
        fastest = min(fastest, *(before.elapsed_time(after) / 1e3 for before, after in pairwise(events)))
    return fastest
