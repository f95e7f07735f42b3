from __future__ import annotations

from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.runtime.executor.base import Executor


def make_executor(config: EngineConfig) -> Executor:
    # Imported where it is chosen: the dry model needs no model code, and a model no dry one.
    if config.model.load_format is LoadFormat.dry:
        from mini_infer.runtime.executor.dry import DryExecutor

        return DryExecutor(config)
    from mini_infer.runtime.executor.local import LocalExecutor

    return LocalExecutor(config)
