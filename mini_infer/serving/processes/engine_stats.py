"""Where the engine process is observed: its StepRecords and the metrics of finished requests become Stats."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mini_infer.core.plan import StepRecord
from mini_infer.core.request import CompletionOutput
from mini_infer.runtime.llm_engine import LLMEngine
from mini_infer.serving.link.wire import DEADLINE
from mini_infer.serving.stats import HISTOGRAMS, Histogram, Stats

MOST_COUNTED = 2**15  # names: adapters come and go under any


class EngineStats:
    """`computed_tokens` are those of prompts and outputs."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.computed_tokens = 0
        self.draining = False
        self._stats = Stats(
            ended={"stop": 0, "length": 0, "abort": 0, "error": 0, DEADLINE: 0},
            histograms={name: Histogram.of(name) for name in HISTOGRAMS},
        )
        startup = engine.startup
        self._block_bytes = (startup.kv_bytes + startup.draft_kv_bytes) // startup.num_kv_blocks
        engine.observers.append(self._observe)

    def _observe(self, record: StepRecord) -> None:
        stats, block_bytes = self._stats, self._block_bytes
        self.computed_tokens += record.prefill_tokens + record.verified_tokens
        stats.engine_steps += 1
        stats.prompt_tokens += record.prefill_tokens + record.prefix_hit_tokens
        stats.generation_tokens += record.sampled_tokens
        stats.prefix_cache_queries += record.prefix_queried_tokens
        stats.prefix_cache_hits += record.prefix_hit_tokens
        stats.prefix_cache_host_hits += record.host_hit_tokens
        stats.prefix_cache_disk_hits += record.disk_hit_tokens
        stats.prefix_cache_saved_bytes += record.saved_blocks * block_bytes
        stats.prefix_cache_loaded_bytes += record.loaded_blocks * block_bytes
        stats.prefix_cache_written_bytes += record.written_blocks * block_bytes
        stats.prefix_cache_read_bytes += record.read_blocks * block_bytes
        stats.prefix_cache_lost_blocks += record.lost_blocks
        stats.prefix_cache_evictions += record.evictions
        stats.num_preemptions += len(record.preempted)
        if record.drafted:
            stats.spec_decode_num_drafts += record.drafted[0]
            stats.spec_decode_num_draft_tokens += sum(record.drafted)
            stats.spec_decode_num_accepted_tokens += sum(record.accepted)
            stats.accepted += [0] * (len(record.accepted) - len(stats.accepted))
            for place, accepted in enumerate(record.accepted):
                stats.accepted[place] += accepted

    def count(self, counts: Mapping[str, int]) -> None:
        """Takes in what an API process has counted."""
        counted = self._stats.counted
        for name, number in counts.items():
            if name in counted or len(counted) < MOST_COUNTED:
                counted[name] = counted.get(name, 0) + number

    def finish(self, completion: CompletionOutput, reason: str, prompt_tokens: int, now: float) -> None:
        """Takes in a completion that ended at `now`, on the engine's clock; it may not have got far."""
        metrics = completion.metrics
        assert metrics is not None
        times, start, scheduled = metrics.token_times, metrics.arrival_time, metrics.first_scheduled_time
        self._stats.ended[reason] += 1
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
        histograms = self._stats.histograms
        if len(times) > 1:
            seen["request_time_per_output_token_seconds"] = (times[-1] - times[0]) / (len(times) - 1)
            gaps = "inter_token_latency_seconds"
            histograms[gaps].observe_all(HISTOGRAMS[gaps][1], np.diff(times))
        for name, value in seen.items():
            histograms[name].observe(HISTOGRAMS[name][1], value)

    def snapshot(self) -> Stats:
        """The same object at every call, with what is true now."""
        stats, scheduler, receiver = self._stats, self._engine.scheduler, self._engine.receiver
        stats.num_requests_running = scheduler.num_running + scheduler.num_prefilling
        stats.num_requests_waiting = scheduler.num_waiting
        stats.num_requests_swapped = scheduler.num_swapped
        stats.num_requests_receiving = scheduler.num_receiving
        # The last StepRecord holds the KV memory as the step was planned, and so the blocks of who ended in it.
        kv = scheduler.usage()
        stats.kv_used_blocks, stats.kv_total_blocks = kv.used_blocks, kv.total_blocks
        stats.kv_cache_usage_perc = kv.used_blocks / max(kv.total_blocks, 1)
        stats.kv_host_cached_blocks = kv.host_cached_blocks
        stats.kv_transfers = receiver.num_received
        stats.kv_transfers_failed = receiver.num_failed
        stats.kv_transfer_bytes = receiver.num_bytes
        stats.prompts_computed_here = receiver.num_computed_here
        stats.adapters = self._engine.adapters.paths
        stats.draining = self.draining
        return stats
