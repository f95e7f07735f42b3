"""Costs of a made-up machine, and replicas on it."""

from __future__ import annotations

from mini_infer.core.config import CacheConfig, EngineConfig, SchedulerConfig
from mini_infer.core.limits import Limits
from mini_infer.simulation.costs import Curve, FittedCosts
from mini_infer.simulation.replica import Replica

COSTS = FittedCosts(Curve((1, 8), (4e-3, 5e-3)), Curve((1, 2000), (5e-3, 50e-3)), 1e-8, 0.0, 1e-10, 2e-4, 1e-6, 1e-5)
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
