"""CUDA graphs of steps of decode rows with drafts: one in which a draft model makes them, one in which the target
verifies them.

There is a pair for each descriptor (rows, tokens a row) of a grid. A batch takes the next larger one: rows that are
missing are those of the spare slot, and tokens that a row has too few of are computed for nothing.

    slot 4   t d d d         tokens [start .. start + count)
    slot 7   t d . .         two tokens of padding: written over before anybody reads them
    spare    . . . .         a row of padding

Where each row starts may be known to the device alone (RequestStates.pack_rows). Two graphs, and not one, since drafts
are also made in steps with prompts, and so that what drafting takes can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mini_infer.runtime.graphs.capture import Cutter, Graph, GraphMemory, capture_sizes
from mini_infer.runtime.graphs.decode_graphs import BatchDescriptor, batch_ladder
from mini_infer.runtime.worker.request_states import RequestStates, RowInput
from mini_infer.runtime.worker.startup import CaptureReport

MAX_TOKENS = 1024  # of a captured step: the memory of their logits is kept


@dataclass(frozen=True, eq=False)
class VerifiedRows:
    """R rows of Q tokens, padding included."""

    built: RowInput
    logits: Tensor  # [R * Q, vocab_size]
    token_ids: Tensor  # [R * Q] int64: the token after each, if all drafts before it stand
    tokens_and_drafts: Tensor  # [2, R * Q] int64: those, and the drafts that stand there


class Chain(Protocol):
    """DraftModel.chain."""

    def __call__(self, num_rows: int, query_len: int, out: Tensor | None = None) -> Tensor | None: ...


class Verify(Protocol):
    def __call__(
        self, num_rows: int, query_len: int, draft_logits: Tensor | None, out: Tensor | None = None
    ) -> VerifiedRows:
        """Verifies the drafts of the packed rows.

        Args:
            draft_logits: what they were drawn from, as `Chain` gives it; None where nothing random proposed them.
            out: [largest, vocab_size], memory for the logits where the call is captured.
        """


@dataclass(frozen=True, eq=False)
class _Pair:
    chain: Graph | None  # where a draft model proposes
    verify: Graph
    draft_logits: Tensor | None
    verified: VerifiedRows

    def replay(self) -> None:
        if self.chain is not None:
            self.chain.replay()
        self.verify.replay()


@dataclass(frozen=True)
class _SameSize:
    """Descriptors of one number of tokens."""

    pairs: list[_Pair]

    def replay(self) -> None:
        for pair in self.pairs:
            pair.replay()


class RowGraphs:
    """Captured, or else run eagerly.

    Args:
        chain, verify: what is done with the packed rows of `slots`; safe to capture where anything is captured.
        new_graph: makes a graph that captures on the current stream.
    """

    def __init__(
        self,
        req_indices: RequestStates,
        chain: Chain,
        verify: Verify,
        new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
    ) -> None:
        self._states, self._chain, self._verify, self._new_graph = req_indices, chain, verify, new_graph
        self._pairs: dict[BatchDescriptor, _Pair] = {}

    @property
    def captured(self) -> tuple[BatchDescriptor, ...]:
        return tuple(sorted(self._pairs))

    @torch.inference_mode()
    def capture(
        self,
        grid: Iterable[BatchDescriptor],
        new_logits: Callable[[int], Tensor],
        new_draft_logits: Callable[[int], Tensor] | None,
        memory: GraphMemory,
        progress: Callable[[list[int]], Iterable[int]] = iter,
    ) -> CaptureReport:
        """Captures all descriptors, on a GPU, those of most tokens first.

        Args:
            new_logits, new_draft_logits: make memory for so many rows of logits, which all graphs share; the second is
                None where no model drafts.
        """
        by_tokens: dict[int, list[BatchDescriptor]] = {}
        for descriptor in grid:
            by_tokens.setdefault(descriptor.num_tokens, []).append(descriptor)
        if not by_tokens:
            return CaptureReport()
        out = new_logits(max(by_tokens))
        most_drafts = max(d.num_tokens - d.num_rows for same in by_tokens.values() for d in same)
        draft_out = None if new_draft_logits is None else new_draft_logits(most_drafts)
        static_bytes = out.nbytes + (0 if draft_out is None else draft_out.nbytes)

        def capture(tokens: int) -> _SameSize:
            return _SameSize([self.capture_one(d, out, draft_out, memory) for d in by_tokens[tokens]])

        captured, report = capture_sizes(list(by_tokens), capture, "tokens of drafts", memory, static_bytes, progress)
        for tokens, same in captured.items():
            self._pairs.update(zip(by_tokens[tokens], same.pairs, strict=True))
        return report

    def capture_one(
        self, descriptor: BatchDescriptor, out: Tensor, draft_out: Tensor | None, memory: GraphMemory
    ) -> _Pair:
        """Captures a pair on the current stream. What is in the packed rows then does not matter."""
        rows, query_len = descriptor.num_rows, descriptor.query_len
        draft_logits, chain = None, None

        def draft() -> Tensor | None:
            return self._chain(rows, query_len, draft_out)

        if draft_out is not None:
            memory.warm_up(draft)
            with Cutter(self._new_graph, memory.pool) as cutter:
                draft_logits = draft()
            chain = cutter.graphs[0]

        def verify() -> VerifiedRows:
            return self._verify(rows, query_len, draft_logits, out)

        memory.warm_up(verify)
        with Cutter(self._new_graph, memory.pool) as cutter:
            verified = verify()
        return _Pair(chain, cutter.graphs[0], draft_logits, verified)

    def fit(self, num_rows: int, query_len: int) -> BatchDescriptor | None:
        """The smallest that was captured and takes so many rows of so many tokens at most."""
        fitting = (d for d in self._pairs if d.num_rows >= num_rows and d.query_len >= query_len)
        return min(fitting, key=lambda d: (d.num_tokens, d), default=None)

    def draft(self, descriptor: BatchDescriptor) -> Tensor | None:
        """`chain` of the packed rows."""
        pair = self._pairs.get(descriptor)
        if pair is None or pair.chain is None:
            return self._chain(descriptor.num_rows, descriptor.query_len)
        pair.chain.replay()
        return pair.draft_logits

    def verify(self, descriptor: BatchDescriptor, draft_logits: Tensor | None) -> VerifiedRows:
        """`verify` of the packed rows, whose drafts `draft` made for the same descriptor, or the plan brought. What it
        returns stays until the next call."""
        pair = self._pairs.get(descriptor)
        if pair is None:
            return self._verify(descriptor.num_rows, descriptor.query_len, draft_logits)
        pair.verify.replay()
        return pair.verified


def query_ladder(largest: int) -> list[int]:
    """Tokens a row to capture, ascending, from 2 on: each doubles the drafts."""
    return sorted({1 + min(2**i, largest - 1) for i in range((largest - 1).bit_length() + 1)}) if largest > 1 else []


def row_grid(max_rows: int, max_drafts: int) -> list[BatchDescriptor]:
    """What to capture: no more than MAX_TOKENS tokens each."""
    return [
        BatchDescriptor(rows, query_len)
        for query_len in query_ladder(1 + max_drafts)
        for rows in row_ladder(max_rows)
        if rows * query_len <= MAX_TOKENS
    ]


def row_ladder(largest: int) -> Sequence[int]:
    """Numbers of rows to capture: as without drafts up to 32, then in steps of 32, since each takes several graphs."""
    return [rows for rows in batch_ladder(largest) if rows <= 32 or rows % 32 == 0 or rows == largest]
