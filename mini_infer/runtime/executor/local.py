"""An executor with one worker, in this process: a GPU, or the CPU."""

from __future__ import annotations

from functools import cache

from mini_infer.core.config import EngineConfig
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.worker.limits import settle_limits
from mini_infer.runtime.worker.worker import Worker


class LocalExecutor(Executor):
    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError or ModelError where the settings cannot work; what needs no weights is found out first."""
        self._worker = worker = Worker(config)
        spec = worker.target.spec
        limits = settle_limits(config, spec.max_model_len, worker.affordable_blocks(), worker.block_bytes)
        worker.load(limits.max_model_len)
        blocks = worker.affordable_blocks(limits)  # the weights have taken their share, and steps will take theirs
        self.limits = settle_limits(config, spec.max_model_len, blocks, worker.block_bytes)
        worker.allocate(self.limits)
        worker.capture()
        self.runner = worker.runner
        self.tokenizer, self.vocab_size = worker.tokenizer, spec.vocab_size
        self.eos_token_ids = worker.eos_token_ids
        self.overlap, self.startup = worker.overlap, worker.report()
        self.step_costs = cache(worker.measure_step_costs)

    def reserve_memory(self) -> None:
        self._worker.reserve_memory()
