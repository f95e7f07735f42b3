"""What two engines must have alike. Ranks of different code, settings or models would compute different things,
or wait for each other without end; KV that another engine has computed, or that lies in files, is what one code made of
one model, in one layout and numerics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import mini_infer
from mini_infer.core.config import EngineConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.model_files import safetensors_files
from mini_infer.parallel.context import ParallelContext

if TYPE_CHECKING:  # the dry model needs no model code
    from mini_infer.runtime.worker.served_model import ServedModel

_SAMPLE = 4096  # bytes of a tensor, at each of three places


def require_same(parallel: ParallelContext, config: EngineConfig, model: ServedModel) -> None:
    """Raises ConfigError, naming a rank that has something else than rank 0, and what."""
    settings, of_model = json.dumps(config.to_dict(), default=str), repr(_model(model))
    mine = {"code": _code(), "settings": settings, "model": of_model}
    every = parallel.exchange([_number(text) for text in mine.values()])
    for rank, theirs in enumerate(every):
        for what, number, first in zip(mine, theirs, every[0], strict=True):
            if number != first:
                raise ConfigError(
                    f"rank {rank} has other {what} than rank 0: ranks run the same package ({_ROOT}), with the same "
                    "settings and model files. Start the engine again when nobody changes them"
                )


def kv_origin(config: EngineConfig, model: ServedModel | None) -> dict[str, str]:
    """What a prompt's KV depends on beside its tokens, by its name, whatever ranks compute it: where another engine has
    all of it alike, its KV is as good as one's own. `model`: None of a dry one."""
    return {
        **(_model(model) if model is not None else {"the model": repr(config.model.dry)}),
        "cache.block_size": str(config.cache.block_size),
        "numerics": config.numerics.value,
        "the version": f"mini-infer {_code()} with torch {torch.__version__}",
    }


def kv_identity(config: EngineConfig, models: Sequence[ServedModel], rank: int) -> str:
    """All that the bytes of a rank's part of a block depend on, beside its tokens."""
    of_models = [
        (kv_origin(config, model), model.kv_layout, _kind(model.device), *map(str, model.backends)) for model in models
    ]
    return repr((of_models, config.to_dict()["attention"], config.model.kernels, config.parallel.asked, rank))


def _kind(device: torch.device) -> str:
    """Another GPU may sum in another order."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_ROOT = Path(mini_infer.__file__).parent


@cache
def _code() -> str:
    texts = (f"{file.relative_to(_ROOT)}\n{file.read_text()}" for file in sorted(_ROOT.rglob("*.py")))
    return _short("".join(texts))


def _model(model: ServedModel) -> dict[str, str]:
    """What is known of it without its weights, and of their files. Where these lie is no matter, nor when they came."""
    whole, own, scheme = model.whole, model.config, model.whole.quantization
    shape = replace(whole, quantization=None, fp8_kv=False)
    kept = (f"{len(layers)} layers of {planes}" for layers, planes in whole.kv_layout(model.dtype).groups())
    return {
        "the model": f"{whole.architecture} of {whole.num_layers} layers ({_short(repr(shape))})",
        "its weights": _weights(own, model.device),
        "model.quantization": "none" if scheme is None else f"{scheme.describe()} ({_short(repr(scheme))})",
        "model.dtype": str(model.dtype),
        "model.implementation": own.implementation.value,
        "what a token keeps": ", ".join(kept),
    }


def _weights(model: ModelConfig, device: torch.device) -> str:
    if model.load_format is not LoadFormat.auto:
        return f"random, of seed {model.seed}, made on {_kind(device)}"
    stats = [(file, file.stat()) for file in safetensors_files(Path(model.path))]
    files = [(file.name, stat.st_size, _sampled(file, stat.st_size, stat.st_mtime_ns)) for file, stat in stats]
    return f"{sum(size for _, size, _ in files):,} bytes ({_short(repr(files))})"


@cache
def _sampled(file: Path, size: int, changed: int) -> str:
    """A hash of a file's header, and of the first, middle and last bytes of each tensor: weights of one shape that
    differ in none of these pass for the same."""
    with file.open("rb", buffering=0) as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
        digest, start = hashlib.sha256(header), opened.tell()
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                last = max(first, end - _SAMPLE)
                for place in (first, (first + last) // 2, last):
                    opened.seek(start + place)
                    digest.update(opened.read(min(_SAMPLE, end - place)))
    return digest.hexdigest()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _number(text: str) -> int:
    """Of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
