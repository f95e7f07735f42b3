"""What two engines must have alike. Ranks of different code, settings or models would compute different things,
or wait for each other without end; KV in files is what one code made of one model, in one layout and numerics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

import mini_infer
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime.worker.served_model import ServedModel


def require_same(parallel: ParallelContext, config: EngineConfig, model: ServedModel) -> None:
    """Raises ConfigError, naming a rank that has something else than rank 0, and what."""
    mine = {"code": _code(), "settings": json.dumps(config.to_dict(), default=str), "model": _model(model)}
    every = parallel.exchange([_number(text) for text in mine.values()])
    for rank, theirs in enumerate(every):
        for what, number, first in zip(mine, theirs, every[0], strict=True):
            if number != first:
                raise ConfigError(
                    f"rank {rank} has other {what} than rank 0: ranks run the same package ({_ROOT}), with the same "
                    "settings and model files. Start the engine again when nobody changes them"
                )


def kv_identity(config: EngineConfig, models: Sequence[ServedModel], rank: int) -> str:
    """All that the bytes of a rank's part of a block depend on, beside its tokens."""
    settings, ranks = config.to_dict(), (config.parallel.asked, rank)
    about = [settings[section] for section in ("model", "attention", "numerics")]
    of_models = [
        (_model(model), model.kv_layout, _kind(model.device), *map(str, model.backends), model.kv_dtype)
        for model in models
    ]
    return repr((about, ranks, config.cache.block_size, of_models, _number(_code()), torch.__version__))


def _kind(device: torch.device) -> str:
    """Another GPU may sum in another order."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_ROOT = Path(mini_infer.__file__).parent


@cache
def _code() -> str:
    return "".join(f"{file.relative_to(_ROOT)}\n{file.read_text()}" for file in sorted(_ROOT.rglob("*.py")))


def _model(model: ServedModel) -> str:
    """What is known of it without its weights, and of their files."""
    files = [(file.name, file.stat()) for file in sorted(Path(model.config.path).glob("*.safetensors"))]
    return repr((model.spec.whole, model.dtype, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]))


def _number(text: str) -> int:
    """Of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
