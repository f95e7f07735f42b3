"""What an engine process tells of itself. Each figure is declared once, by its name in /metrics and with what is said
of it there; names and meanings are those that vLLM's users know.

Everything counts since the engine started, histograms too, so that the latest Stats tell all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, NamedTuple, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {  # of ended completions: what each tells, and its buckets' bounds
    "time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between consecutive tokens of a request.", _TOKEN_S),
    "request_time_per_output_token_seconds": ("A request's mean time of the tokens after its first.", _TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to end.", _REQUEST_S),
    "request_queue_time_seconds": ("Arrival to first computation.", _REQUEST_S),
    "request_prefill_time_seconds": ("First computation to first token.", _REQUEST_S),
    "request_decode_time_seconds": ("First token to end.", _REQUEST_S),
    "request_kv_transfer_seconds": (
        "Copying a prompt's KV from another engine, most of it while it was computed.",
        _FIRST_TOKEN_S,
    ),
    "request_kv_transfer_exposed_seconds": (
        "From the end of a prompt's computation elsewhere until its KV was here.",
        _FIRST_TOKEN_S,
    ),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
}


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """`counts[i]`: values above bound i - 1 and not above bound i; one more than there are bounds."""

    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, name: str) -> Histogram:
        return cls([0] * (len(HISTOGRAMS[name][1]) + 1))

    def observe(self, bounds: Sequence[float], value: float) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.sum += value

    def observe_all(self, bounds: Sequence[float], values: NDArray[np.float64]) -> None:
        """Many at once: there is one value for every token."""
        found = np.bincount(np.searchsorted(bounds, values), minlength=len(self.counts))
        self.counts = (found + self.counts).tolist()
        self.sum += float(values.sum())


class Gauge(NamedTuple):
    help: str


class Counter(NamedTuple):
    help: str


class Stats(msgspec.Struct, array_like=True, tag=True, gc=False):
    """How the whole engine stands, whoever's requests they are."""

    num_requests_running: Annotated[int, Gauge("Requests that hold a place in the batch.")] = 0
    num_requests_waiting: Annotated[int, Gauge("Requests that wait for a place in the batch.")] = 0
    num_requests_swapped: Annotated[int, Gauge("Requests whose KV lies in host memory.")] = 0
    num_requests_receiving: Annotated[int, Gauge("Requests whose prompts another engine computes.")] = 0
    kv_cache_usage_perc: Annotated[float, Gauge("Share of the KV blocks in use; 1 is all of them.")] = 0.0
    kv_host_cached_blocks: Annotated[int, Gauge("KV blocks of prefixes in host memory.")] = 0
    num_preemptions: Annotated[int, Counter("Requests that gave their KV blocks up for others.")] = 0
    # A token that is computed again after a preemption counts again.
    prompt_tokens: Annotated[int, Counter("Prompt tokens computed, or found in the prefix cache.")] = 0
    generation_tokens: Annotated[int, Counter("Tokens generated.")] = 0
    prefix_cache_queries: Annotated[int, Counter("Prompt tokens looked up in the prefix cache.")] = 0
    prefix_cache_hits: Annotated[int, Counter("Prompt tokens found in the prefix cache.")] = 0
    prefix_cache_host_hits: Annotated[int, Counter("Those that came back from host memory.")] = 0
    prefix_cache_disk_hits: Annotated[int, Counter("Those that came back from files.")] = 0
    prefix_cache_saved_bytes: Annotated[int, Counter("KV of prefixes copied to host memory.")] = 0
    prefix_cache_loaded_bytes: Annotated[int, Counter("KV of prefixes copied back.")] = 0
    prefix_cache_written_bytes: Annotated[int, Counter("KV of prefixes written to files, or found there already.")] = 0
    prefix_cache_read_bytes: Annotated[int, Counter("KV of prefixes read from files.")] = 0
    prefix_cache_lost_blocks: Annotated[
        int, Counter("KV blocks that files did not give, being broken or gone, or take, on a full disk.")
    ] = 0
    prefix_cache_evictions: Annotated[int, Counter("Cached KV blocks given to others.")] = 0
    engine_steps: Annotated[int, Counter("Steps of the engine.")] = 0
    kv_transfers: Annotated[int, Counter("Prompts whose KV came from another engine.")] = 0
    kv_transfers_failed: Annotated[int, Counter("Prompts whose KV did not come, and was computed here.")] = 0
    kv_transfer_bytes: Annotated[int, Counter("Bytes of KV that came from other engines.")] = 0
    prompts_computed_here: Annotated[
        int, Counter("Prompts that another engine could have computed, at a higher cost.")
    ] = 0
    spec_decode_num_drafts: Annotated[
        int, Counter("Times that a request's last token was verified with drafts behind it.")
    ] = 0
    spec_decode_num_draft_tokens: Annotated[int, Counter("Drafts that were verified.")] = 0
    spec_decode_num_accepted_tokens: Annotated[int, Counter("Drafts that were accepted.")] = 0
    # What metrics.py shows with labels of its own, or not at all.
    accepted: list[int] = []  # drafts, by their place behind the last token
    ended: dict[str, int] = {}  # completions, by finish reason
    counted: dict[str, int] = {}  # by all API processes: "responses PATH STATUS MODEL"
    histograms: dict[str, Histogram] = {}
    adapters: dict[str, str] = {}  # name -> folder of those that requests can ask for
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    draining: bool = False  # it refuses requests, and will end

    @property
    def unfinished(self) -> int:
        """Completions, wherever they are."""
        waiting = self.num_requests_waiting + self.num_requests_swapped + self.num_requests_receiving
        return self.num_requests_running + waiting


METRICS: dict[str, Gauge | Counter] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Stats, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
