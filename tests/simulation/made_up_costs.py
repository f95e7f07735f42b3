"""Costs of a made-up machine, replicas on it, and what they have to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mini_infer.core.config import (
    Batching,
    CacheConfig,
    EngineConfig,
    Policy,
    Preemption,
    SchedulerConfig,
    SpeculationConfig,
)
from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepPlan
from mini_infer.simulation.costs import Curve, FittedCosts
from mini_infer.simulation.replica import Replica

COSTS = FittedCosts(
    decode=Curve((1, 8), (4e-3, 5e-3)),
    prompts=Curve((1, 2000), (5e-3, 50e-3)),
    slot_s=1e-8,
    reach_s=1e-6,
    pair_s=1e-10,
    plan_s=2e-4,
    row_s=1e-6,
    block_s=1e-5,
    beside_s=3e-5,
)
CONFIG = EngineConfig(
    cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
)
LIMITS = Limits(max_model_len=512, reason="a test", num_blocks=400, num_host_blocks=0)


def replica(
    overlap: bool = True,
    skips: bool = True,
    config: EngineConfig = CONFIG,
    limits: Limits = LIMITS,
    costs: FittedCosts = COSTS,
) -> Replica:
    return Replica(config, limits, costs, overlap, skips=skips)


def random_load(count: int, seed: int) -> list[tuple[float, list[int], int, int]]:
    """When each comes, its prompt, how many tokens it gets, and its priority."""
    rng, now, found = random.Random(seed), 0.0, []
    shared = [[rng.randrange(200) for _ in range(40)] for _ in range(3)]
    for _ in range(count):
        now += rng.expovariate(30)
        own = [rng.randrange(200) for _ in range(rng.randrange(1, 90))]
        prompt = (rng.choice(shared) if rng.random() < 0.4 else []) + own
        found.append((now, prompt, rng.randrange(1, 60), rng.randrange(3)))
    return found


DRAFTS = SpeculationConfig(method="synthetic", acceptance=0.6, adaptive=False, num_tokens=3)  # type: ignore[arg-type]
CONFIGS = {
    "chunked": CONFIG,
    "uncached": replace(CONFIG, cache=replace(CONFIG.cache, prefix_caching=False)),
    "whole": replace(CONFIG, scheduler=replace(CONFIG.scheduler, chunked_prefill=False, max_num_batched_tokens=512)),
    "swap": replace(CONFIG, scheduler=replace(CONFIG.scheduler, preemption=Preemption.swap)),
    "tiers": replace(CONFIG, cache=replace(CONFIG.cache, host_prefix_gib=2**-20)),
    "priority": replace(CONFIG, scheduler=replace(CONFIG.scheduler, policy=Policy.priority)),
    "patience": replace(CONFIG, scheduler=replace(CONFIG.scheduler, policy=Policy.patience)),
    "static": replace(CONFIG, scheduler=replace(CONFIG.scheduler, batching=Batching.static)),
    "drafts": replace(CONFIG, speculation=DRAFTS),
    "shortest": replace(CONFIG, scheduler=replace(CONFIG.scheduler, policy=Policy.shortest)),
}


def copies(config: EngineConfig) -> bool:
    """To host memory, and back."""
    return config.scheduler.preemption is Preemption.swap or config.cache.host_prefix_gib is not None


def watch(executor: Any) -> list[StepPlan]:
    """The plans that an executor is to launch from here on."""
    plans: list[StepPlan] = []
    launch: Callable[[StepPlan], Any] = executor.launch

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    executor.launch = watched
    return plans
