"""Short way to the configs: `from mini_infer.config import EngineConfig`."""

from mini_infer.core.config import (
    AttentionConfig,
    CacheConfig,
    DraftConfig,
    DryConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    replace,
)

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DraftConfig",
    "DryConfig",
    "EngineConfig",
    "ModelConfig",
    "SchedulerConfig",
    "SpeculationConfig",
    "replace",
]
