"""Where the engine process is observed: its StepRecords and the metrics of finished requests become Stats."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mini_infer.core.plan import StepRecord
from mini_infer.core.request import CompletionOutput
from mini_infer.runtime.llm_engine import LLMEngine
from mini_infer.serving.histograms import BOUNDS, Histogram
from mini_infer.serving.processes.wire import DEADLINE, Stats

# Of StepRecords.
TIERS = (
    *("host_hit_tokens", "disk_hit_tokens", "saved_blocks", "loaded_blocks"),
    *("written_blocks", "read_blocks", "lost_blocks"),
)


class EngineStats:
    """Counts since the engine started."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.draining = False
        self.computed_tokens = 0  # of prompts and outputs
        self._steps = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0
        self._tiers = dict.fromkeys(TIERS, 0)
        startup = engine.startup
        self._block_bytes = (startup.kv_bytes + startup.draft_kv_bytes) // startup.num_kv_blocks
        self._preemptions = 0
        self._evictions = 0
        self._drafted: Counter[int] = Counter()  # by place
        self._accepted: Counter[int] = Counter()
        self._ended = {"stop": 0, "length": 0, "abort": 0, "error": 0, DEADLINE: 0}
        self._counted: Counter[str] = Counter()
        self._histograms = {name: Histogram.of(name) for name in BOUNDS}
        engine.observers.append(self._observe)

    def _observe(self, record: StepRecord) -> None:
        self._steps += 1
        self.computed_tokens += record.prefill_tokens + record.verified_tokens
        for place, (drafted, accepted) in enumerate(zip(record.drafted, record.accepted, strict=True)):
            self._drafted[place] += drafted
            self._accepted[place] += accepted
        self._prompt_tokens += record.prefill_tokens + record.prefix_hit_tokens
        self._generation_tokens += record.sampled_tokens
        self._prefix_queried_tokens += record.prefix_queried_tokens
        self._prefix_hit_tokens += record.prefix_hit_tokens
        for name in TIERS:
            self._tiers[name] += getattr(record, name)
        self._preemptions += len(record.preempted)
        self._evictions += record.evictions

    def count(self, counts: dict[str, int]) -> None:
        """Takes in what an API process has counted."""
        self._counted.update(counts)

    def finish(self, completion: CompletionOutput, reason: str, prompt_tokens: int, now: float) -> None:
        """Takes in a completion that ended at `now`, on the engine's clock; it may not have got far."""
        metrics = completion.metrics
        assert metrics is not None
        times, start, scheduled = metrics.token_times, metrics.arrival_time, metrics.first_scheduled_time
        self._ended[reason] += 1
        seen: dict[str, float] = {
            "e2e_request_latency_seconds": now - start,
            "request_prompt_tokens": prompt_tokens,
            "request_generation_tokens": len(times),
        }
        if scheduled is not None:
            seen["request_queue_time_seconds"] = scheduled - start
        if times:
            seen["time_to_first_token_seconds"] = times[0] - start
            seen["request_prefill_time_seconds"] = times[0] - (start if scheduled is None else scheduled)
            seen["request_decode_time_seconds"] = now - times[0]
        if (spans := metrics.spans) is not None and "transfer" in spans:
            seen["request_kv_transfer_seconds"] = spans["transfer"]
            seen["request_kv_transfer_exposed_seconds"] = spans["transfer_exposed"]
        if len(times) > 1:
            seen["request_time_per_output_token_seconds"] = (times[-1] - times[0]) / (len(times) - 1)
            gaps = "inter_token_latency_seconds"
            self._histograms[gaps].observe_all(BOUNDS[gaps], np.diff(times))
        for name, value in seen.items():
            self._histograms[name].observe(BOUNDS[name], value)

    def snapshot(self) -> Stats:
        scheduler, receiver = self._engine.scheduler, self._engine.receiver
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
            host_hit_tokens=self._tiers["host_hit_tokens"],
            disk_hit_tokens=self._tiers["disk_hit_tokens"],
            saved_bytes=self._tiers["saved_blocks"] * self._block_bytes,
            loaded_bytes=self._tiers["loaded_blocks"] * self._block_bytes,
            written_bytes=self._tiers["written_blocks"] * self._block_bytes,
            read_bytes=self._tiers["read_blocks"] * self._block_bytes,
            lost_blocks=self._tiers["lost_blocks"],
            host_cached_blocks=kv.host_cached_blocks,
            preemptions=self._preemptions,
            evictions=self._evictions,
            drafts=self._drafted[0],
            drafted=[self._drafted[place] for place in range(len(self._drafted))],
            accepted=[self._accepted[place] for place in range(len(self._drafted))],
            ended=self._ended,
            draining=self.draining,
            receiving=scheduler.num_receiving,
            prompts_received=receiver.num_received,
            prompts_not_received=receiver.num_failed,
            prompts_computed_here=receiver.num_computed_here,
            received_bytes=receiver.num_bytes,
            counted=self._counted,
            histograms=self._histograms,
        )
