"""Times a kernel: many calls in a row, each with inputs that no cache still holds.

On a GPU the calls are captured in a CUDA graph, so that no host is in the time, and the graph is replayed between two
events; what cannot be captured is called between them. On a CPU there is the clock alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from experiments.lab.judge import stats
from experiments.lab.kernels.case import Implementation

PASS_US = 1_000.0  # at least so long are the calls between two events
SAMPLES = 15  # of which the median is one repeat
ROTATED = 2  # times the last cache is what all inputs together are larger than
CPU_CACHE = 64 * 2**20
MAX_COPIES = 512
MAX_CALLS = 2048  # of one graph


@dataclass(frozen=True)
class Timer:
    burst: Callable[[], None]  # makes `calls` calls
    calls: int
    captured: bool  # they are a CUDA graph
    on_gpu: bool

    def sample_us(self) -> float:
        """The median time of a call."""
        return 1e6 * stats.median([seconds_of(self.burst, 1, self.on_gpu) for _ in range(SAMPLES)]) / self.calls


def copies_needed(num_bytes: int, device: torch.device) -> int:
    """So many sets of inputs, of `num_bytes` each, that using them in turns finds none of them in the last cache."""
    cache = CPU_CACHE
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, 1 + ROTATED * cache // max(num_bytes, 1))


def prepare(implementation: Implementation, copies: int, device: torch.device) -> Timer:
    """Compiles, warms up and captures: nothing of it is left for the timed part."""
    run, on_gpu = implementation.run, device.type == "cuda"
    for copy in (0, copies - 1, 0):
        run(copy)
    once_us = 1e6 * seconds_of(lambda: run(0), 1, on_gpu)
    calls = min(MAX_CALLS, max(copies, round(PASS_US / max(once_us, 0.1))))
    calls = max(1, calls // copies) * copies  # each set as often as every other
    if not on_gpu or not implementation.graph_safe:
        return Timer(lambda: _calls(run, calls, copies), calls, False, on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _calls(run, calls, copies)
    graph.replay()
    return Timer(graph.replay, calls, True, on_gpu)


def _calls(run: Callable[[int], object], count: int, copies: int) -> None:
    for index in range(count):
        run(index % copies)


def seconds_of(work: Callable[[], object], calls: int, on_gpu: bool) -> float:
    """So many calls, by the clock or on a GPU between two events."""
    if not on_gpu:
        started = time.perf_counter()
        for _ in range(calls):
            work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
