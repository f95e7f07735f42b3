"""The machine that a number belongs to: a short key for folders, the facts for the report, and its ceilings."""

from __future__ import annotations

import gc
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from mini_infer.core.config import Device
from mini_infer.core.cores import usable_cores
from mini_infer.core.errors import ConfigError

EIGHT_BITS = ("float8_e4m3", "int8")


@dataclass(frozen=True)
class Ceilings:
    """The most that a machine was seen to do. 1 GB is 1e9 bytes, 1 TFLOP is 1e12 operations."""

    copy_gb_s: float  # a copy larger than all caches; bytes read plus bytes written
    read_gb_s: float  # reading, and nothing else, something larger than all caches
    # Number format -> rate of large square matrix products; a multiplication and an addition are two.
    matmul_tflop_s: dict[str, float]
    # MiB -> rate of reading so much again and again; sizes that caches make faster than read_gb_s, and the first that
    # they do not.
    cached_read_gb_s: dict[int, float] = field(default_factory=dict)
    # As matmul_tflop_s, for seconds on end, which a GPU's power limits.
    sustained_tflop_s: dict[str, float] = field(default_factory=dict)
    # Of a GPU: from_host, to_host (pinned memory) and to_peer, where there was another GPU.
    link_gb_s: dict[str, float] = field(default_factory=dict)
    threads: int | None = None  # of torch, on a CPU; None on a GPU

    def __post_init__(self) -> None:
        tables = (self.matmul_tflop_s, self.sustained_tflop_s, self.cached_read_gb_s, self.link_gb_s)
        rates = [self.copy_gb_s, self.read_gb_s, *(rate for table in tables for rate in table.values())]
        if not self.matmul_tflop_s or not all(rate > 0 for rate in rates):
            raise ConfigError("hardware.ceilings: every rate must be above 0, and matmul_tflop_s needs one at least")

    def of(self, devices: int) -> Ceilings:
        """Of so many, each with a part of the work."""
        rates = {dtype: devices * rate for dtype, rate in self.matmul_tflop_s.items()}
        copy, read = devices * self.copy_gb_s, devices * self.read_gb_s
        return replace(self, copy_gb_s=copy, read_gb_s=read, matmul_tflop_s=rates)

    def tflop_s_of(self, dtype: str) -> float:
        """Those of 8 bits count at the fastest rate of theirs, since libraries' int8 is far behind fp8 and what
        tensor cores do; one of 16 or 32 bits that was not measured at the fastest of those."""
        rates = self.matmul_tflop_s
        alike = [rate for name, rate in rates.items() if (name in EIGHT_BITS) == (dtype in EIGHT_BITS)]
        return max(alike or rates.values()) if dtype in EIGHT_BITS or dtype not in rates else rates[dtype]


@dataclass(frozen=True)
class Machine:
    """Whose ceilings these are, and how they were found."""

    machine: str = ""  # as `facts` names the CPU or GPU; empty where no file was chosen
    measured: str = ""  # date
    how: str = ""
    ceilings: tuple[Ceilings, ...] = ()  # on a CPU one for each number of threads
    memory_gib: float | None = None  # of the device, for models and KV
    host_memory_gib: float | None = None  # beside one device; a simulated engine's host has all of it free


@dataclass(frozen=True)
class Hardware(Machine):
    """A file of conf/hardware/. Its first machine is the one that `hardware=` names, which can be simulated elsewhere;
    the others have the same key, as all CPUs have."""

    device: Device | None = None  # where it measures; default: what the scale says
    others: tuple[Machine, ...] = ()

    @property
    def machines(self) -> tuple[Machine, ...]:
        return (self, *self.others)


def _torch() -> Any:
    """Its import takes seconds, which who only reads settings is spared."""
    import torch

    return torch


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Runs with so many threads of torch; None leaves them alone."""
    before = _torch().get_num_threads()
    _torch().set_num_threads(count or before)
    try:
        yield
    finally:
        _torch().set_num_threads(before)


def resolve(device: Device) -> str:
    """`cpu` or `cuda`, as the engine chooses."""
    if device is not Device.auto:
        return device.value
    return "cuda" if _torch().cuda.is_available() else "cpu"


def give_back() -> None:
    """What engines that have ended left in this process's allocator, which whoever comes next on the GPU needs."""
    gc.collect()
    _torch().cuda.empty_cache()


def key(device: str) -> str:
    """`device_key`, and how many GPUs there are, if several: h200, h200x2."""
    count = 1 if device == "cpu" else _torch().cuda.device_count()
    return device_key(device) + (f"x{count}" if count > 1 else "")


def device_key(device: str) -> str:
    """`cpu`, or the GPU's short name. Raises ConfigError where there is none."""
    if device == "cpu":
        return "cpu"
    if not _torch().cuda.is_available():
        raise ConfigError("a GPU is asked for (model.device=cuda, or hardware=...), and torch sees none here")
    return short_gpu_name(_torch().cuda.get_device_name())


def short_gpu_name(name: str) -> str:
    """`NVIDIA H200` -> h200, `NVIDIA GeForce RTX 4090` -> rtx4090."""
    words = [w for w in re.split(r"[\s/_-]+", name.lower()) if w not in ("nvidia", "amd", "geforce", "tesla", "gpu")]
    kept = [w for w in words if not re.fullmatch(r"\d+gb|hbm\d*e?|pcie|sxm\d*|nvl", w)]
    return re.sub(r"[^a-z0-9]", "", "".join(kept)) or "gpu"


def name(device: str) -> str:
    """The CPU's or GPU's full name, which two machines of the same key may differ in."""
    if device == "cpu":
        path = Path("/proc/cpuinfo")
        known = cpu_name(path.read_text()) if path.is_file() else ""
        return known or platform.processor() or platform.machine() or "unknown"
    return str(_torch().cuda.get_device_name())


def facts(device: str) -> dict[str, Any]:
    """CPU model, cores, threads and memory; with a GPU its name, memory, driver and CUDA version too."""
    torch = _torch()
    found: dict[str, Any] = {
        "cpu": name("cpu"),
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "ram_gib": host_memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        found |= {"gpu": name("cuda"), "gpus": torch.cuda.device_count(), "gpu_memory_gib": gpu_memory_gib()}
        found |= {"cuda": torch.version.cuda, "driver": _driver()}
    return found


def host_memory_gib() -> float:
    return round(psutil.virtual_memory().total / 2**30, 1)


def gpu_memory_gib() -> float:
    return round(_torch().cuda.get_device_properties(0).total_memory / 2**30, 1)


def cpu_name(cpuinfo: str) -> str:
    """The model in a /proc/cpuinfo; where that hides it, `AMD EPYC (family 25, model 17)`."""
    first: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        label, _, value = line.partition(":")
        first.setdefault(label.strip(), value.strip())
    found = next((first[label] for label in ("model name", "Model", "Hardware") if first.get(label)), "")
    if found and not re.search(r"\d", found) and "cpu family" in first and "model" in first:
        found += f" (family {first['cpu family']}, model {first['model']})"
    return found


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].strip() if found else None
