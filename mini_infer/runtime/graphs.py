"""CUDA graphs: a whole decode step, from the block tables' growth to the sampled tokens, as one launch.

There is a graph for each descriptor of a ladder of batch sizes; a batch takes the next larger one and fills it up with
padding rows. All graphs share one memory pool, since only one runs at a time: the largest is captured first and the
others fit into its memory. What changes between replays travels through one small static input (SlotState.pack_decode).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.slots import SlotState, StepInput
from mini_infer.runtime.startup import CaptureReport


@dataclass(frozen=True, order=True)
class BatchDescriptor:
    """What a graph is captured for."""

    num_rows: int
    query_len: int = 1  # tokens of each row: more where drafts are verified


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    packed: Tensor  # [4, num_rows] int32, the static input
    query_starts: Tensor  # [num_rows + 1] int32: held here, since the graph knows nothing but its address
    logits: Tensor  # [num_rows, vocab_size]
    token_ids: Tensor  # [num_rows]


def batch_ladder(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: fine where a row weighs much, then in steps of 16. Above 256, of 64."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]


def capture_sizes(
    sizes: Sequence[int],
    capture: Callable[[int], None],
    unit: str,
    device: torch.device,
    progress: Callable[[list[int]], Iterable[int]],
) -> CaptureReport:
    """Captures the sizes, largest first. One that finds no memory is left out, and the report says so.

    Args:
        capture: captures one size; raises torch.OutOfMemoryError where it finds no memory.
        unit: of a size, for the report.
    """
    start, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    captured, limits = [], []
    for size in progress(sorted(sizes, reverse=True)):
        try:
            capture(size)
            captured.append(size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            limits.append(f"no graph for {size} {unit}: out of GPU memory during capture")
    torch.cuda.synchronize(device)
    return CaptureReport(
        batch_sizes=tuple(sorted(captured)),
        seconds=time.perf_counter() - start,
        memory_bytes=free - torch.cuda.mem_get_info(device)[0],
        limits=tuple(limits),
    )


class DecodeGraphs:
    """
    Args:
        decode: computes a step of decode rows and returns its logits [R, vocab_size] and tokens [R]; everything in it
            is safe to capture.
        sizes: batch sizes to capture.
    """

    def __init__(
        self, slots: SlotState, decode: Callable[[StepInput], tuple[Tensor, Tensor]], sizes: Sequence[int]
    ) -> None:
        self._slots = slots
        self._decode = decode
        self._sizes = sorted(sizes)
        self._graphs: dict[BatchDescriptor, _Captured] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> CaptureReport:
        """Captures all sizes."""
        pool = torch.cuda.graph_pool_handle()

        def capture(size: int) -> None:
            self._graphs[BatchDescriptor(size)] = self._capture(size, pool)

        report = capture_sizes(self._sizes, capture, "rows", self._slots.rows.device, progress)
        self._sizes = list(report.batch_sizes)
        return report

    def _capture(self, size: int, pool: Any) -> _Captured:
        device = self._slots.rows.device
        padding = self._slots.pack_decode(NO_ROWS, size)
        packed = torch.from_numpy(padding).to(device)
        query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

        def step() -> tuple[Tensor, Tensor]:
            built = self._slots.build_decode(packed, query_starts)
            logits, token_ids = self._decode(built)
            self._slots.append(built, token_ids)
            return logits, token_ids

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # compiles kernels and makes library handles, which capture forbids
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            logits, token_ids = step()
        return _Captured(graph, packed, query_starts, logits, token_ids)

    def replay(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Runs the plan, and returns its rows' logits and tokens, which stay until the next replay. None where no
        graph takes it."""
        n = plan.num_rows
        if n > plan.num_decode_rows or not self._sizes or n > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= n)
        packed = self._slots.pack_decode(plan, size)
        if packed is None:
            return None
        captured = self._graphs[BatchDescriptor(size)]
        self._slots.mail.send_into(captured.packed, torch.from_numpy(packed))
        captured.graph.replay()
        return captured.logits[:n], captured.token_ids[:n]


class NoGraphs:
    """Every step runs eagerly."""

    def replay(self, plan: StepPlan) -> None:
        return None


NO_ROWS = StepPlan(step=0, slots=[], starts=[], counts=[], samples=[], num_decode_rows=0)
