"""CUDA graphs of steps with prompts in them: of a whole step, or of everything between two attention calls.

    token_ids, positions, slot_mapping --> [ graph 0 ] --> attend(0) --> [ graph 1 ] --> ... --> [ graph L ] --> hidden

Attention depends on the rows of a step and on their lengths, so it is called as ever. Where its kernels can be captured
too (mixed.py), the step is one launch. All else depends on the number of tokens alone: there are graphs for a ladder of
token counts, and a step takes the next larger one. It is filled up with padding tokens, which write to the spare block
and whose results nobody reads. All graphs share one memory pool (runtime/graphs/capture.py).

A graph knows addresses and nothing else. So what a graph reads is the model's parameters, the KV store, the static
tensors of `_Static`, or memory of the pool that an earlier graph of the same step has written. The last is safe
because the forward that is captured holds whatever it reads later (the residual stream, cos and sin) across its cuts.

Kernels that are launched as programmatic dependents (kernels/pdl.py) stay safe: each cut is a barrier, since a graph
starts when all that its stream did before has ended, and what follows it when all its kernels have. In a whole step
attention's kernels are launched in the ordinary way, so that all before them has ended, and they let nothing start
early: what comes behind both waits for the end of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_infer.attention.context import AttentionBatch, AttentionContext
from mini_infer.cache.kv_store import KVStore
from mini_infer.modeling.model import Model
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.graphs.capture import Cutter, Graph, GraphMemory, ThreadsGraph, capture_sizes
from mini_infer.runtime.graphs.mixed import MixedAttention, MixedContext
from mini_infer.runtime.worker.startup import CaptureReport


def token_ladder(max_prefill_tokens: int, max_num_batched_tokens: int) -> list[int]:
    """Token counts to capture, ascending: 64 apart up to 2,048, and beyond, where padding is a small part of a step,
    256. None of them is of use beyond the first that takes any step."""
    most = min(max_prefill_tokens, max_num_batched_tokens)
    return [*range(64, min(most, 2048) + 64, 64), *range(2048 + 256, most + 256, 256)]


def graph_bytes(spec: ModelSpec, dtype: torch.dtype, sizes: Sequence[int]) -> int:
    """About how much memory the graphs of these token counts take: the tensors of the largest, as if a layer freed
    none; for each graph 256 KiB of the driver's, which is meant to be too much; and up to 32 MiB of cuBLAS's."""
    if not sizes:
        return 0
    attention = spec.attention
    static = spec.hidden_size + attention.num_heads * (attention.head_dim + attention.value_dim)
    graphs = len(sizes) * (spec.num_layers + 2)  # one of them of all layers
    return max(sizes) * (spec.activation_width + static) * dtype.itemsize + graphs * 256 * 2**10 + 32 * 2**20


@dataclass(frozen=True, eq=False)
class _Static:
    """Where graphs read and write, whatever their size: a size takes the first rows."""

    token_ids: Tensor  # [max] int64
    positions: Tensor  # [max] int64
    slot_mapping: Tensor  # [max] int64
    q: Tensor  # [max, num_heads, head_dim], of the layer that attends next
    attended: Tensor  # [max, num_heads, value_dim]
    hidden: Tensor  # [max, hidden_size], what the step gives

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


@dataclass(frozen=True, eq=False)
class _Pieces:
    before: list[tuple[Graph, int]]  # each with the layer that attends after it
    last: Graph
    whole: Graph | None = None  # the same with attention

    def replay(self) -> None:
        """All graphs, the pieces without attention."""
        for graph, _ in self.before:
            graph.replay()
        self.last.replay()
        if self.whole is not None:
            self.whole.replay()


class _CutContext(AttentionContext):
    """Tokens and no rows: K and V are stored, and where a layer attends, the capture is cut."""

    def __init__(self, size: int, static: _Static, store: KVStore, cut: Callable[[int], None]) -> None:
        none = torch.empty(0, dtype=torch.int32, device=store.device)
        self.batch = AttentionBatch(
            positions=static.positions[:size],
            slot_mapping=static.slot_mapping[:size],
            block_tables=none[:, None],
            query_starts=none,
            seq_lens=none,
            num_decode_rows=0,
        )
        self._kv_store = store  # and no backend: nobody attends here
        self._static, self._cut = static, cut

    def attend(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        tokens = q.shape[0]
        self._static.q[:tokens].copy_(q)
        self._cut(layer)
        return self._static.attended[:tokens]


class PiecewiseGraphs:
    """Graphs of `sizes` tokens, made by `new_graph`, whose padding tokens write to the last block of the KV store: it
    must be nobody's. With `mixed`, there are graphs of whole steps beside the pieces, for steps whose rows it takes."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        sizes: Sequence[int],
        new_graph: Callable[[], Graph] = ThreadsGraph,
        mixed: MixedAttention | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._mixed = mixed
        self._sizes = sorted(sizes)
        self._padding_slot = (store.num_blocks - 1) * store.block_size
        self._new_graph = new_graph
        self._pieces: dict[int, _Pieces] = {}
        spec, heads, largest, dtype = model.spec, model.spec.attention, self._sizes[-1], model.dtype
        # Zeros: a graph of any size finds tokens, positions and slots that exist, whatever step was there before.
        rows = torch.zeros((3, largest), dtype=torch.int64, device=store.device)
        sizes = heads.head_dim, heads.value_dim
        q, attended = (torch.zeros((largest, heads.num_heads, n), dtype=dtype, device=store.device) for n in sizes)
        hidden = torch.zeros((largest, spec.hidden_size), dtype=dtype, device=store.device)
        rows[2] = self._padding_slot
        self._static = _Static(rows[0], rows[1], rows[2], q, attended, hidden)

    @torch.inference_mode()
    def capture(self, memory: GraphMemory) -> CaptureReport:
        """Captures all sizes, on a GPU."""

        def capture(size: int) -> _Pieces:
            # A whole step runs all that its pieces run, and attention.
            cut = _CutContext(size, self._static, self._store, lambda layer: None)
            memory.warm_up(lambda: self._run(size, cut if self._mixed is None else self._mixed_context(size)))
            return self.capture_size(size, memory.pool)

        static_bytes = self._static.num_bytes() + (0 if self._mixed is None else self._mixed.num_bytes)
        self._pieces, report = capture_sizes(self._sizes, capture, "tokens", memory, static_bytes)
        return report

    def capture_size(self, size: int, pool: Any = None) -> _Pieces:
        """Captures forwards on the current stream. Whatever it raises, it leaves nothing half captured."""
        layers: list[int] = []
        cutter = Cutter(self._new_graph, pool)

        def cut(layer: int) -> None:
            layers.append(layer)
            cutter.cut()

        with cutter:
            self._run(size, _CutContext(size, self._static, self._store, cut))
        *before, last = cutter.graphs
        pieces = list(zip(before, layers, strict=True))
        if self._mixed is None:
            return _Pieces(pieces, last)
        with Cutter(self._new_graph, pool) as cutter:
            self._run(size, self._mixed_context(size))
        return _Pieces(pieces, last, cutter.graphs[0])

    def _mixed_context(self, size: int) -> AttentionContext:
        assert self._mixed is not None, "the caller has asked"
        static = self._static
        return MixedContext(self._mixed, *(t[:size] for t in (static.positions, static.slot_mapping, static.attended)))

    def _run(self, size: int, context: AttentionContext) -> None:
        """A forward between static tensors."""
        static = self._static
        hidden = self._model.forward(static.token_ids[:size], static.positions[:size], context)
        # Copied, so that sizes share one tensor rather than each holding its own.
        static.hidden[:size].copy_(hidden)

    def replay(
        self, token_ids: Tensor, batch: AttentionBatch, attention: Callable[[], AttentionContext]
    ) -> Tensor | None:
        """Hidden states [T, hidden_size] of a step of tokens [T], which stay until the next replay. None where there
        are too many. `attention` makes the batch's context, for steps in pieces alone."""
        count = token_ids.shape[0]
        size = next((size for size in self._sizes if size >= count and size in self._pieces), None)
        if size is None:
            return None
        static, pieces = self._static, self._pieces[size]
        # Padding keeps the tokens and positions of an earlier step, but must not write where they did.
        static.token_ids[:count].copy_(token_ids)
        static.positions[:count].copy_(batch.positions)
        static.slot_mapping[:count].copy_(batch.slot_mapping)
        static.slot_mapping[count:size].fill_(self._padding_slot)
        if pieces.whole is not None and self._mixed is not None and self._mixed.take(batch):
            pieces.whole.replay()
            return static.hidden[:count]
        context, q, attended = attention(), static.q[:count], static.attended[:count]
        for graph, layer in pieces.before:
            graph.replay()
            context.attend(layer, q, out=attended)
        pieces.last.replay()
        return static.hidden[:count]
