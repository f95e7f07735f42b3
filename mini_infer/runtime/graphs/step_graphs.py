"""CUDA graphs of whole steps of rows alone (runtime/worker/row_step.py), from the growth of the block tables to where
each row goes on: a decode step is one launch, a step with the drafts of a draft model is two.

A batch takes the next larger graph and fills it up with padding. All graphs share one memory pool (capture.py), and one
tensor for their logits, which at a large vocabulary take more than all else. What changes between replays travels
through one small static input (RequestStates.pack_rows). Drafts have a graph of their own, since they are also made in
steps with prompts, and so that what drafting takes can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.graphs.capture import Cutter, Graph, GraphMemory, ThreadsGraph, capture_sizes
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.row_step import DoneRows
from mini_infer.runtime.worker.startup import CaptureReport

MAX_DRAFT_TOKENS = 1024  # of a captured step with drafts: the memory of their logits is kept


class BatchDescriptor(NamedTuple):
    """What a graph is captured for."""

    num_rows: int
    query_len: int = 1  # tokens of each row: more where drafts are verified
    adapted: bool = False  # rows may have adapters

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.query_len


@dataclass(frozen=True, eq=False)
class _Captured:
    chain: Graph | None  # where a draft model proposes
    draft_logits: Tensor | None
    step: Graph
    done: DoneRows
    pad: Callable[[], None]  # packs rows of padding

    def replay(self) -> None:
        """Of padding, as captured."""
        self.pad()
        if self.chain is not None:
            self.chain.replay()
        self.step.replay()


class StepGraphs:
    """Steps of packed rows: captured ones are replayed, others run eagerly.

    Args:
        chain, run: Drafter.chain and RowStep.run; safe to capture where anything is captured.
        new_graph: makes a graph that captures on the current stream.
    """

    def __init__(
        self,
        states: RequestStates,
        chain: Callable[..., Tensor | None],
        run: Callable[..., DoneRows],
        new_graph: Callable[[], Graph] = ThreadsGraph,
    ) -> None:
        self._states, self._chain, self._run, self._new_graph = states, chain, run, new_graph
        self._captured: dict[BatchDescriptor, _Captured] = {}
        self._fits: dict[BatchDescriptor, BatchDescriptor | None] = {}

    @property
    def with_drafts(self) -> tuple[BatchDescriptor, ...]:
        """Those captured steps that verify drafts, ascending."""
        return tuple(sorted({d._replace(adapted=False) for d in self._captured if d.query_len > 1}))

    @torch.inference_mode()
    def capture(
        self,
        descriptors: Sequence[BatchDescriptor],
        logits: Tensor,
        draft_logits: Tensor | None,
        memory: GraphMemory,
        unit: str,
    ) -> CaptureReport:
        """Captures all descriptors, on a GPU. They write their logits to the memory given; `draft_logits` is None where
        no model drafts. `unit` is what the report counts."""
        captured, report = capture_sizes(
            descriptors,
            lambda descriptor: self._capture(descriptor, logits, draft_logits, memory),
            unit,
            memory,
            logits.nbytes + (0 if draft_logits is None else draft_logits.nbytes),
            units=lambda descriptor: descriptor.num_tokens,
        )
        self._captured.update(captured)
        self._fits.clear()
        return report

    def release(self) -> None:
        self._captured.clear()
        self._fits.clear()

    def _capture(
        self, descriptor: BatchDescriptor, logits: Tensor, draft_out: Tensor | None, memory: GraphMemory
    ) -> _Captured:
        """Captures one descriptor on the current stream, with rows of padding."""
        rows, query_len = descriptor.num_rows, descriptor.query_len
        pad = partial(self._states.pack_rows, StepPlan(0), rows)
        draft_logits, chain = None, None

        def draft() -> Tensor | None:
            return self._chain(rows, query_len, draft_out)

        def step() -> DoneRows:
            return self._run(rows, query_len, draft_logits, logits[: descriptor.num_tokens])

        pad()
        if query_len > 1 and draft_out is not None:
            memory.warm_up(draft)
            with Cutter(self._new_graph, memory.pool) as cutter:
                draft_logits = draft()
            chain = cutter.graphs[0]
        memory.warm_up(step)
        with Cutter(self._new_graph, memory.pool) as cutter:
            done = step()
        return _Captured(chain, draft_logits, cutter.graphs[0], done, pad)

    def fit(self, num_rows: int, query_len: int, adapted: bool = False) -> BatchDescriptor | None:
        """The smallest that was captured and takes so many rows of so many tokens at most. Rows without drafts take
        none that verifies some, and rows without adapters none that has any."""
        size = BatchDescriptor(num_rows, query_len, adapted)
        if size not in self._fits:
            fitting = (
                d
                for d in self._captured
                if d.num_rows >= num_rows
                and d.query_len >= query_len
                and (d.query_len > 1, d.adapted) == (query_len > 1, adapted)
            )
            self._fits[size] = min(fitting, key=lambda d: (d.num_tokens, d), default=None)
        return self._fits[size]

    def draft(self, descriptor: BatchDescriptor) -> Tensor | None:
        """`chain` of the packed rows."""
        captured = self._captured.get(descriptor)
        if captured is None or captured.chain is None:
            return self._chain(descriptor.num_rows, descriptor.query_len)
        captured.chain.replay()
        return captured.draft_logits

    def run(self, descriptor: BatchDescriptor, draft_logits: Tensor | None = None) -> DoneRows:
        """`run` of the packed rows, whose drafts `draft` made for the same descriptor, or the plan brought. What it
        returns stays until the next call."""
        captured = self._captured.get(descriptor)
        if captured is None:
            return self._run(descriptor.num_rows, descriptor.query_len, draft_logits)
        captured.step.replay()
        return captured.done


def batch_ladder(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: fine where a row weighs much, then in steps of 16. Above 256, of 64."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]


def query_ladder(largest: int) -> list[int]:
    """Tokens a row to capture, ascending, from 2 on: each doubles the drafts."""
    return sorted({1 + min(2**i, largest - 1) for i in range((largest - 1).bit_length() + 1)}) if largest > 1 else []


def draft_ladder(largest: int) -> Sequence[int]:
    """Numbers of rows with drafts to capture: as without up to 32, then in steps of 32, since each takes several
    graphs."""
    return [rows for rows in batch_ladder(largest) if rows <= 32 or rows % 32 == 0 or rows == largest]


def draft_grid(max_rows: int, max_drafts: int) -> list[BatchDescriptor]:
    """Steps with drafts to capture: no more than MAX_DRAFT_TOKENS tokens each."""
    return [
        BatchDescriptor(rows, query_len)
        for query_len in query_ladder(1 + max_drafts)
        for rows in draft_ladder(max_rows)
        if rows * query_len <= MAX_DRAFT_TOKENS
    ]
