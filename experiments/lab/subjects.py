"""What can be measured: the engine, or a peer that serves the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from experiments.lab.driver import drive
from experiments.lab.memory import MemoryWatch
from experiments.lab.traces import Served
from experiments.lab.workloads import Item
from mini_infer import LLMEngine
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError


class Kind(str, Enum):
    engine = "engine"  # mini-infer
    hf = "hf"  # transformers.generate over static, left-padded batches
    hf_continuous = "hf_continuous"  # transformers' continuous batching


class Subject(Protocol):
    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Greedy tokens for every item, in the items' order. Requests of the closed loop: at most `concurrency` in
        flight."""
        ...

    def close(self) -> None: ...


class EngineSubject:
    """One engine. Whatever it has cached stays from pass to pass."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = LLMEngine(config)
        self._memory = MemoryWatch(config)

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        self._memory.start()
        served = drive(self._engine, items, concurrency)
        return replace(served, peak_memory=self._memory.peak(served.records), memory_growth=self._memory.growth())

    def serve_with_logprobs(self, items: Sequence[Item], concurrency: int) -> Served:
        """Each token's log-probability too. It shares no cached prefix with earlier passes."""
        return drive(self._engine, items, concurrency, salt="logprobs", logprobs=True)

    def close(self) -> None:
        self._engine.close()


def open_subject(kind: Kind, config: EngineConfig) -> Subject:
    if kind is Kind.hf:
        from experiments.lab.peers.hf import HFGenerate  # it imports all of transformers

        return HFGenerate(config.model)
    if kind is Kind.hf_continuous:
        from experiments.lab.peers.hf_continuous import HFContinuous

        return HFContinuous(config)
    return EngineSubject(config)


def require_servable(kind: Kind, items: Sequence[Item], variant: str) -> None:
    """Raises ConfigError where a peer cannot do what the workload asks."""
    if kind is Kind.engine:
        return
    asks = {
        "requests that follow others": any(item.follows is not None for item in items),
        "priorities": any(item.priority for item in items),
    }
    if kind is Kind.hf:
        asks["arrival times (an open loop)"] = any(item.arrival_s is not None for item in items)
    for what, asked in asks.items():
        if asked:
            raise ConfigError(
                f"experiment.variants.{variant}: the kind {kind.value} cannot serve {what}, which the workload has. "
                "Choose another workload, or leave this variant out"
            )
