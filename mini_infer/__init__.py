"""mini-infer: one small, readable engine with the mechanisms of a modern LLM serving system."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mini_infer.core.compiled import require_current
from mini_infer.core.openmp import waiting_asleep

if TYPE_CHECKING:
    from mini_infer.core.config import EngineConfig
    from mini_infer.core.errors import ConfigError, MiniInferError, ModelError, RequestError
    from mini_infer.core.request import CompletionOutput, RequestOutput, SamplingParams
    from mini_infer.llm import LLM
    from mini_infer.runtime.llm_engine import LLMEngine

# Looked up on first use: the scheduler and the configs can be imported where there is no torch.
_HOME = {
    "CompletionOutput": "mini_infer.core.request",
    "ConfigError": "mini_infer.core.errors",
    "EngineConfig": "mini_infer.core.config",
    "LLM": "mini_infer.llm",
    "LLMEngine": "mini_infer.runtime.llm_engine",
    "MiniInferError": "mini_infer.core.errors",
    "ModelError": "mini_infer.core.errors",
    "RequestError": "mini_infer.core.errors",
    "RequestOutput": "mini_infer.core.request",
    "SamplingParams": "mini_infer.core.request",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "LLMEngine",
    "MiniInferError",
    "ModelError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"

require_current()
if "torch" not in sys.modules:  # it reads this once, when it is loaded
    os.environ.update(waiting_asleep(os.environ))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mini_infer' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
