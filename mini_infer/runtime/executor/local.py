"""An executor with one worker, in this process: a GPU, or the CPU; or a rank of several."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any

from mini_infer.cache.block_files import open_block_files
from mini_infer.core.config import EngineConfig
from mini_infer.core.limits import Limits, settle_limits
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.executor.fingerprints import kv_identity, kv_origin, require_same
from mini_infer.runtime.worker.worker import Worker


class LocalExecutor(Executor):
    def __init__(self, config: EngineConfig, parallel: ParallelContext = ONE_RANK) -> None:
        """Of a rank where several share the model: all of them make theirs at once.

        Raises ConfigError or ModelError where the settings cannot work; what needs no weights is found out first.
        """
        self._worker = worker = Worker(config, parallel)
        spec = worker.target.spec
        if parallel.num_ranks > 1:
            require_same(parallel, config, worker.target)

        def settle(blocks: int) -> Limits:
            """The same on all ranks: the least of each one's memory, and of the host's, which they share."""
            every = parallel.exchange([blocks, worker.block_bytes])
            blocks, block_bytes = min(blocks for blocks, _ in every), sum(own for _, own in every)
            limits = settle_limits(config, spec.max_model_len, blocks, block_bytes)
            host_blocks = min(blocks for (blocks,) in parallel.exchange([limits.num_host_blocks]))
            return replace(limits, num_host_blocks=host_blocks)

        limits = settle(worker.affordable_blocks())
        worker.load(limits.max_model_len)
        # The weights have taken their share, and steps will take theirs.
        self.limits = settle(worker.affordable_blocks(limits))
        self.kv_origin = partial(kv_origin, config, worker.target)
        identity = partial(kv_identity, config, worker.served, parallel.number)
        self.files = open_block_files(config.cache, identity, worker.block_bytes, parallel.num_ranks)
        if self.files is not None:
            own = str(self.files.folder)
            self.files.beside = [folder for folder in parallel.tell(own) if folder != own]
        worker.allocate(self.limits, self.files)
        worker.capture()
        self.runner, self.holding = worker.runner, worker.holding
        self.adapters = {} if worker.adapters is None else worker.adapters.keys
        self.tokenizer, self.vocab_size = worker.tokenizer, spec.vocab_size
        self.eos_token_ids = worker.eos_token_ids
        self.overlap, self.stages, self.startup = worker.overlap, parallel.stages, worker.report()
        self.step_costs = cache(worker.measure_step_costs)

    def read_adapter(self, path: str) -> Future[Any]:
        if (adapters := self._worker.adapters) is None:
            return super().read_adapter(path)
        self.runner.read_adapter(path)
        return adapters.reading[path]

    def load_adapter(self, path: str) -> str:
        assert self._worker.adapters is not None, "it was read"
        return self._worker.adapters.load(path)

    def reserve_memory(self) -> None:
        self._worker.reserve_memory()

    def close(self) -> None:
        self.runner.close()
