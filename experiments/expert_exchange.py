"""The experts of one layer over ranks: what it costs to bring tokens to them and back, by form, number of tokens and
skew. No engine runs; every rank is a process that makes the same calls at the same time."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed import Store

from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels.case import row_error
from experiments.lab.measure.together import ERROR, OverRanks, Rank, RanksSpec, largest
from mini_infer.core.config import Dispatch, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import Routing
from mini_infer.kernels.interface import ExpertWeights, RouterSpec, Routes, TokenPlaces
from mini_infer.kernels.moe.reference import experts_reference, route_reference
from mini_infer.parallel.expert import ExpertExchange, ExpertRanks
from mini_infer.parallel.expert_meter import Meter, traffic_of

ONE = "one"
FORMS = [form for form in Dispatch if form is not Dispatch.auto]
LABELS = {ONE: "one rank", **{form.value: form.value for form in FORMS}}
CHECKED_TOKENS = 32


@dataclass(frozen=True)
class ExpertExchangeSpec(RanksSpec):
    tokens: tuple[Count, ...] = ()  # of each rank
    routing: tuple[Routing, ...] = (Routing.uniform,)  # how tokens choose experts
    experts: int = 128  # of the layer
    chosen: int = 8  # of them, by a token
    hidden: int = 2048  # numbers of a token
    inner: int = 768  # and of an expert's

    def __post_init__(self) -> None:
        super().__post_init__()
        if Routing.learned in self.routing or self.experts % self.ranks:
            raise ConfigError(
                "experiment.routing must be of uniform and zipf, and experiment.ranks divide experiment.experts; got "
                f"{[routing.value for routing in self.routing]}, and {self.ranks} ranks of {self.experts} experts"
            )


class ExchangingRank(Rank):
    def __init__(self, rank: int, store: Store, model: ModelConfig, spec: ExpertExchangeSpec) -> None:
        super().__init__(rank, store, model, spec, ONE)
        self._spec, self._context = spec, self.contexts[ONE]
        sizes = spec.hidden, spec.chosen, spec.ranks * max(spec.tokens)
        self._ranks = {
            form.value: ExpertRanks(self._context, form).opened(self.kernels, self.device, self.dtype, *sizes)
            for form in FORMS
        }
        self._generator = torch.Generator(self.device).manual_seed(0)
        gate_up = self._drawn(spec.experts, 2 * spec.inner, spec.hidden, scale=spec.hidden**-0.5)
        down = self._drawn(spec.experts, spec.hidden, spec.inner, scale=spec.inner**-0.5)
        self._weights = gate_up, down
        own = self._context.rows_of(range(spec.experts))
        self._own = ExpertWeights(gate_up[own.start : own.stop], down[own.start : own.stop])

    @torch.inference_mode()
    def values(self, variant: str, routing: str, tokens: int) -> dict[str, float | None]:
        """Times of a call, on the slowest rank."""
        spec, context = self._spec, self._context
        count = spec.ranks * tokens
        self._generator.manual_seed(count)
        every = torch.arange(count, device=self.device)
        router = RouterSpec(spec.experts, spec.chosen, normalize=True, routing=Routing(routing))
        logits = torch.randn(count, spec.experts, device=self.device, generator=self._generator)
        routes = route_reference(logits, None, router, TokenPlaces(every, every))
        x = self._drawn(count, spec.hidden)
        gate_up, down = self._weights
        compute: Callable[..., Tensor] = partial(self.kernels.experts, x, routes, ExpertWeights(gate_up, down))
        exchange_us, sent, ideal = None, 0, 0
        if variant != ONE:
            mine, own = context.rows_of(x), Routes(*(context.rows_of(part).contiguous() for part in routes))
            asked = mine, own, self._own, None, count

            def exchange(kernels: Any) -> Callable[..., Tensor]:
                return partial(ExpertExchange(self._ranks[variant], spec.experts, kernels).experts, *asked)

            compute, meter = exchange(self.kernels), Meter(self.device, self.kernels)
            compute(meter=meter)
            taken = meter.take()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            sent, ideal = traffic_of(taken)[:2]
            if variant != Dispatch.packed.value:
                idle: Any = copy(self.kernels)
                idle.experts = lambda x, *others, **more: x  # which compute nothing
                exchange_us = self._time(variant, exchange(idle))
        some = torch.linspace(0, count - 1, min(count, CHECKED_TOKENS), device=self.device).round().long()
        exact = ExpertWeights(gate_up.float(), down.float())
        expected = experts_reference(x[some].float(), Routes(*(part[some] for part in routes)), exact)
        return {
            "time_us": self._time(variant, compute),
            "exchange_us": exchange_us,
            "exchange_mb": sent / 1e6 if ideal else None,
            "exchange_excess": sent / ideal if ideal else None,
            ERROR: largest(row_error(compute()[some], expected), context),
        }

    def _time(self, variant: str, call: Callable[[], object]) -> float:
        """In a CUDA graph, where the host need not count."""
        return self.time_us(call, self._context, in_graph=variant in (ONE, Dispatch.direct.value))

    def _drawn(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, device=self.device, dtype=self.dtype, generator=self._generator)
        return drawn * scale


class ExpertExchangeExperiment(OverRanks):
    spec: ExpertExchangeSpec
    rank = ExchangingRank
    baseline = Dispatch.padded.value
    reference = "the layer on one rank in fp32"

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.variants = self.with_baseline_again(LABELS)
        self.metrics = {
            "time_us": Metric("time of a layer's experts, there and back", "µs", Better.lower),
            "exchange_us": Metric("way to the experts and back, which compute nothing", "µs", Better.lower),
            "exchange_mb": Metric("sent to other ranks and back, for a rank's tokens", "MB", Better.lower),
            "exchange_excess": Metric("sent, by the least there could be", "x", Better.lower),
        }
        self.points = [
            Point.of({"routing": routing.value, "tokens": tokens})
            for routing in self.spec.routing
            for tokens in self.spec.tokens
        ]
