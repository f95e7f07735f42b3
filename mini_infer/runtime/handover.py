"""An engine's part in handing prompts over: who it asks, who asks it, and what has to be equal on both sides."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mini_infer.core.clock import machine
from mini_infer.core.config import EngineConfig, HandOver, LoadFormat
from mini_infer.modeling.model_files import resolve_folder
from mini_infer.runtime.executor.base import Executor
from mini_infer.transfer.protocol import Hello
from mini_infer.transfer.receiver import Receiver
from mini_infer.transfer.sender import Sender
from mini_infer.transfer.shares import Holding
from mini_infer.transfer.stream import take_blocks

if TYPE_CHECKING:
    from mini_infer.runtime.llm_engine import LLMEngine


def make_receiver(config: EngineConfig, executor: Executor) -> Receiver:
    """Of an engine that decodes what others have computed."""
    holding = executor.holding
    assert holding is not None, "an engine with a role has one"
    store, memories = holding.store, holding.memories
    on_gpu = store.device.type == "cuda"
    stream = torch.cuda.Stream(store.device) if on_gpu else None
    always = config.parallel.hand_over is HandOver.always
    take = partial(take_blocks, store, stream=stream)
    return Receiver(Hello(_about(config, holding), memories, machine()), take, always, writes_late=memories is not None)


def make_sender(engine: LLMEngine) -> Sender | None:
    """None where the engine computes prompts for nobody."""
    if not engine.config.parallel.prefill:
        return None
    assert engine.executor.holding is not None, "an engine with a role has one"
    return Sender(engine, _about(engine.config, engine.executor.holding))


def _about(config: EngineConfig, holding: Holding) -> dict[str, str]:
    model = config.model
    files: list[tuple[str, int, int]] = []
    if model.load_format is LoadFormat.auto:
        folder = Path(resolve_folder(model.path))
        stats = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    kept = ", ".join(f"{len(layers)} layers of {planes}" for layers, planes in holding.whole.groups())
    return {
        "the model": f"{model.path} {files}",
        "what a token keeps": kept,
        "cache.block_size": str(holding.store.block_size),
        "numerics": config.numerics.value,
        "parallel.connector": config.parallel.connector.value,
    }
