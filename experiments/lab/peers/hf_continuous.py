"""transformers' continuous batching: requests join and leave between steps, over a paged KV cache.

Its manager generates in a thread of its own and stamps each token with the clock that we use. End-of-sequence is
switched off, so outputs have the lengths asked for. Its prefix sharing is off, because it does not say which tokens
came from it. It serves requests that arrive on a schedule as well as the closed loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import is_flash_attn_2_available

from experiments.lab.measure.kinds import Subject
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.measure.traces import Served
from experiments.lab.peers.hf import describe, load_checkpoint, set_threads
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.loader import load_spec, resolve_device
from mini_infer.runtime.worker.memory import CPU_KV_GIB

CPU_BATCH_TOKENS = 1024  # of one step: its mask has so many rows over the whole pool; 512 to 4096 were equally fast
POLL_S = 1.0  # how often a wait looks whether the manager's thread still lives


class HFContinuous(Subject):
    """On a GPU it sizes its KV cache itself, by `cache.gpu_memory_utilization`; on a CPU, where it would take nearly
    all of the machine's memory, it gets as much as the engine."""

    def __init__(self, config: EngineConfig) -> None:
        on_gpu = resolve_device(config.model).type == "cuda"
        flash = on_gpu and is_flash_attn_2_available()  # named, because it would otherwise fetch kernels by itself
        attention = "paged|flash_attention_2" if flash else "paged|sdpa"
        self._model = load_checkpoint(config.model, "hf_continuous", attention)
        self.about = describe(self._model)
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
            continuous_batching_config=_batching(config, self._model.dtype, on_gpu),
        )
        try:
            self._manager.warmup()  # makes its cache
        except (MemoryError, ValueError) as error:
            raise ConfigError(
                f"transformers' continuous batching: {error}. Give it less memory, with cache.memory_gib on a CPU and "
                "cache.gpu_memory_utilization on a GPU"
            ) from error
        self._manager.start()

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Raises RuntimeError where transformers cannot serve a request."""
        clock, manager = time.perf_counter, self._manager
        outcomes = Outcomes(items, clock)
        index_of: dict[str, int] = {}

        def send(index: int) -> None:
            prompt, length = outcomes.prompts[index], items[index].output_tokens
            name = manager.add_request(prompt, max_new_tokens=length, record_timestamps=True)
            if name is None:
                raise RuntimeError("transformers' continuous batching takes no more requests: its thread has died")
            index_of[name] = index

        def advance(due: float | None) -> bool:
            wait = POLL_S if due is None else min(POLL_S, max(0.0, due - clock()))
            output = manager.get_result(timeout=wait)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching has stopped; its log says why")
            elif output.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {output.error}")
            else:
                outcomes.end(index_of[output.request_id], "", output.timestamps, output.generated_tokens)
            return True

        served = outcomes.run(concurrency, send, advance)
        return replace(served, in_flight_s=None)  # its thread's times are not when answers are read here

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)
        self._manager.destroy()
        del self._manager, self._model


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> HFContinuous:
    set_threads(config, settings)
    return HFContinuous(config)


def _batching(config: EngineConfig, dtype: torch.dtype, on_gpu: bool) -> ContinuousBatchingConfig:
    cache, scheduler = config.cache, config.scheduler
    common: dict[str, Any] = {
        "allow_block_sharing": False,
        "max_requests_per_batch": scheduler.max_num_seqs,
        "max_memory_percent": cache.gpu_memory_utilization,
    }
    if on_gpu:
        return ContinuousBatchingConfig(**common)
    spec = load_spec(config.model)
    block = max(cache.block_size, 4)  # its smallest
    size = spec.kv_layout(dtype).bytes_per_block(block)
    blocks = cache.num_blocks or int((cache.memory_gib or CPU_KV_GIB) * 2**30) // size
    tokens = min(scheduler.max_num_batched_tokens, CPU_BATCH_TOKENS)
    return ContinuousBatchingConfig(block_size=block, num_blocks=blocks, max_batch_tokens=tokens, **common)
