"""Ranks of an experiment without an engine: processes that do the same at the same time, where possible on GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed import PrefixStore, Store

from experiments.lab.config.points import Point
from experiments.lab.config.spec import ExperimentSpec, Floating, Positive, Several
from experiments.lab.experiment import Findings, Probe
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.measure import hardware
from experiments.lab.measure.kinds import ProcessSettings
from experiments.lab.measure.witness import Timed, wall_s
from experiments.lab.peers.process import PeerProcess, ask_all
from experiments.lab.show.progress import Steps
from mini_infer.core.config import Device, DType, EngineConfig, KernelChoice, ModelConfig
from mini_infer.kernels.ops import select_kernels
from mini_infer.modeling.loader import resolve_device
from mini_infer.parallel.all_reduce import Collectives, join_store, listen, open_store
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.mailboxes import time_us
from mini_infer.parallel.peer_memory import Exchange

LIMIT_S = 300.0  # of a variant at a point
ERROR = "error"  # of the worst row on the worst rank, among the metrics


@dataclass(frozen=True)
class RanksSpec(ExperimentSpec):
    ranks: Several = 2  # processes
    dtype: Floating = DType.bfloat16  # of the numbers
    allowed_error: Positive = 0.02  # the most that a row may be off by, relative to its norm


class Rank:
    """What measures in the process of a rank, with kernels, and a context for each of `names` in which ranks talk."""

    about: Mapping[str, str] = {}  # what it chose, for the page
    # Of a variant and a point's settings, by name: metrics and ERROR, the same on all ranks, which are asked the same.
    values: Callable[..., dict[str, float | None]]

    def __init__(self, rank: int, store: Store, model: ModelConfig, spec: RanksSpec, *names: str) -> None:
        one = ParallelContext(rank, spec.ranks)
        self.device, self.dtype = resolve_device(model, one), getattr(torch, spec.dtype.value)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.kernels = select_kernels(KernelChoice.triton, self.device)
        self.contexts = {
            name: replace(one, collectives=Collectives(PrefixStore(name, store), rank, spec.ranks, self.device))
            for name in names
        }

    def measure(self, **asked: Any) -> tuple[dict[str, float | None], list[Timed]]:
        """And the times behind the values."""
        self._witnessed: list[Timed] = []
        return self.values(**asked), self._witnessed

    def time_us(self, call: Callable[[], object], context: ParallelContext, in_graph: bool = True) -> float:
        """Of a call, on the slowest rank."""
        on_gpu = self.device.type == "cuda"
        heard = Heard(call, context.exchange, ahead=int(on_gpu))
        us = time_us(heard.call, self.device, heard.exchange, in_graph)
        outside_us = 1e6 * largest(heard.fastest_s, context) / heard.burst
        self._witnessed.append(Timed(us, outside_us, heard.burst, on_gpu, heard.ahead))
        return us


class Heard:
    """Calls and seconds between two moments at which ranks wait for each other. Before the first of them is what is
    compiled and captured; between others a burst. Where one call goes `ahead` of it, a burst is heard from when that
    one was launched, which takes the host longer than a short call takes the device. Else calls have ended as they
    return, and a burst with the last of them: to wait for a rank that is late is no part of it."""

    def __init__(self, call: Callable[[], object], exchange: Exchange, ahead: int) -> None:
        self.ahead, self._call, self._exchange = ahead, call, exchange
        self._calls, self._seconds, self._began = [0], list[float](), wall_s()
        self._returned = self._began

    @property
    def burst(self) -> int:
        """Calls; of those in a graph, when it was captured."""
        return max(self._calls) - self.ahead

    @property
    def fastest_s(self) -> float:
        return min(self._seconds[1:])

    def call(self) -> object:
        made = self._call()
        self._calls[-1] += 1
        self._returned = wall_s()
        if self._calls[-1] == self.ahead:
            self._began = self._returned
        return made

    def exchange(self, told: Sequence[int]) -> list[list[int]]:
        self._seconds.append((wall_s() if self.ahead else self._returned) - self._began)
        self._calls.append(0)
        found = self._exchange(told)
        self._began = wall_s()
        return found


class OverRanks(Probe):
    reads = ("engine.model.device", "hardware", "measure.aa", "measure.repeats")
    spec: RanksSpec
    rank: type[Rank]  # made of its number, a store through which ranks find each other, a model and the spec
    reference: str  # what results are compared with

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.device = Device(hardware.resolve(self.engine.model.device))

    def measure(self, steps: Steps) -> Findings:
        self._gates: dict[tuple[str, str], ErrorGate] = {}
        self._ranks: list[PeerProcess] = []
        listener, limit = listen(), ProcessSettings(timeout_s=LIMIT_S)
        port = listener.getsockname()[1]
        with ExitStack() as processes:
            for rank in range(self.spec.ranks):
                more: dict[str, Any] = {"make": partial(self.rank, rank, spec=self.spec), "port": port}
                process = PeerProcess(f"rank {rank}", __name__, self.engine, limit, wait=False, **more)
                self._ranks.append(processes.enter_context(closing(process)))
            self._store = open_store(listener)
            for process in self._ranks:
                process.ready()
            findings = super().measure(steps)
        notes = [f"{what}: {told}." for what, told in self._ranks[0].about.items()]
        return replace(findings, error_gates=list(self._gates.values()), notes=notes)

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        asked = {"variant": self.of_arm(variant), **point.values}
        found, self.witnessed = ask_all(self._ranks, "measure", "measure", [asked] * len(self._ranks))[0]
        error = found.pop(ERROR)
        assert error is not None
        if variant != self.aa:
            of = variant, point.name
            self._gates[of] = ErrorGate(*of, error, self.spec.allowed_error, self.reference)
        return found


def largest(own: float, context: ParallelContext) -> float:
    """Of all ranks'."""
    told = round(own * 1e9) if math.isfinite(own) else 2**62
    return max(number for (number,) in context.exchange([told])) / 1e9


@torch.inference_mode()
def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Rank:
    return settings["make"](join_store(settings["port"]), config.model)
