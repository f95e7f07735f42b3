"""An engine's part in handing prompts over: who it asks, who asks it, and what has to be equal on both sides."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import EngineConfig, HandOver, LoadFormat
from mini_infer.modeling.checkpoint import resolve_folder
from mini_infer.runtime.executor.base import Executor
from mini_infer.transfer.blocks import KVBlocks
from mini_infer.transfer.memory import SharedAllocator
from mini_infer.transfer.protocol import Hello
from mini_infer.transfer.receiver import Receiver
from mini_infer.transfer.sender import Sender
from mini_infer.transfer.stream import take_blocks

if TYPE_CHECKING:
    from mini_infer.runtime.llm_engine import LLMEngine


def make_receiver(config: EngineConfig, executor: Executor) -> Receiver:
    """Of an engine that decodes what others have computed."""
    store = executor.runner.model.store
    on_gpu, memory = store.device.type == "cuda", None
    if isinstance(store.allocate, SharedAllocator):
        memory = store.allocate.shared(store.num_blocks)
    hello = Hello(_about(config, store), memory)
    stream = torch.cuda.Stream(store.device) if on_gpu else None
    take = partial(take_blocks, KVBlocks.of(store), stream=stream)
    return Receiver(
        hello, take, config.parallel.hand_over is HandOver.always, writes_late=on_gpu and memory is not None
    )


def make_sender(engine: LLMEngine) -> Sender | None:
    """None where the engine computes prompts for nobody."""
    if not engine.config.parallel.prefill:
        return None
    return Sender(engine, _about(engine.config, engine.executor.runner.model.store))


def _about(config: EngineConfig, store: KVStore) -> dict[str, str]:
    model, layout = config.model, store.layout
    files: list[tuple[str, int, int]] = []
    if model.load_format is LoadFormat.auto:
        folder = Path(resolve_folder(model.path))
        stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    kept = ", ".join(f"{len(layers)} layers of {planes}" for layers, planes in layout.groups())
    return {
        "the model": f"{model.path} {files}",
        "what a token keeps": kept,
        "cache.block_size": str(store.block_size),
        "numerics": config.numerics.value,
    }
