"""Short way to the configs: `from mini_infer.config import EngineConfig`."""

from mini_infer.core.config import (
    AttentionConfig,
    CacheConfig,
    DryConfig,
    EngineConfig,
    GraphsConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    replace,
)
from mini_infer.core.speculation_config import DraftConfig, SpeculationConfig

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DraftConfig",
    "DryConfig",
    "EngineConfig",
    "GraphsConfig",
    "LoraConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculationConfig",
    "replace",
]
