"""CUDA graphs: a whole decode step, from the block tables' growth to the sampled tokens, as one launch.

There is a graph for each descriptor of a ladder of batch sizes; a batch takes the next larger one and fills it up with
padding rows. All graphs share one memory pool (capture.py), and one tensor for their logits, which at a large
vocabulary take more than all else. What changes between replays travels through one small static input
(RequestStates.pack_decode).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.graphs.capture import Cutter, Graph, GraphMemory, capture_sizes
from mini_infer.runtime.worker.request_states import RequestStates, StepInput
from mini_infer.runtime.worker.startup import CaptureReport


@dataclass(frozen=True, order=True)
class BatchDescriptor:
    """What a graph is captured for."""

    num_rows: int
    query_len: int = 1  # tokens of each row: more where drafts are verified

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.query_len


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: Graph
    packed: Tensor  # [4, num_rows] int32, the static input
    query_starts: Tensor  # [num_rows + 1] int32: held here, since the graph knows nothing but its address
    token_ids: Tensor  # [num_rows]

    def replay(self) -> None:
        self.graph.replay()


def batch_ladder(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: fine where a row weighs much, then in steps of 16. Above 256, of 64."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """
    Args:
        decode: computes a step of decode rows, writes its logits into a tensor [R, vocab_size] and returns its tokens
            [R]; everything in it is safe to capture.
        sizes: batch sizes to capture.
        logits: [max(sizes), vocab_size], which graphs of all sizes write to.
        new_graph: makes a graph that captures on the current stream.
    """

    def __init__(
        self,
        req_indices: RequestStates,
        decode: Callable[[StepInput, Tensor], Tensor],
        sizes: Sequence[int],
        logits: Tensor,
        new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
    ) -> None:
        self._states = req_indices
        self._decode = decode
        self._sizes = sorted(sizes)
        self._logits = logits
        self._new_graph = new_graph
        self._graphs: dict[BatchDescriptor, _Captured] = {}

    @torch.inference_mode()
    def capture(self, memory: GraphMemory, progress: Callable[[list[int]], Iterable[int]] = iter) -> CaptureReport:
        """Captures all sizes, on a GPU."""
        captured, report = capture_sizes(
            self._sizes, partial(self.capture_size, memory=memory), "rows", memory, self._logits.nbytes, progress
        )
        self._graphs = {BatchDescriptor(size): graphs for size, graphs in captured.items()}
        self._sizes = list(report.batch_sizes)
        return report

    def capture_size(self, size: int, memory: GraphMemory) -> _Captured:
        """Captures one step on the current stream."""
        device = self._states.rows.device
        padding = self._states.pack_decode(NO_ROWS, size)
        packed = torch.from_numpy(padding).to(device)
        query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

        def step() -> Tensor:
            built = self._states.build_decode(packed, query_starts)
            token_ids = self._decode(built, self._logits[:size])
            self._states.append(built, token_ids)
            return token_ids

        memory.warm_up(step)
        with Cutter(self._new_graph, memory.pool) as cutter:
            token_ids = step()
        return _Captured(cutter.graphs[0], packed, query_starts, token_ids)

    def replay(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Runs the plan, and returns its rows' logits and tokens, which stay until the next replay. None where no
        graph takes it."""
        n = plan.num_rows
        if n > plan.num_decode_rows or not self._sizes or n > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= n)
        packed = self._states.pack_decode(plan, size)
        if packed is None:
            return None
        captured = self._graphs[BatchDescriptor(size)]
        self._states.h2d.send_into(captured.packed, torch.from_numpy(packed))
        captured.replay()
        return self._logits[:n], captured.token_ids[:n]


class NoGraphs:
    """Every step runs eagerly."""

    def replay(self, plan: StepPlan) -> None:
        return None


NO_ROWS = StepPlan(step=0, req_indices=[], starts=[], counts=[], samples=[], num_decode_rows=0)
