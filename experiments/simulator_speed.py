"""What simulating takes: time and memory of an hour of clusters of several sizes, at one rate for each replica.

It is no ablation: nothing is served. Costs of steps are made up, about those of a 7B model on an H200.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig

from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count, ExperimentSpec, Positive
from experiments.lab.experiment import Probe
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure import witness
from experiments.lab.measure.simulated import OF_REPLICAS
from experiments.lab.measure.witness import Timed, wall_s
from mini_infer.core.config import Device, EngineConfig
from mini_infer.core.limits import Limits
from mini_infer.serving.router import Router
from mini_infer.simulation.cluster import Cluster
from mini_infer.simulation.costs import Curve, FittedCosts
from mini_infer.simulation.replica import Replica

VARIANT = "simulator"
VOCABULARY = 150_000
DRAWN_AT_ONCE = 1000  # requests
COSTS = FittedCosts(
    decode=Curve((1, 8, 64, 256), (3.5e-3, 4.2e-3, 4.7e-3, 7.5e-3)),
    prompts=Curve((1, 256, 2048), (6e-3, 7.5e-3, 42e-3)),
    slot_s=1.4e-8,
    reach_s=5e-7,
    pair_s=1.5e-10,
    plan_s=1e-4,
    row_s=5e-7,
    throttled_s=1e-6,
    recovering_s=4e-4,
    settles_s=0.07,
    pieces_s=4.5e-3,
    eager_s=1.4e-2,
    captured_tokens=2048,
)
LIMITS = Limits(max_model_len=16_384, reason="the benchmark", num_blocks=20_000, num_host_blocks=0)
METRICS = {
    "request_us": Metric("CPU time of a simulated request", "us", Better.lower),
    "hour_wall_s": Metric("wall time of a simulated hour, all processes at once", "s", Better.lower),
    "hour_s": Metric("CPU time of a simulated hour, of the process that takes longest", "s", Better.lower),
    "hour_cpu_s": Metric("CPU time of a simulated hour, of all processes", "s", Better.lower),
    "grown_mib": Metric("memory that the processes take for it, at most", "MiB", Better.lower),
    "late_mib": Metric("memory of that which was not taken in the first half of the time", "MiB", Better.lower),
    "peak_mib": Metric("memory of the processes at their peaks, with Python and libraries", "MiB", Better.lower),
    "ttft_ms": Metric("time to first token that is simulated, mean", "ms", Better.lower),
}


@dataclass(frozen=True)
class SpeedSpec(ExperimentSpec):
    replicas: tuple[Count, ...] = (1, 8, 64)  # sizes of clusters
    cells: Count = 2  # routers, each with its share of replicas and requests, in a process of its own
    rate_per_s: Positive = 3.125  # of requests to each replica
    simulated_s: Positive = 3600.0  # for which requests come, at each size
    prompt_tokens: Count = 1155  # means of exponential distributions
    output_tokens: Count = 211


class SimulatorSpeed(Probe):
    reads = (*OF_REPLICAS, "measure.repeats", "measure.seed")
    spec: SpeedSpec
    device = Device.cpu
    variants: Mapping[str, str] = {VARIANT: "mini-infer's simulator"}
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.points = [Point(_named(count, self._cells(count)), {"replicas": count}) for count in self.spec.replicas]

    def _cells(self, replicas: int) -> int:
        return min(self.spec.cells, replicas)

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        spec, count = self.spec, point.values["replicas"]
        cells = self._cells(count)
        shares = [len(range(cell, count, cells)) for cell in range(cells)]
        gc.collect()
        work = [(spec, self.engine, share, (self.settings.seed, cell)) for cell, share in enumerate(shares)]
        begun, started = wall_s(), time.perf_counter()
        with ProcessPoolExecutor(cells, multiprocessing.get_context("fork")) as pool:  # none of them touches torch
            done = list(pool.map(simulate, *zip(*work, strict=True)))
            took = time.perf_counter() - started
            outside = wall_s() - begun
        cpu_s, requests = sum(cell.cpu_s for cell in done), sum(cell.requests for cell in done)
        self.witnessed += [Timed.of([(took, outside)]), *(Timed.of([(cell.cpu_s, cell.outside_s)]) for cell in done)]
        hours = spec.simulated_s / 3600
        return {
            "request_us": 1e6 * cpu_s / requests,
            "hour_wall_s": took / hours,
            "hour_s": max(cell.cpu_s for cell in done) / hours,
            "hour_cpu_s": cpu_s / hours,
            "grown_mib": sum(cell.grown_mib for cell in done),
            "late_mib": sum(cell.late_mib for cell in done),
            "peak_mib": sum(cell.peak_mib for cell in done),
            "ttft_ms": 1e3 * sum(cell.waited_s for cell in done) / requests,
        }


def _named(replicas: int, cells: int) -> str:
    """What is simulated: cells are not one cluster, since no router sees the others' replicas."""
    engines = f"{replicas} replica{'s' if replicas > 1 else ''}"
    if cells == 1:
        return f"{engines} behind one router"
    return f"{engines}, {replicas / cells:g} behind each of {cells} routers"


class Cell(NamedTuple):
    requests: int
    cpu_s: float
    outside_s: float  # the same as the system accounts for it
    grown_mib: float  # at the peak
    late_mib: float  # of these, in the second half of the time
    peak_mib: float  # all of the process's
    waited_s: float  # for first tokens, all requests together


def simulate(spec: SpeedSpec, engine: EngineConfig, replicas: int, seed: tuple[int, int]) -> Cell:
    """Replicas behind one router. Of a request that has ended nothing is kept: memory is bounded."""
    rng, before = np.random.default_rng(seed), _peak_mib()
    tokens = rng.integers(0, VOCABULARY, 1_000_000).tolist()  # prompts are pieces of it
    cluster = Cluster(
        [Replica(engine, LIMITS, COSTS, overlap=True) for _ in range(replicas)],
        Router(engine.parallel.routing, replicas, engine.cache),
    )
    gc.disable()  # block pools are long lists, and what has ended is in no cycle: `grown_mib` would show it
    sent = ended = 0
    waited = at_half = 0.0
    begun, started = witness.cpu_s(), time.process_time()
    for due, start, prompt, output in _load(spec, replicas, len(tokens), rng):
        while (request := cluster.advance(due)) is not None:
            ended, waited = ended + 1, waited + request.token_times[0] - request.arrival_time
        cluster.send("", tokens[start : start + prompt], output, due)
        sent += 1
        if not at_half and due >= spec.simulated_s / 2:
            at_half = _peak_mib()
    while (request := cluster.advance()) is not None:
        ended, waited = ended + 1, waited + request.token_times[0] - request.arrival_time
    took = time.process_time() - started
    outside = witness.cpu_s() - begun
    if ended != sent:
        raise RuntimeError(f"{ended} of {sent} requests have ended")
    peak = _peak_mib()
    return Cell(sent, took, outside, peak - before, peak - (at_half or peak), peak, waited)


def _load(
    spec: SpeedSpec, replicas: int, num_tokens: int, rng: np.random.Generator
) -> Iterator[tuple[float, int, int, int]]:
    """(due, place of the prompt in the tokens, its tokens, output tokens) of each request."""
    now, longest = 0.0, LIMITS.max_model_len // 2
    while True:
        gaps = rng.exponential(1 / (spec.rate_per_s * replicas), DRAWN_AT_ONCE).tolist()
        drawn = rng.exponential((spec.prompt_tokens, spec.output_tokens), (DRAWN_AT_ONCE, 2))
        lengths = np.clip(drawn, 1, longest).astype(int).tolist()
        starts = rng.integers(0, num_tokens - longest, DRAWN_AT_ONCE).tolist()
        for gap, start, (prompt, output) in zip(gaps, starts, lengths, strict=True):
            now += gap
            if now >= spec.simulated_s:
                return
            yield now, start, prompt, output


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
