"""An engine's part in handing prompts over: who it asks, who asks it, and what has to be equal on both sides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from mini_infer.core.clock import machine
from mini_infer.core.config import Connector, EngineConfig, HandOver
from mini_infer.runtime.executor.base import Executor
from mini_infer.transfer.nixl import LATE_S
from mini_infer.transfer.protocol import Hello
from mini_infer.transfer.receiver import COPIES_END_S, Receiver
from mini_infer.transfer.sender import Sender
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
    hello = Hello(_about(config, executor), memories, machine())
    late_s = LATE_S if config.parallel.connector is Connector.nixl else COPIES_END_S
    return Receiver(hello, take, always, 0.0 if memories is None else late_s)


def make_sender(engine: LLMEngine) -> Sender | None:
    """None where the engine computes prompts for nobody."""
    if not engine.config.parallel.prefill:
        return None
    return Sender(engine, _about(engine.config, engine.executor))


def _about(config: EngineConfig, executor: Executor) -> dict[str, str]:
    return {**executor.kv_origin(), "parallel.connector": config.parallel.connector.value}
