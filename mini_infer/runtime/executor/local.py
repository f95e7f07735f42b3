"""An executor with one worker, in this process: a GPU, or the CPU."""

from __future__ import annotations

from functools import cache

from mini_infer.core.config import EngineConfig
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.runtime.worker.limits import settle_limits
from mini_infer.runtime.worker.model_runner import LaunchedStep
from mini_infer.runtime.worker.worker import Worker


class LocalExecutor:
    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError or ModelError where the settings cannot work; what needs no weights is found out first."""
        worker = Worker(config)
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
        self.reserve_memory, self.step_costs = worker.reserve_memory, cache(worker.measure_step_costs)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self.runner.launch(plan)

    def collect(self, handle: LaunchedStep) -> StepResult:
        return self.runner.collect(handle)
