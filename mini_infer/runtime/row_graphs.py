"""CUDA graphs of one forward over rows of a few tokens each: where drafts are verified, and where a draft model makes
them.

There is a graph for each descriptor (rows, tokens a row). A batch takes the next larger one: rows that are missing are
those of the spare slot, and tokens that a row has too few of are computed for nothing and write to the spare block.

    slot 4   t d d d         tokens [positions starts .. starts + counts)
    slot 7   t d . .         two tokens of padding
    spare    . . . .         a row of padding

What follows the forward runs eagerly, on the hidden states of the tokens that are none of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.capture import Cutter, Graph, GraphMemory, capture_sizes
from mini_infer.runtime.graphs import BatchDescriptor
from mini_infer.runtime.slots import SlotState, StepInput
from mini_infer.runtime.startup import CaptureReport

MAX_TOKENS = 1024  # of a step; larger ones keep a GPU busy while the host launches them


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: Graph
    packed: Tensor  # [3, num_rows] int32, the static input
    hidden: Tensor  # [num_rows * query_len, hidden_size]

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class _SameSize:
    """Descriptors of one number of tokens."""

    graphs: list[_Captured]

    def replay(self) -> None:
        for captured in self.graphs:
            captured.replay()


def query_ladder(largest: int) -> list[int]:
    """Tokens a row to capture, ascending, from 2 on: each doubles the drafts."""
    return sorted({1 + min(2**i, largest - 1) for i in range((largest - 1).bit_length() + 1)}) if largest > 1 else []


class RowGraphs:
    """
    Args:
        forward: hidden states [T, hidden_size] of a step, by operations that are safe to capture.
        descriptors: what to capture.
        new_graph: makes a graph that captures on the current stream.
    """

    def __init__(
        self,
        slots: SlotState,
        forward: Callable[[StepInput], Tensor],
        descriptors: Iterable[BatchDescriptor],
        new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
    ) -> None:
        self._slots, self._forward = slots, forward
        self._descriptors = sorted(descriptors, key=lambda d: (d.query_len, d.num_rows))
        self._new_graph = new_graph
        self._graphs: dict[BatchDescriptor, _Captured] = {}

    @torch.inference_mode()
    def capture(self, memory: GraphMemory, progress: Callable[[list[int]], Iterable[int]] = iter) -> CaptureReport:
        """Captures all, on a GPU, those of most tokens first."""
        by_tokens: dict[int, list[BatchDescriptor]] = {}
        for descriptor in self._descriptors:
            by_tokens.setdefault(descriptor.num_rows * descriptor.query_len, []).append(descriptor)

        def capture(tokens: int) -> _SameSize:
            return _SameSize([self.capture_one(descriptor, memory) for descriptor in by_tokens[tokens]])

        captured, report = capture_sizes(list(by_tokens), capture, "tokens of drafts", memory, 0, progress)
        for tokens, same in captured.items():
            self._graphs.update(zip(by_tokens[tokens], same.graphs, strict=True))
        return report

    def capture_one(self, descriptor: BatchDescriptor, memory: GraphMemory) -> _Captured:
        """Captures one forward on the current stream."""
        packed = torch.zeros((3, descriptor.num_rows), dtype=torch.int32, device=self._slots.rows.device)
        packed[0] = self._slots.spare_slot

        def run() -> Tensor:
            return self._forward(self._slots.build_rows(packed, descriptor.query_len))

        memory.warm_up(run)
        with Cutter(self._new_graph, memory.pool) as cutter:
            hidden = run()
        return _Captured(cutter.graphs[0], packed, hidden)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor | None:
        """Hidden states [T, hidden_size] of the plan's tokens, in order. None where no graph takes it."""
        n, most = plan.num_rows, max(plan.counts)
        descriptor = next((d for d in self._descriptors if d in self._graphs and fits(d, n, most)), None)
        if descriptor is None:
            return None
        captured = self._graphs[descriptor]
        rows = np.zeros((3, descriptor.num_rows), dtype=np.int32)
        rows[0] = self._slots.spare_slot
        rows[:, :n] = plan.slots, plan.starts, plan.counts
        self._slots.mail.send_into(captured.packed, torch.from_numpy(rows))
        captured.replay()
        hidden, length = captured.hidden, descriptor.query_len
        if plan.num_tokens == n * length:
            return hidden[: n * length]
        place = np.arange(length)
        tokens = np.flatnonzero((place < np.array(plan.counts)[:, None]).ravel())
        return hidden.index_select(0, self._slots.mail.send(tokens)[0])


def fits(descriptor: BatchDescriptor, num_rows: int, query_len: int) -> bool:
    """Whether it takes so many rows of so many tokens at most. One token a row is another graph's business."""
    return (
        descriptor.num_rows >= num_rows
        and descriptor.query_len >= query_len
        and (query_len > 1 or descriptor.query_len == 1)
    )


def descriptors(rows: Sequence[int], query_lens: Sequence[int]) -> list[BatchDescriptor]:
    """All of them that have no more than MAX_TOKENS tokens."""
    return [BatchDescriptor(r, length) for length in query_lens for r in rows if r * length <= MAX_TOKENS]


class NoRowGraphs:
    """Every forward runs eagerly."""

    def forward(self, plan: StepPlan) -> None:
        return None
