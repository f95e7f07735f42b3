"""A model folder -> a quantized one. What is done of it survives an interruption, and is never taken for the whole.

OUT.unfinished/  quantization_recipe.json          what is being made, of what; stays
                 model-00001-of-00007.safetensors  a file a layer, and one for all else; each written whole
                 3.hidden.safetensors              hidden states in front of layer 3, when 0 to 2 are done
                 config.json, ...                  in the end; then the folder is renamed to OUT
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_infer.calibration.compressed import layer_tensors, quantization_config, require_library
from mini_infer.calibration.layerwise import RoundedLayer, quantized_layers
from mini_infer.calibration.recipe import Recipe
from mini_infer.calibration.streamed import StreamedDecoder
from mini_infer.calibration.text import calibration_ids
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.model_files import read_json, resolve_folder

UNFINISHED = ".unfinished"
RECIPE, HIDDEN = "quantization_recipe.json", "hidden.safetensors"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer, chat template, generation settings, licence

Done = Callable[[int, int], None]  # layers done, of so many


def quantize_folder(
    model: str,
    out: Path,
    recipe: Recipe,
    texts: Callable[[], Sequence[str]],
    device: torch.device,
    done: Done = lambda count, total: None,
) -> Path:
    """Writes `out`, a folder that is not there yet; goes on where it was interrupted.

    Args:
        model: a folder, a hub name or a shipped model.
        texts: calibration text, asked for where the recipe needs some.

    Raises:
        ConfigError: `out` exists, or was begun with another recipe, model or text; the text is too short.
        ModelError: the model cannot be quantized.
    """
    require_library()
    if out.exists():
        raise ConfigError(f"{out} exists already: give another folder, or remove it")
    folder = resolve_folder(model)
    decoder = StreamedDecoder(folder, device)
    ids = _ids(folder, recipe, texts) if recipe.needs_text else None
    work = out.with_name(out.name + UNFINISHED)
    total = len(decoder.layers)
    _begin(work, _told(folder, recipe, ids))
    start, hidden = _resumed(work, total, recipe)
    done(start, total)
    for index, (layer, after) in enumerate(quantized_layers(decoder, recipe, ids, start, hidden), start):
        # The hidden states first: with them and without the layer, the layer is made again from those before it.
        if after is not None:
            _save({"hidden": after.cpu()}, work / f"{index + 1}.{HIDDEN}")
        _save(layer_tensors(layer, recipe, decoder.dtype), work / _shard(index, total))
        (work / f"{index}.{HIDDEN}").unlink(missing_ok=True)
        done(index + 1, total)
    _finish(work, folder, recipe, decoder, total)
    os.replace(work, out)
    return out


def write_layers(folder: Path, out: Path, recipe: Recipe, layers: Iterable[RoundedLayer]) -> None:
    """Writes `out`, which is not there yet, as `quantize_folder` does, of all layers of `folder` quantized already."""
    decoder = StreamedDecoder(folder, torch.device("cpu"))
    total = len(decoder.layers)
    out.mkdir()
    for index, layer in enumerate(layers):
        _save(layer_tensors(layer, recipe, decoder.dtype), out / _shard(index, total))
    _finish(out, folder, recipe, decoder, total)


def _ids(folder: Path, recipe: Recipe, texts: Callable[[], Sequence[str]]) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return calibration_ids(texts(), tokenizer, recipe.samples, recipe.length, recipe.seed)


def _told(folder: Path, recipe: Recipe, ids: Tensor | None) -> dict[str, Any]:
    digest = None if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return {"model": str(folder.resolve()), "text": digest, **recipe.as_dict()}


def _begin(work: Path, told: dict[str, Any]) -> None:
    """Raises ConfigError where `work` holds something else that was begun."""
    if work.exists():
        before = read_json(work / RECIPE) if (work / RECIPE).is_file() else {}
        differs = [key for key, value in told.items() if before.get(key) != value]
        if differs:
            key = differs[0]
            raise ConfigError(
                f"{work} was begun with {key}={before.get(key)}, and now {key} is {told[key]}: remove that folder to "
                "begin anew, or ask for the same to go on"
            )
        return
    work.mkdir(parents=True)
    _write(work / RECIPE, told)


def _resumed(work: Path, total: int, recipe: Recipe) -> tuple[int, Tensor | None]:
    """The first layer that is not done, and the hidden states in front of it. Where those are gone, the last layer
    before it that has some, or else the first of all."""
    start = next((index for index in range(total) if not (work / _shard(index, total)).is_file()), total)
    if start == total or not recipe.needs_text:
        return start, None
    while start and not (work / f"{start}.{HIDDEN}").is_file():
        start -= 1
    return start, load_file(work / f"{start}.{HIDDEN}")["hidden"] if start else None


def _finish(work: Path, folder: Path, recipe: Recipe, decoder: StreamedDecoder, total: int) -> None:
    _save({name: decoder.tensor(name) for name in decoder.other_names()}, work / _shard(total, total))
    index: dict[str, str] = {}
    for number in range(total + 1):
        with safe_open(work / _shard(number, total), framework="pt") as tensors:
            index |= dict.fromkeys(tensors.keys(), _shard(number, total))
    size = sum((work / _shard(number, total)).stat().st_size for number in range(total + 1))
    _write(work / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})
    for pattern in COPIED:
        for file in folder.glob(pattern):
            if file.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copyfile(file, work / file.name)
    kept = [name for name in decoder.linear_names() if f"{name}.weight_scale" not in index]
    config = read_json(folder / "config.json")
    config["quantization_config"] = quantization_config(recipe, kept)
    (work / f"{total}.{HIDDEN}").unlink(missing_ok=True)
    _write(work / "config.json", config)


def _shard(index: int, total: int) -> str:
    return f"model-{index + 1:05d}-of-{total + 1:05d}.safetensors"


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Whole or not at all."""
    beside = file.with_name(file.name + ".tmp")
    save_file(tensors, beside, metadata={"format": "pt"})
    os.replace(beside, file)


def _write(file: Path, values: dict[str, Any]) -> None:
    beside = file.with_name(file.name + ".tmp")
    beside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, file)
