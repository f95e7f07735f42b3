"""Costs of a made-up machine, and replicas on it."""

from __future__ import annotations

from mini_infer.core.config import CacheConfig, EngineConfig, SchedulerConfig
from mini_infer.core.limits import Limits
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
