"""What cannot work is said at once: settings that need a GPU where there is none, a length beyond the model's, files
that are missing, cut short or were never fetched. Without torch and transformers, which take seconds to import; what
takes them to be known is said by the engine when it starts."""

from __future__ import annotations

import importlib.util
import os
from enum import Enum
from pathlib import Path
from typing import Any

from mini_infer.core.config import NO_NIXL, AttentionChoice, Connector, Device, EngineConfig, Launcher, LoadFormat
from mini_infer.core.errors import ConfigError
from mini_infer.core.limits import require_length
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.model_files import local_folder, read_json, require_on_hub, safetensors_files
from mini_infer.modeling.peft_folder import PeftFolder
from mini_infer.runtime.text.tokenizer import VOCABULARY_FILES

ON_GPUS = ("cuda", "always", "flash_attn")  # values of settings
OURS = ("triton", "batch_invariant")  # kernels that Triton's interpreter runs, too, for tests, and slowly
STRETCHED = ("rope_scaling", "rope_parameters")  # of config.json: positions that reach further than they say


def check(config: EngineConfig) -> tuple[str, ...]:
    """What the model will not do for want of files, a sentence each. Raises ConfigError or ModelError where an engine
    with these settings cannot start on this machine."""
    # Ray may start the engine on another machine, with devices of its own.
    if config.model.load_format is not LoadFormat.dry and config.parallel.launcher is not Launcher.ray:
        require_device(config)
    if config.parallel.connector is Connector.nixl and importlib.util.find_spec("nixl") is None:
        raise ConfigError(NO_NIXL)
    said = check_model(config.model)
    for path in config.lora.adapters.values():
        PeftFolder.read(path, config.lora.max_rank)
    if config.speculation.has_draft_model:
        check_model(config.speculation.draft.model(config.model))
    return said


def check_model(config: ModelConfig) -> tuple[str, ...]:
    """The same of a model alone. Raises ConfigError or ModelError."""
    if config.load_format is LoadFormat.dry:
        return ()
    folder = None if config.hf_config is not None else local_folder(config.path)
    if folder is None and config.hf_config is None:
        require_on_hub(config.path)
        return ()
    values = config.hf_config if folder is None else read_json(folder / "config.json")
    limit = (values or {}).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_model_len is not None and not _is_stretched(values or {}):
        require_length(config.max_model_len, limit)
    if folder is None:
        return ()
    if config.load_format is LoadFormat.auto:
        safetensors_files(folder)
    return _without(folder if config.tokenizer is None else local_folder(config.tokenizer))


def _is_stretched(values: dict[str, Any]) -> bool:
    scaling: dict[str, Any] = next((values[name] for name in STRETCHED if values.get(name)), {})
    return scaling.get("rope_type", scaling.get("type", "default")) != "default"


def _without(folder: Path | None) -> tuple[str, ...]:
    """None: the tokenizer is the hub's."""
    if folder is None:
        return ()
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
        return (
            f"{folder} has no tokenizer: prompts must be token ids, and answers have no text. model.tokenizer names a "
            "folder or a hub name that has one",
        )
    settings = folder / "tokenizer_config.json"
    if any(folder.glob("*chat_template*")) or (settings.is_file() and "chat_template" in read_json(settings)):
        return ()
    return (f"{folder} has no chat template: it completes texts, and takes no conversations",)


def sees_gpu() -> bool:
    """Whether this process can have an NVIDIA GPU: one of its devices is here, and it is not told to see none."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # the second is WSL's
    return here and told not in ("", "-1")


def require_device(config: EngineConfig) -> None:
    """Raises ConfigError for what is set and needs a GPU, or a package of one, that is not here."""
    attention, model = config.attention, config.model
    choices: dict[str, Enum] = {
        "model.device": model.device,
        "graphs.capture": config.graphs.capture,
        "attention.prefill": attention.prefill,
        "attention.decode": attention.decode,
        "model.kernels": model.kernels,
        "numerics": config.numerics,
    }
    for name, choice in choices.items():
        if choice is AttentionChoice.flash_attn and importlib.util.find_spec("flash_attn") is None:
            raise ConfigError(f"{name}=flash_attn: it is not installed. pip install -e '.[flash]', or set {name}=auto")
    if model.device is not Device.cpu and sees_gpu():
        return
    why = "model.device=cpu" if model.device is Device.cpu else "none is visible here"
    on_gpus = ON_GPUS if os.environ.get("TRITON_INTERPRET") == "1" else (*ON_GPUS, *OURS)
    for name, choice in choices.items():
        if choice.value in on_gpus:
            instead = "fast" if name == "numerics" else "auto"
            raise ConfigError(f"{name}={choice.value} needs a GPU, and {why}. Set {name}={instead}")
