"""What a variant needs to be worth measuring: `needs` of it in YAML. Where that is not there, it is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from mini_infer.core.config import ModelConfig, Quantization
from mini_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from experiments.lab.workloads import Workload


class Need(str, Enum):
    cpu = "cpu"  # no GPU
    gpu = "gpu"
    fp8 = "fp8"  # a GPU that computes in it
    shared = "shared"  # prompts that begin alike
    unquantized = "unquantized"  # weights that are ours to quantize


def named(variant: str, changes: Mapping[str, Any] | None) -> list[Need]:
    """Of a variant, by its settings in YAML. Raises ConfigError."""
    asked = (changes or {}).get("needs") or []
    known = ", ".join(need.value for need in Need)
    if not isinstance(asked, (list, tuple)) or not all(str(need) in Need.__members__ for need in asked):
        got = list(asked) if isinstance(asked, tuple) else asked
        raise ConfigError(f"experiment.variants.{variant}.needs must be a list of {known}; got {got!r}")
    return [Need(need) for need in asked]


def lacking(asked: Iterable[Need], device: str, loads: Iterable[Workload], model: Callable[[], ModelConfig]) -> str:
    """Why it is left out; empty where all is there. `device` is what a model is computed on, cpu or cuda; `loads` is
    the workload at each point. Raises ModelError where a model that is asked for cannot be read."""
    every = list(loads)
    for need in asked:
        if need is Need.cpu and device == "cuda":
            return "a setting for CPUs, and this is a GPU"
        if need in (Need.gpu, Need.fp8) and device != "cuda":
            return "a setting for GPUs, and this is a CPU"
        if need is Need.fp8 and not _computes_fp8():
            return "this GPU does not compute in fp8"
        if need is Need.shared and not any(load.shares for load in every):
            kinds = dict.fromkeys(load.kind for load in every)
            return f"no two prompts of workload={', '.join(kinds)} begin alike"
        if need is Need.unquantized and not _can_be_quantized(model()):
            return "these weights are quantized already, or computed with by transformers' code"
    return ""


def _can_be_quantized(model: ModelConfig) -> bool:
    """Of a model that is not here nobody knows: it is taken to be."""
    from mini_infer.modeling.loader import load_spec
    from mini_infer.modeling.model_files import local_folder

    if model.quantization is not Quantization.none:
        return False
    if model.hf_config is None and local_folder(model.path) is None:
        return True
    spec = load_spec(model)
    return spec.quantization is None and not spec.through_transformers


def _computes_fp8() -> bool:
    """Of a GPU that is not here, as a simulated one is not, nobody knows: it is taken to."""
    import torch

    from mini_infer.kernels.limits import FP8_GPUS

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FP8_GPUS
