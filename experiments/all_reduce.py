"""A sum over ranks with the residual addition and the norm behind it: the engine's own kernel beside the collectives of
the library. No engine runs; every rank is a process that makes the same calls at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed import PrefixStore, Store

from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels.case import row_error, worst
from experiments.lab.measure import hardware
from experiments.lab.measure.together import ERROR, OverRanks, RanksSpec, largest
from experiments.lab.points import Point
from experiments.lab.spec import Count
from mini_infer.core.config import Device, KernelChoice, ModelConfig
from mini_infer.kernels.interface import Norm, Part, Stream
from mini_infer.kernels.ops import TorchKernels, select_kernels
from mini_infer.modeling.loader import resolve_device
from mini_infer.parallel.all_reduce import Collectives
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.mailboxes import time_us

LIBRARY, OURS = "library", "ours"
EPS = 1e-6
REFERENCE = "the sum of the parts of all ranks in fp32"


@dataclass(frozen=True)
class AllReduceSpec(RanksSpec):
    """`rows` are numbers of rows that are summed, each of `hidden` numbers."""

    rows: tuple[Count, ...] = ()
    hidden: Count = 3584


class AllReduceExperiment(OverRanks):
    reads = ("engine.model.device", "hardware", "measure.aa", "measure.repeats")
    spec: AllReduceSpec
    baseline = LIBRARY
    reference = REFERENCE

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        device = hardware.resolve(self.engine.model.device)
        self.device = Device(device)
        self.make = partial(_Rank, model=self.engine.model, spec=self.spec)
        library = "NCCL, then the norm" if device == "cuda" else "gloo, then the norm"
        self.variants = self.with_baseline_again({LIBRARY: library, OURS: "one kernel"})
        self.metrics = {"time_us": Metric("time of a sum, with residual and norm", "µs", Better.lower)}
        self.points = [Point.of({"rows": rows}) for rows in self.spec.rows]


class _Rank:
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
        self.about: Mapping[str, str] = {"Chosen at start": ours.about}

    @torch.inference_mode()
    def measure(self, variant: str, rows: int) -> dict[str, float]:
        """Of a call, on the slowest rank."""
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
        x = torch.zeros_like(residual)
        us = time_us(lambda: call(x), self._device, context.exchange)
        return {"time_us": us, ERROR: largest(error, context)}

    def _drawn(self, rows: int, seed: int) -> Tensor:
        drawn = torch.randn(rows, self._spec.hidden, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self._device, self._dtype)
