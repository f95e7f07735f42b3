"""A fleet of a thousand replicas, simulated: what routers cost and lose, what breaks with replicas, and a day's swing.

It is no ablation: nothing is served. What steps take comes from a file of conf/costs/; CPU times are of this machine.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from experiments.lab.config.points import Point
from experiments.lab.config.spec import Checked, Count, ExperimentSpec, Part, Positive
from experiments.lab.experiment import Probe
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure import costs
from experiments.lab.measure.simulated import OF_REPLICAS
from experiments.lab.measure.witness import Timed, cpu_s, witnessed
from mini_infer.core.config import Device
from mini_infer.core.limits import Limits
from mini_infer.core.request import Request
from mini_infer.serving.router import Homes, Router, make_homes
from mini_infer.simulation.cluster import Cluster
from mini_infer.simulation.replica import Replica

VARIANT = "fleet"
VOCABULARY = 150_000
SETTLING = 0.25  # of the window, in which caches fill: not counted
TIMED_ROUTES = 1000
LONGEST_ANSWER = 4096  # tokens
BEGINNING = 64  # tokens, which say whose request it is where routers share prompts out by their beginnings
METRICS = {
    "hit_rate": Metric("prompt tokens found in a cache", "", Better.higher, share=True),
    "kept_share": Metric("requests that kept the SLO", "", Better.higher, share=True),
    "kept_down_share": Metric(
        "requests that kept the SLO, of those that were there while replicas were down", "", Better.higher, share=True
    ),
    "ttft_p50_ms": Metric("time to first token, median", "ms", Better.lower),
    "ttft_p99_ms": Metric("time to first token, P99", "ms", Better.lower),
    "broken_share": Metric("streams that broke off with their replica", "", Better.lower, share=True),
    "route_us": Metric("CPU time of a router for a request", "us", Better.lower),
}


@dataclass(frozen=True)
class Case(Checked, section="experiment.cases"):
    replicas: Count = 1000
    routers: Count = 1
    homes: bool = False  # routers know in common where beginnings went, as API processes of one machine do
    by_prefix: bool = False  # the hash of its beginning says to which router a request comes; else they take turns
    prefixes: Count = 2  # beginnings that prompts share, for each replica; some are asked for more often (Zipf)
    load: Positive = 1.0  # of the spec's rate, at its highest
    swing: Part = 0.0  # how far below its highest the load is at the beginning and end of the window: a day's
    down: Part = 0.0  # share of the replicas that break down in its middle, all at once; back `restart_s` later


@dataclass(frozen=True)
class FleetSpec(ExperimentSpec):
    costs: str = "qwen2_5_7b.h200"  # a file of conf/costs, without its ending
    slower: Positive = 4.0  # so much longer steps take than there: fewer requests then load a fleet
    rate_per_s: Positive = 2.5  # of requests to each replica, on the average over them, at a load of 1
    window_s: Positive = 40.0  # in which requests come
    shared: float = 0.75  # of the requests, that begin with one of the prefixes
    prefix_tokens: int = 2048
    suffix_tokens: int = 2048
    output_tokens: int = 128  # mean of an exponential distribution
    blocks: int = 8192  # of a replica's KV memory
    ttft_ms: Positive = 2000.0  # the SLO's
    tpot_ms: Positive = 100.0
    restart_s: Positive = 10.0  # until a replica that broke down is back, with an empty cache
    cases: dict[str, Any] = field(default_factory=dict)  # name -> what differs from a Case's defaults


class _Seen(NamedTuple):
    """What is kept of a request that has ended, or broken off with its replica; of all tokens of a fleet there would be
    gigabytes."""

    arrival_s: float
    end_s: float
    ttft_s: float
    tpot_s: float
    cached: int
    prompt: int
    broken: bool

    @classmethod
    def of(cls, request: Request, broken_s: float | None = None) -> _Seen:
        arrival, times = request.arrival_time, request.token_times
        tpot = (times[-1] - times[0]) / max(len(times) - 1, 1)
        end = times[-1] if broken_s is None else broken_s
        cached = request.num_cached_tokens or 0
        return cls(arrival, end, times[0] - arrival, tpot, cached, request.prompt_len, broken_s is not None)


class Fleet(Probe):
    reads = (*OF_REPLICAS, "measure.repeats", "measure.seed")
    spec: FleetSpec
    device = Device.cpu
    variants: Mapping[str, str] = {VARIANT: "simulated"}
    metrics: Mapping[str, Metric] = METRICS

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._costs = costs.read(costs.FOLDER / f"{self.spec.costs}.yaml").costs.slower(self.spec.slower)
        self._cases = {name: Case(**changes) for name, changes in self.spec.cases.items()}
        self.points = [Point(name, {"case": name}) for name in self._cases]

    def values(self, variant: str, point: Point) -> dict[str, float | None]:
        spec, case = self.spec, self._cases[point.values["case"]]
        routing, cache, alone = self.engine.parallel.routing, self.engine.cache, case.routers == 1
        homes = _homes() if case.homes else None
        routers = [Router(routing, case.replicas, cache, alone, homes) for _ in range(case.routers)]
        cluster = Cluster([self._replica() for _ in range(case.replicas)], *routers)
        gc.freeze()  # block pools are long lists, which the collector would go through again and again
        rng = np.random.default_rng(self.settings.seed)
        window, breaks = spec.window_s, spec.window_s / 2
        back = min(breaks + spec.restart_s, window)
        breaking = rng.permutation(case.replicas)[: round(case.down * case.replicas)].tolist()
        events = [(breaks, number, False) for number in breaking] + [(back, number, True) for number in breaking]
        seen: list[_Seen] = []
        for due in self._arrivals(case, window, rng):
            while events and events[0][0] <= due:
                moment, number, starts = events.pop(0)
                _advance(cluster, moment, seen)
                if starts:
                    cluster.start(number, self._replica())
                    continue
                for lost in cluster.stop(number):
                    if lost.token_times and lost.token_times[0] <= moment:
                        seen.append(_Seen.of(lost, broken_s=moment))  # its client has read some of it
                    else:
                        output = lost.max_total_tokens - lost.prompt_len
                        _send(cluster, case, lost.token_ids[: lost.prompt_len], output, lost.arrival_time)
            _advance(cluster, due, seen)
            _send(cluster, case, *self._request(case, rng), due)
        _advance(cluster, None, seen)
        there = [one for one in seen if breaking and one.arrival_s < back and one.end_s >= breaks]
        found = {
            **self._told([one for one in seen if one.arrival_s >= SETTLING * window]),
            "kept_down_share": self._kept(there),
            "broken_share": sum(one.broken for one in seen) / len(seen),
            "route_us": self._route_us(routers[0], case, rng),
        }
        gc.unfreeze()  # else this cluster is there as long as the run
        return found

    def _replica(self) -> Replica:
        spec = self.spec
        limits = Limits(spec.prefix_tokens + spec.suffix_tokens + LONGEST_ANSWER, "the fleet", spec.blocks, 0)
        return Replica(self.engine, limits, self._costs, overlap=True)

    def _arrivals(self, case: Case, window: float, rng: np.random.Generator) -> Iterator[float]:
        """Poisson arrivals at the highest rate, thinned out where the day's is lower."""
        now, rate = 0.0, self.spec.rate_per_s * case.replicas * case.load
        while (now := now + rng.exponential(1 / rate)) < window:
            trough = 0.5 + 0.5 * math.cos(2 * math.pi * now / window)
            if rng.random() >= case.swing * trough:
                yield now

    def _request(self, case: Case, rng: np.random.Generator) -> tuple[list[int], int]:
        """Prompt, and output tokens. Beginnings are asked for by Zipf's law."""
        spec, tokens = self.spec, self._tokens
        start = int(rng.integers(len(tokens) - spec.suffix_tokens - spec.prefix_tokens))
        prompt = tokens[start : start + spec.prefix_tokens + spec.suffix_tokens]
        if rng.random() < spec.shared:
            known = case.prefixes * case.replicas
            start = int(known ** rng.random()) - 1
            prompt[: spec.prefix_tokens] = tokens[start : start + spec.prefix_tokens]
        return prompt, 1 + min(int(rng.exponential(spec.output_tokens)), LONGEST_ANSWER - 1)

    @cached_property
    def _tokens(self) -> list[int]:
        """Prompts are pieces of it, and begin alike where they begin at the same place."""
        return np.random.default_rng(self.settings.seed).integers(0, VOCABULARY, 1_000_000).tolist()

    def _told(self, seen: Sequence[_Seen]) -> dict[str, float | None]:
        _, _, ttft, _, cached, prompt, _ = np.array(seen).T
        return {
            "hit_rate": float(cached.sum() / prompt.sum()),
            "kept_share": self._kept(seen),
            "ttft_p50_ms": 1e3 * float(np.median(ttft)),
            "ttft_p99_ms": 1e3 * float(np.percentile(ttft, 99)) if len(ttft) >= 1000 else None,
        }

    def _kept(self, seen: Sequence[_Seen]) -> float | None:
        spec = self.spec
        whole = [one for one in seen if not one.broken]
        kept = sum(1e3 * one.ttft_s <= spec.ttft_ms and 1e3 * one.tpot_s <= spec.tpot_ms for one in whole)
        return kept / len(seen) if seen else None

    def _route_us(self, router: Router, case: Case, rng: np.random.Generator) -> float:
        """Of a router that has seen all of it."""
        prompts = [self._request(case, rng)[0] for _ in range(TIMED_ROUTES)]
        up = range(case.replicas)

        def routed() -> float:
            started = time.process_time()
            for prompt in prompts:
                router.end(router.route(router.chain(prompt), 1, up))
            return time.process_time() - started

        timed = Timed.of([witnessed(routed, cpu_s)], TIMED_ROUTES)
        self.witnessed.append(timed)
        return timed.us


def _homes() -> Homes:
    file = make_homes()
    try:
        return Homes(file)
    finally:
        os.close(file)


def _send(cluster: Cluster, case: Case, prompt: list[int], output: int, arrival: float) -> None:
    router = hash(tuple(prompt[:BEGINNING])) if case.by_prefix else None
    cluster.send("", prompt, output, arrival, router=router)


def _advance(cluster: Cluster, until: float | None, seen: list[_Seen]) -> None:
    while (request := cluster.advance(until)) is not None:
        seen.append(_Seen.of(request))
