"""Where a model lies and what its files hold: folders, hub names, config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mini_infer.assets import shipped_path
from mini_infer.core.errors import ModelError
from mini_infer.modeling.model import CheckpointTensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMED = 50  # of missing tensors
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def resolve_folder(path: str, *, weights: bool = True) -> Path:
    """The folder of a shipped model, of a path, or of a hub name, which is downloaded unless it is in the hub's cache.

    weights: a hub's safetensors are wanted too, not just config and tokenizer. Raises ModelError.
    """
    shipped = shipped_path(path)
    if shipped is not None:
        if not (shipped / "config.json").is_file():
            raise ModelError(f"the shipped model {path} is not there; make it with python -m mini_infer.assets.train")
        return shipped
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists():
        raise ModelError(f"model.path={path}: there is no such folder")
    from huggingface_hub import snapshot_download

    # model*.safetensors: some repositories hold the weights a second time, under another name.
    patterns = [*_SMALL_FILES, "model*.safetensors"] if weights else list(_SMALL_FILES)
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors, its HTTP client's, and the file system's
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"model.path={path}: no folder of that name here, and the hub does not give it either "
            f"({type(error).__name__}: {reason}). Give a folder with config.json and safetensors, a hub name that "
            "can be reached or is in its cache, or tiny-target"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Raises ModelError where the file is missing or is not a JSON object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    return values


def safetensors_files(folder: Path) -> list[Path]:
    """The shards that the index names, or the single file. Raises ModelError where one is missing."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _INDEX} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / _SINGLE]
    for file in files:
        if not file.is_file():
            hint = "; convert pytorch_model.bin to safetensors" if list(folder.glob("*.bin")) else ""
            raise ModelError(
                f"{folder} has no {file.name}{hint}. Without weights, model.load_format=dummy runs the shape"
            )
    return files


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
