"""Where the engine process is observed: its StepRecords and the metrics of finished requests become Stats."""

from __future__ import annotations

import numpy as np

from mini_infer.core.plan import StepRecord
from mini_infer.core.request import CompletionOutput
from mini_infer.runtime.engine import LLMEngine
from mini_infer.serving.wire import Finished, Stats


class EngineStats:
    """Counts since the engine started, and the completions that ended since the last `take`."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.computed_tokens = 0  # of prompts and outputs
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._preemptions = 0
        self._evictions = 0
        self._finished: list[Finished] = []
        engine.observers.append(self._observe)

    def _observe(self, record: StepRecord) -> None:
        self._steps += 1
        self.computed_tokens += record.prefill_tokens + record.decode_tokens
        self._prompt_tokens += record.prefill_tokens + record.prefix_hit_tokens
        self._generation_tokens += record.sampled_tokens
        self._prefix_queried_tokens += record.prefix_queried_tokens
        self._prefix_hit_tokens += record.prefix_hit_tokens
        self._preemptions += len(record.preempted)
        self._evictions += record.evictions

    def finish(self, completion: CompletionOutput, reason: str, prompt_tokens: int, now: float) -> None:
        """Takes in a finished completion; `now` is on the engine's clock."""
        metrics = completion.metrics
        assert metrics is not None
        times, start = metrics.token_times, metrics.arrival_time
        scheduled = metrics.first_scheduled_time
        self._finished.append(
            Finished(
                finish_reason=reason,
                prompt_tokens=prompt_tokens,
                cached_tokens=metrics.num_cached_tokens,
                output_tokens=len(times),
                queue_s=None if scheduled is None else scheduled - start,
                ttft_s=times[0] - start if times else None,
                tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
                e2e_s=now - start,
                itl_s=np.diff(times).tolist(),
            )
        )

    def take(self) -> Stats:
        """With the news, which are told once."""
        finished, self._finished = self._finished, []
        return self.snapshot(finished)

    def snapshot(self, finished: list[Finished]) -> Stats:
        scheduler = self._engine.scheduler
        # The last StepRecord holds the KV memory as the step was planned, and so the blocks of who ended in it.
        kv = scheduler.usage()
        return Stats(
            running=scheduler.num_running,
            prefilling=scheduler.num_prefilling,
            waiting=scheduler.num_waiting,
            swapped=scheduler.num_swapped,
            kv_used_blocks=kv.used_blocks,
            kv_cached_blocks=kv.cached_blocks,
            kv_total_blocks=kv.total_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            evictions=self._evictions,
            finished=finished,
        )
