"""A sum over ranks with the residual addition and the norm behind it: the engine's own kernel beside the collectives of
the library. No engine runs; every rank is a process that makes the same calls at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed import Store

from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels.case import row_error, worst
from experiments.lab.measure.together import ERROR, OverRanks, Rank, RanksSpec, largest
from mini_infer.core.config import Device, ModelConfig
from mini_infer.kernels.interface import Norm, Part, Stream
from mini_infer.kernels.ops import TorchKernels

LIBRARY, OURS = "library", "ours"
EPS = 1e-6


@dataclass(frozen=True)
class AllReduceSpec(RanksSpec):
    """`rows` are numbers of rows that are summed, each of `hidden` numbers."""

    rows: tuple[Count, ...] = ()
    hidden: Count = 3584


class SummingRank(Rank):
    def __init__(self, rank: int, store: Store, model: ModelConfig, spec: AllReduceSpec) -> None:
        super().__init__(rank, store, model, spec, LIBRARY, OURS)
        self._hidden = spec.hidden
        ours = self.contexts[OURS].collectives
        assert ours is not None
        ours.open(self.kernels, spec.hidden, [self.dtype], most_rows=max(spec.rows))
        self.about = {"Chosen at start": ours.about}

    @torch.inference_mode()
    def values(self, variant: str, rows: int) -> dict[str, float | None]:
        """Of a call, on the slowest rank."""
        context, hidden = self.contexts[variant], self._hidden
        norm = Norm(torch.linspace(0.5, 2, hidden, device=self.device, dtype=self.dtype), EPS)
        parts = [self._drawn(rows, seed) for seed in range(context.size)]
        residual = self._drawn(rows, context.size)

        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            return self.kernels.add_rms_norm(Stream(Part(x, context, x.dtype), residual, norm))

        found = call(parts[context.rank].clone())
        whole = torch.stack(parts).float().sum(0)
        exact = Norm(norm.weight.float(), EPS)
        expected = TorchKernels().add_rms_norm(Stream(whole, residual.float(), exact))
        error = worst(row_error(x, reference) for x, reference in zip(found, expected, strict=True))
        x = torch.zeros_like(residual)
        us = self.time_us(lambda: call(x), context)
        return {"time_us": us, ERROR: largest(error, context)}

    def _drawn(self, rows: int, seed: int) -> Tensor:
        drawn = torch.randn(rows, self._hidden, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.dtype)


class AllReduceExperiment(OverRanks):
    spec: AllReduceSpec
    rank = SummingRank
    baseline = LIBRARY
    reference = "the sum of the parts of all ranks in fp32"

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        library = "NCCL, then the norm" if self.device is Device.cuda else "gloo, then the norm"
        self.variants = self.with_baseline_again({LIBRARY: library, OURS: "one kernel"})
        self.metrics = {"time_us": Metric("time of a sum, with residual and norm", "µs", Better.lower)}
        self.points = [Point.of({"rows": rows}) for rows in self.spec.rows]
