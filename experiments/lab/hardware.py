"""The machine that a number belongs to: a short key for folders, and the facts for the report."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from mini_infer.core.config import Device


def resolve(device: Device) -> str:
    """`cpu` or `cuda`, as the engine chooses."""
    if device is not Device.auto:
        return device.value
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def key(device: str) -> str:
    """`cpu`, or the GPU's short name: `NVIDIA H200` -> h200, `NVIDIA GeForce RTX 4090` -> rtx4090."""
    if device == "cpu":
        return "cpu"
    import torch

    return short_gpu_name(torch.cuda.get_device_name())


def short_gpu_name(name: str) -> str:
    words = [w for w in re.split(r"[\s/_-]+", name.lower()) if w not in ("nvidia", "amd", "geforce", "tesla", "gpu")]
    kept = [w for w in words if not re.fullmatch(r"\d+gb|hbm\d*e?|pcie|sxm\d*|nvl", w)]
    return re.sub(r"[^a-z0-9]", "", "".join(kept)) or "gpu"


def facts(device: str) -> dict[str, Any]:
    """CPU model, cores, threads and memory; with a GPU its name, memory, driver and CUDA version too."""
    import torch

    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "torch_threads": torch.get_num_threads(),
        "ram_gib": _ram_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpus"] = torch.cuda.device_count()
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["cuda"] = torch.version.cuda
        found["driver"] = _driver()
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _cores() -> int:
    """Cores this process may use, which in a container is not what the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ram_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None
