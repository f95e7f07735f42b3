"""Short way to the configs: `from mini_infer.config import EngineConfig`."""

from mini_infer.core.config import (
    AttentionConfig,
    CacheConfig,
    DryConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    replace,
)

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DryConfig",
    "EngineConfig",
    "ModelConfig",
    "SchedulerConfig",
    "replace",
]
