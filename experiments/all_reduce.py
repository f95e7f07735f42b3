"""A sum over ranks with the residual addition and the norm behind it: the engine's own kernel beside the collectives of
the library. No engine runs; every rank is a process that makes the same calls at the same time."""

from __future__ import annotations

import math
import multiprocessing as mp
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed import PrefixStore, Store

from experiments.lab import points, schema
from experiments.lab.experiment import Findings
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels.case import row_error, worst
from experiments.lab.measure import hardware
from experiments.lab.measure.rounds import Probe
from experiments.lab.points import Point
from experiments.lab.show.progress import Steps
from experiments.lab.spec import ExperimentSpec
from mini_infer.core.config import Device, DType, KernelChoice, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.kernels.interface import Norm, Part, Stream
from mini_infer.kernels.ops import TorchKernels, select_kernels
from mini_infer.modeling.loader import resolve_device
from mini_infer.parallel.all_reduce import Collectives, join_store, open_store
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.mailboxes import time_us

LIBRARY, OURS = "library", "ours"
START = "spawn"  # of a process
EPS = 1e-6
REFERENCE = "the sum of the parts of all ranks in fp32"


@dataclass(frozen=True)
class AllReduceSpec(ExperimentSpec):
    """
    Attributes:
        ranks: processes, on a GPU each where there are GPUs.
        rows: numbers of rows that are summed, each of `hidden` numbers.
        dtype: of the numbers.
        allowed_error: the most that a row may be off by, relative to its norm.
    """

    ranks: int = 2
    rows: tuple[int, ...] = ()
    hidden: int = 3584
    dtype: DType = DType.bfloat16
    allowed_error: float = 0.02

    def __post_init__(self) -> None:
        if self.ranks < 2 or not self.rows or min(*self.rows, self.hidden) < 1 or self.dtype is DType.auto:
            raise ConfigError(
                "experiment.ranks must be at least 2, experiment.rows a list of numbers from 1 on, experiment.hidden "
                f"at least 1 and experiment.dtype not auto; got {self.ranks}, {self.rows}, {self.hidden}, "
                f"{self.dtype.value}"
            )


class AllReduceExperiment(Probe):
    spec_class = AllReduceSpec
    spec: AllReduceSpec
    baseline = LIBRARY

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._model = schema.engine_config(config.engine).model
        device = hardware.resolve(self._model.device)
        self.device = Device(device)
        self.variants = {
            LIBRARY: "NCCL, then the norm" if device == "cuda" else "gloo, then the norm",
            OURS: "one kernel",
        }
        self.metrics = {"time_us": Metric("time of a sum, with residual and norm", "µs", Better.lower)}
        self.points = [points.point({"rows": rows}) for rows in self.spec.rows]
        self.timed = [(variant, point) for variant in self.variants for point in self.points]
        self._gates: dict[tuple[str, str], ErrorGate] = {}

    def measure(self, steps: Steps) -> Findings:
        with torch.inference_mode(), _ranks(self._model, self.spec) as self._all:
            findings = super().measure(steps)
            notes = [f"Chosen at start: {self._all[0].about}."]
        return replace(findings, error_gates=list(self._gates.values()), notes=notes)

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        rank, connections = self._all
        for connection in connections:
            connection.send((variant, point.values["rows"]))
        us, error = rank.time(variant, point.values["rows"])
        self._gates[variant, point.name] = ErrorGate(variant, point.name, error, self.spec.allowed_error, REFERENCE)
        return {"time_us": us}


class _Rank:
    """
    Attributes:
        about: what an engine would settle on.
    """

    def __init__(self, rank: int, store: Store, model: ModelConfig, spec: AllReduceSpec) -> None:
        one = ParallelContext(rank, spec.ranks)
        self._device, self._dtype, self._spec = resolve_device(model, one), getattr(torch, spec.dtype.value), spec
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._kernels = select_kernels(KernelChoice.triton, self._device)
        self._contexts = {
            variant: replace(one, collectives=Collectives(PrefixStore(variant, store), rank, spec.ranks, self._device))
            for variant in (LIBRARY, OURS)
        }
        ours = self._contexts[OURS].collectives
        assert ours is not None
        ours.open(self._kernels, spec.hidden, [self._dtype], most_rows=max(spec.rows))
        self.about = ours.about

    def time(self, variant: str, rows: int) -> tuple[float, float]:
        """(microseconds of a call on the slowest rank, error of the worst row on the worst rank)."""
        context, hidden = self._contexts[variant], self._spec.hidden
        norm = Norm(torch.linspace(0.5, 2, hidden, device=self._device, dtype=self._dtype), EPS)
        parts = [self._drawn(rows, seed) for seed in range(context.size)]
        residual = self._drawn(rows, context.size)

        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            return self._kernels.add_rms_norm(Stream(Part(x, context, x.dtype), residual, norm))

        found = call(parts[context.rank].clone())
        whole = torch.stack(parts).float().sum(0)
        exact = Norm(norm.weight.float(), EPS)
        expected = TorchKernels().add_rms_norm(Stream(whole, residual.float(), exact))
        error = worst(row_error(x, reference) for x, reference in zip(found, expected, strict=True))
        told = round(error * 1e9) if math.isfinite(error) else 2**62
        largest = max(number for (number,) in context.exchange([told])) / 1e9
        x = torch.zeros_like(residual)
        return time_us(lambda: call(x), self._device, context.exchange), largest

    def _drawn(self, rows: int, seed: int) -> Tensor:
        drawn = torch.randn(rows, self._spec.hidden, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self._device, self._dtype)


@contextmanager
def _ranks(model: ModelConfig, spec: AllReduceSpec) -> Iterator[tuple[_Rank, list[Connection]]]:
    """Rank 0, and what the others are told through; they end with it."""
    context, store = mp.get_context(START), open_store()
    pipes = [context.Pipe() for _ in range(1, spec.ranks)]
    others = [
        context.Process(target=_follow, args=(rank, store.port, model, spec, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes, 1)
    ]
    for process in others:
        process.start()
    try:
        yield _Rank(0, store, model, spec), [pipe[0] for pipe in pipes]
    finally:
        for process in others:
            process.kill()
            process.join()


@torch.inference_mode()
def _follow(rank: int, port: int, model: ModelConfig, spec: AllReduceSpec, told: Connection) -> None:
    own = _Rank(rank, join_store(port), model, spec)
    while True:
        own.time(*told.recv())
