"""vLLM's worker for runs with a draft model. vLLM 0.23 does not tell such a drafter which sizes its CUDA graphs have,
so that it captures none and launches the draft kernel by kernel. Later versions do (vllm-project/vllm#47460)."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class WorkerWithDraftGraphs(Worker):
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """The sizes are settled in here, and graphs are captured after it."""
        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        if not runner.drafter.cudagraph_dispatcher.keys_initialized:
            runner.drafter.initialize_cudagraph_keys(runner.compilation_config.cudagraph_mode)
