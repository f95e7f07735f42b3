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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.graphs import BatchDescriptor, capture_sizes
from mini_infer.runtime.slots import SlotState, StepInput
from mini_infer.runtime.startup import CaptureReport

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

MAX_TOKENS = 1024  # of a step; larger ones keep a GPU busy while the host launches them


class _Captured(NamedTuple):
    packed: Tensor  # [3, num_rows] int32, the static input
    replay: Callable[[], Tensor]  # returns hidden states [num_rows * query_len, hidden_size]


def query_ladder(largest: int) -> list[int]:
    """Tokens a row to capture, ascending, from 2 on: each doubles the drafts."""
    return sorted({1 + min(2**i, largest - 1) for i in range((largest - 1).bit_length() + 1)}) if largest > 1 else []


class RowGraphs:
    """
    Args:
        forward: hidden states [T, hidden_size] of a step, by operations that are safe to capture.
        descriptors: what to capture.
        record: captures a function, on a GPU; the default is a CUDA graph.
    """

    def __init__(
        self,
        slots: SlotState,
        forward: Callable[[StepInput], Tensor],
        descriptors: Iterable[BatchDescriptor],
        record: Record | None = None,
    ) -> None:
        self._slots, self._forward = slots, forward
        self._descriptors = sorted(descriptors, key=lambda d: (d.query_len, d.num_rows))
        self._record = record or CudaRecorder(slots.rows.device)
        self._graphs: dict[BatchDescriptor, _Captured] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> CaptureReport:
        """Captures all, on a GPU, those of most tokens first."""
        by_tokens: dict[int, list[BatchDescriptor]] = {}
        for descriptor in self._descriptors:
            by_tokens.setdefault(descriptor.num_rows * descriptor.query_len, []).append(descriptor)

        def capture(tokens: int) -> None:
            for descriptor in by_tokens[tokens]:
                self.capture_one(descriptor)

        return capture_sizes(list(by_tokens), capture, "tokens of drafts", self._slots.rows.device, progress)

    def capture_one(self, descriptor: BatchDescriptor) -> None:
        packed = torch.zeros((3, descriptor.num_rows), dtype=torch.int32, device=self._slots.rows.device)
        packed[0] = self._slots.spare_slot

        def run() -> Tensor:
            return self._forward(self._slots.build_rows(packed, descriptor.query_len))

        self._graphs[descriptor] = _Captured(packed, self._record(run))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor | None:
        """Hidden states [T, hidden_size] of the plan's tokens, in order. None where no graph takes it."""
        n, most = plan.num_rows, max(plan.counts)
        descriptor = next((d for d in self._descriptors if d in self._graphs and fits(d, n, most)), None)
        if descriptor is None:
            return None
        packed, replay = self._graphs[descriptor]
        rows = np.zeros(tuple(packed.shape), dtype=np.int32)
        rows[0] = self._slots.spare_slot
        rows[:, :n] = plan.slots, plan.starts, plan.counts
        self._slots.mail.send_into(packed, torch.from_numpy(rows))
        hidden, length = replay(), descriptor.query_len
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


class CudaRecorder:
    """Captures functions as CUDA graphs that share one memory pool: only one of them runs at a time, and what one
    returns stays until the next replay of any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # compiles kernels and makes library handles, which capture forbids
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class NoRowGraphs:
    """Every forward runs eagerly."""

    def forward(self, plan: StepPlan) -> None:
        return None
