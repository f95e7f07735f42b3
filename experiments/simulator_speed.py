"""What simulating takes: the CPU time of requests to clusters of several sizes, at one rate for each replica.

It is no ablation: nothing is served. Costs of steps are made up, about those of a 7B model on an H200.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig

from experiments.lab import check, points, schema
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.rounds import Probe
from experiments.lab.points import Point
from experiments.lab.spec import ExperimentSpec
from mini_infer.core.config import Device, EngineConfig
from mini_infer.core.limits import Limits
from mini_infer.serving.router import Router
from mini_infer.simulation.cluster import Cluster
from mini_infer.simulation.costs import Curve, FittedCosts
from mini_infer.simulation.replica import Replica

VARIANT = "simulator"
VOCABULARY = 150_000
COSTS = FittedCosts(
    decode=Curve((1, 8, 64, 256), (3.5e-3, 4.2e-3, 4.7e-3, 7.5e-3)),
    prompts=Curve((1, 256, 2048), (6e-3, 7.5e-3, 42e-3)),
    slot_s=1.4e-8,
    reach_s=5e-7,
    pair_s=1.5e-10,
    plan_s=1e-4,
    row_s=5e-7,
)
LIMITS = Limits(max_model_len=16_384, reason="the benchmark", num_blocks=20_000, num_host_blocks=0)
METRICS = {
    "request_us": Metric("CPU time of a simulated request", "us", Better.lower),
    "hour_cpu_s": Metric("CPU time of a simulated hour", "s", Better.lower),
    "hour_s": Metric("CPU time of a simulated hour, of the process that takes longest", "s", Better.lower),
    "ttft_ms": Metric("time to first token that is simulated, mean", "ms", Better.lower),
}


@dataclass(frozen=True)
class SpeedSpec(ExperimentSpec):
    """
    Attributes:
        replicas: sizes of clusters.
        cells: routers, each with its share of the replicas and of the requests, in a process of its own.
        rate_per_s: of requests to each replica.
        requests: that are simulated at each size.
        prompt_tokens, output_tokens: means of their lengths, which are exponentially distributed.
    """

    replicas: tuple[int, ...] = (1, 8, 64)
    cells: int = 2
    rate_per_s: float = 3.125
    requests: int = 10_000
    prompt_tokens: int = 1155
    output_tokens: int = 211

    def __post_init__(self) -> None:
        names = ("replicas", "cells", "rate_per_s", "requests", "prompt_tokens", "output_tokens")
        check.above_zero("experiment", self, *names)


class SimulatorSpeed(Probe):
    spec_class = SpeedSpec
    spec: SpeedSpec
    device = Device.cpu
    variants: Mapping[str, str] = {VARIANT: "mini-infer's simulator"}
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._engine = schema.engine_config(config.engine)
        self.points = [points.point({"replicas": count}) for count in self.spec.replicas]
        self.timed = [(VARIANT, point) for point in self.points]

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        spec, count = self.spec, point.values["replicas"]
        cells = min(spec.cells, count)
        shares = [len(range(cell, count, cells)) for cell in range(cells)]
        gc.collect()
        work = [(spec, self._engine, share, round(spec.requests * share / count)) for share in shares]
        seeds = [(self.settings.seed, cell) for cell in range(cells)]
        if cells == 1:
            done = [simulate(*work[0], seeds[0])]
        else:  # forked: none of them touches torch
            with ProcessPoolExecutor(cells, multiprocessing.get_context("fork")) as pool:
                done = list(pool.map(simulate, *zip(*work, strict=True), seeds))
        cpu_s = sum(cell.cpu_s for cell in done)
        return {
            "request_us": 1e6 * cpu_s / sum(cell.requests for cell in done),
            "hour_cpu_s": sum(3600 * cell.cpu_s / cell.simulated_s for cell in done),
            "hour_s": max(3600 * cell.cpu_s / cell.simulated_s for cell in done),
            "ttft_ms": 1e3 * float(np.mean([cell.ttft_s for cell in done])),
        }


class Cell(NamedTuple):
    requests: int
    simulated_s: float
    cpu_s: float
    ttft_s: float  # mean


def simulate(spec: SpeedSpec, engine: EngineConfig, replicas: int, requests: int, seed: tuple[int, int]) -> Cell:
    """Replicas behind one router."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / (spec.rate_per_s * replicas), requests)
    longest = LIMITS.max_model_len // 2
    lengths = np.clip(rng.exponential((spec.prompt_tokens, spec.output_tokens), (requests, 2)), 1, longest).astype(int)
    tokens = rng.integers(0, VOCABULARY, 2 * longest).tolist()
    starts = rng.integers(0, longest, requests).tolist()
    cluster = Cluster(
        [Replica(engine, LIMITS, COSTS, overlap=True) for _ in range(replicas)],
        Router(engine.parallel.routing, replicas, engine.cache),
    )
    waited: list[float] = []
    started = time.process_time()
    for due, (prompt, output), start in zip(np.cumsum(gaps).tolist(), lengths.tolist(), starts, strict=True):
        _advance(cluster, due, waited)
        cluster.send("", tokens[start : start + prompt], output, due)
    _advance(cluster, None, waited)
    took = time.process_time() - started
    if len(waited) != requests:
        raise RuntimeError(f"{len(waited)} of {requests} requests have ended")
    return Cell(requests, float(gaps.sum()), took, float(np.mean(waited)))


def _advance(cluster: Cluster, until: float | None, waited: list[float]) -> None:
    """Notes of each request that ends how long it waited for its first token, and nothing else: memory is bounded."""
    while (request := cluster.advance(until)) is not None:
        waited.append(request.token_times[0] - request.arrival_time)
