"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors. Without torch, so that
what cannot be served is said at once."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_infer.core.errors import ModelError
from mini_infer.modeling.model_files import read_json, require_whole

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "Merge it into the model (peft's merge_and_unload) and serve that"
# Settings that make something else of an adapter than y += scaling B A x, and what else.
_UNSUPPORTED = {
    "use_dora": "magnitudes of DoRA",
    "modules_to_save": "modules that were trained whole",
    "lora_bias": "biases of B",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "layers that are there several times",
    "rank_pattern": "several ranks",
    "alpha_pattern": "several alphas",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters that are no product's own",
    "use_qalora": "pooled inputs",
    "alora_invocation_tokens": "a place in the prompt where it begins",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations that take what they begin with from the weights


@dataclass(frozen=True)
class PeftFolder:
    """
    Attributes:
        key: a hash of its files. Folders of equal contents are one adapter, under whatever names.
        scaling: of B A, lora_alpha / r, or lora_alpha / sqrt(r) (rslora, arXiv:2312.03732).
    """

    path: Path
    key: str
    rank: int
    scaling: float
    stamp: tuple[int, ...]  # of the weights' file when it was read

    @property
    def weights(self) -> Path:
        return self.path / _WEIGHTS

    @classmethod
    def read(cls, path: str, max_rank: int) -> PeftFolder:
        """Raises ModelError where it is not whole, or no adapter that can be served."""
        try:
            return cls._read(path, max_rank)
        except (OSError, RuntimeError) as error:  # no such user's home, a name too long, nothing that we may look at
            raise ModelError(f"adapter {path} cannot be read: {error}") from error

    @classmethod
    def _read(cls, path: str, max_rank: int) -> PeftFolder:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            beside = [str(other) for other in folder.parent.iterdir()] if folder.parent.is_dir() else []
            close = difflib.get_close_matches(str(folder), beside, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ". Give a folder that peft's save_pretrained has written"
            raise ModelError(f"adapter {path}: there is no such folder{hint}")
        config = read_json(folder / _CONFIG)
        _require_plain(path, config)
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
            raise ModelError(f"{folder / _CONFIG} has no r above 0, or no lora_alpha: r={rank!r}, lora_alpha={alpha!r}")
        if rank > max_rank:
            raise ModelError(f"adapter {path} has rank {rank}, and lora.max_rank={max_rank}: raise that to {rank}")
        weights = folder / _WEIGHTS
        if not weights.is_file():
            hint = "; convert adapter_model.bin to safetensors" if list(folder.glob("*.bin")) else ""
            raise ModelError(f"adapter {path} has no {_WEIGHTS}{hint}")
        require_whole(weights)
        stamp = _stamp(weights)
        key = hashlib.sha256((folder / _CONFIG).read_bytes())
        with weights.open("rb") as opened:
            while block := opened.read(2**24):
                key.update(block)
        scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        return cls(folder, key.hexdigest()[:32], rank, scaling, stamp)

    def require_unchanged(self) -> None:
        """Raises ModelError where what has been read since may be another's than the key."""
        if _stamp(self.weights) != self.stamp:
            raise self.changed(self.path)

    @staticmethod
    def changed(path: str | Path) -> ModelError:
        return ModelError(f"adapter {path} has changed while it was read: load it again once it is written")


def _stamp(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _require_plain(path: str, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(f"adapter {path} is {config.get('peft_type')!r}: only peft_type LORA can be served. {_MERGE}")
    found = [f"{what} ({name})" for name, what in _UNSUPPORTED.items() if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"biases (bias={config['bias']!r})")
    begun = str(config.get("init_lora_weights"))
    if begun.startswith(_CHANGES_BASE):
        found.append(f"a base that its training has changed (init_lora_weights={begun!r})")
    if found:
        raise ModelError(f"adapter {path} has {', '.join(found)}, which cannot be served beside others. {_MERGE}")
