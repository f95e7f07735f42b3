"""The tensors of a checkpoint's files, and loading them to their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mini_infer.core.errors import ModelError
from mini_infer.modeling.model import CheckpointTensor
from mini_infer.modeling.model_files import safetensors_files

_NAMED = 50  # of missing tensors


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """The dtype that the folder's first floating tensor has. Raises ModelError."""
    for _, _, read in _tensors(safetensors_files(folder)[0]):
        if (dtype := read().dtype).is_floating_point and dtype.itemsize > 1:
            return dtype
    raise ModelError(f"{folder} holds no floating-point weights")


def fill_from(
    files: list[Path],
    wanted: Mapping[str, CheckpointTensor],
    ignored: tuple[str, ...],
    form: str = "",
    ignored_modules: tuple[str, ...] = (),
) -> None:
    """Loads every tensor of the files to its place in `wanted`, by name.

    Names that end in one of `ignored`, or begin with one of `ignored_modules`, are skipped; `form` is said beside what
    is not expected. Raises ModelError where a tensor is unknown, mis-shaped or of another dtype than it may be, where
    one of `wanted` is in no file, and where a file is not safetensors.
    """
    missing = {name: target for name, target in wanted.items() if target.required}
    for file in files:
        for name, shape, read in _tensors(file):
            if name.endswith(ignored) or name.startswith(ignored_modules):
                continue
            if name not in wanted:
                raise ModelError(f"{file} holds {name} {shape}, which this architecture does not have{form}")
            target = wanted[name]
            if shape not in (target.shape, *target.other_shapes):
                raise ModelError(f"{name} in {file} has shape {shape}; the config asks for {target.shape}")
            tensor = read(target.reads.get(shape))
            if tensor.dtype not in target.dtypes:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in target.dtypes)
                raise ModelError(f"{name} in {file} is {tensor.dtype}; supported are {known}")
            target.load(tensor)
            missing.pop(name, None)
    if missing:
        first = [f"{name}, expected with shape {target.shape}," for name, target in missing.items()][:_NAMED]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        is_missing = "is missing" if len(missing) == 1 else "are missing"
        names = ", ".join(str(file) for file in files)
        raise ModelError(f"{' '.join(first)}{more} {is_missing} from {names}")


def _read(tensors: Any, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
    return tensors.get_tensor(name) if part is None else tensors.get_slice(name)[part]


def _tensors(file: Path) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """(name, shape, function that reads it, or a part of it) of each tensor in a file."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                yield name, tuple(tensors.get_slice(name).get_shape()), partial(_read, tensors, name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file}: {error}. The file may be cut short: fetch or copy it again") from error
