"""Per-slot state of the batch, kept on the model's device, and a step's input gathered from it.

Every slot is a row of one int32 matrix, and whatever changes between steps is a list of (place, value) pairs in it:

    rows  [ token history: prompt, then output   | block table       | sampling parameters ]   slot 0
          [ ...                                  | ...               | ...                 ]   slot 1
          [ padding rows of CUDA graphs          | the spare block   | greedy              ]   the spare slot

A sampled token is written behind its history on the device, where the next step reads it: the host need not have seen
it by then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mini_infer.attention.context import AttentionBatch
from mini_infer.core.plan import NO_DRAFT, StepPlan
from mini_infer.speculative.draft_rows import GatheredRows, gather_rows, settle_rows

IntArray = NDArray[np.integer]
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Samples:
    """The S tokens that a step samples: one a row that samples at all, and one more for each draft that it verifies."""

    rows: IntArray  # [S] of the plan, ascending
    req_indices: IntArray  # [S]
    positions: IntArray  # [S]: the place in its sequence of the token that is sampled

    @classmethod
    def of(cls, plan: StepPlan) -> Samples:
        rows = np.flatnonzero(plan.samples)
        ends = np.add(plan.starts, plan.counts)
        if not plan.num_drafts:
            return cls(rows, np.array(plan.req_indices)[rows], ends[rows])
        num_samples = np.ones(plan.num_rows, dtype=np.int64)
        num_samples[: plan.num_decode_rows] = plan.counts[: plan.num_decode_rows]
        counts = num_samples[rows]
        rows = np.repeat(rows, counts)
        until_last = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(rows))
        return cls(rows, np.array(plan.req_indices)[rows], ends[rows] - until_last)

    def index(self, by_row: Mapping[int, Value]) -> dict[int, Value]:
        """The same by place among the sampled tokens, of rows that sample one."""
        return {int(np.searchsorted(self.rows, row)): value for row, value in by_row.items()}

    def places(self) -> IntArray:
        """[S]: of each among its row's."""
        return np.arange(len(self.rows)) - np.searchsorted(self.rows, self.rows)

    def have_drafts(self) -> NDArray[np.bool_]:
        """[S]: whether a draft stands at its place, which another of its row is sampled behind."""
        return np.append(self.rows[1:] == self.rows[:-1], False)


@dataclass(frozen=True, eq=False)
class StepInput:
    """One step's batch on the device: R rows with T tokens in all, S tokens to sample. Complete when constructed."""

    batch: AttentionBatch
    token_ids: Tensor  # [T] int64
    sampled_tokens: Tensor | None  # [S] int64: index in T of the token before each; None: all T, in order
    param_rows: Tensor  # [S, num_params] int32, as the sampler encoded them
    sampled_positions: Tensor  # [S] int64: the place in its sequence of the token that is sampled
    places: Tensor  # [S] int64: where in the flat state the sampled token goes

    def sampled(self, tokens: Tensor) -> Tensor:
        """Of something that each token has, [T, ...], what those before the sampled ones have: [S, ...]."""
        return tokens if self.sampled_tokens is None else tokens.index_select(0, self.sampled_tokens)


class RequestStates:
    """
    Args:
        max_num_seqs: slots; one more is kept for padding rows.
        max_model_len: the longest request, in tokens.
        block_size: tokens a KV block.
        num_params: int32 columns of sampling parameters.
        lookahead: tokens of padding that may stand behind the longest request's last one.
        padding_block: the KV block that padding rows write to.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_params: int,
        device: torch.device,
        padding_block: int = 0,
        lookahead: int = 0,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len + lookahead
        self.padding_index = max_num_seqs
        self._padding_block = padding_block
        self._table = self.max_model_len + 1  # first column of the block table
        self._params = self._table + -(-self.max_model_len // block_size)
        self.width = self._params + num_params
        self.rows = torch.zeros((max_num_seqs + 1, self.width), dtype=torch.int32, device=device)
        self.rows[self.padding_index, self._table : self._params] = padding_block
        self.history = self.rows[:, : self._table]
        self._flat = self.rows.view(-1)
        self.h2d = HostToDevice(device)
        self._fill_up = lookahead > 0  # tokens of padding find the spare block where a request has none
        self._next_starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._packed = torch.zeros(3 * max_num_seqs, dtype=torch.int32, device=device)
        self._packed[:max_num_seqs] = self.padding_index

    # --- what changed ---------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, param_rows: Sequence[IntArray]) -> None:
        """Takes in the plan's admissions, with a row of sampling parameters each, drafts and grown block tables."""
        places: list[IntArray] = []
        values: list[IntArray | Sequence[int]] = []
        for admission, params in zip(plan.admissions, param_rows, strict=True):
            blocks = admission.block_table
            if self._fill_up:
                blocks = blocks + [self._padding_block] * (self._params - self._table - len(blocks))
            for column, numbers in ((0, admission.token_ids), (self._table, blocks), (self._params, params)):
                first = admission.req_index * self.width + column
                places.append(np.arange(first, first + len(numbers)))
                values.append(numbers)
        # Where a row follows drafts that are not read yet, a place for others is not known: there any tokens will do.
        for row, drafts in plan.drafts.items() if not plan.following else ():
            first = plan.req_indices[row] * self.width + plan.starts[row] + 1
            places.append(np.arange(first, first + len(drafts)))
            values.append(drafts)
        if plan.growths:
            grown = self._grown(plan)
            places.append(grown[:, 0])
            values.append(grown[:, 1])
        if places:
            where, what = self.h2d.send(np.concatenate(places), np.concatenate(values))
            self._flat.index_copy_(0, where.long(), what)

    def _grown(self, plan: StepPlan) -> IntArray:
        """[grown blocks, 2]: place and value of each new entry of a block table."""
        table, width = self._table, self.width
        pairs = [
            (req_index * width + table + first + i, block)
            for req_index, first, blocks in plan.growths
            for i, block in enumerate(blocks)
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    # --- a step's input -------------------------------------------------------------------------------------------

    def build(self, plan: StepPlan, sampled: Samples) -> StepInput:
        """The input of any step, its shapes being those of the plan."""
        req_indices = np.array(plan.req_indices)
        starts = np.array(plan.starts)
        counts = np.array(plan.counts)
        seq_lens = starts + counts
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        row = np.repeat(np.arange(len(req_indices)), counts)  # [T]: the row each token belongs to
        positions = np.arange(len(row)) - query_starts[row] + starts[row]
        own = (
            query_starts[sampled.rows] + sampled.positions - 1 - starts[sampled.rows],
            sampled.req_indices,
            sampled.positions,
        )
        sent = self.h2d.send(req_indices, seq_lens, query_starts, req_indices[row], positions, *own)
        slots32, lens32, starts32 = sent[:3]
        token_owners, places, tokens, sampled_indices, sampled_places = (part.long() for part in sent[3:])
        num_decode_rows, decode_query_len = _alike(plan)
        width = -(-int(seq_lens.max(initial=1)) // self.block_size)
        batch = AttentionBatch(
            positions=places,
            slot_mapping=self._slot_mapping(token_owners, places),
            block_tables=self.rows[:, self._table : self._table + width].index_select(0, slots32),
            query_starts=starts32,
            seq_lens=lens32,
            num_decode_rows=num_decode_rows,
            decode_query_len=decode_query_len,
            max_decode_seq_len=int(seq_lens[:num_decode_rows].max(initial=0)),
            max_prefill_query_len=int(counts[num_decode_rows:].max(initial=0)),
            max_prefill_seq_len=int(seq_lens[num_decode_rows:].max(initial=0)),
            host_query_starts=query_starts,
            host_seq_lens=seq_lens,
        )
        return StepInput(
            batch=batch,
            token_ids=self._flat.index_select(0, token_owners * self.width + places).long(),
            sampled_tokens=tokens,
            param_rows=self.rows[:, self._params :].index_select(0, sampled_indices),
            sampled_positions=sampled_places,
            places=sampled_indices * self.width + sampled_places,
        )

    def pack_decode(self, plan: StepPlan, num_rows: int) -> IntArray | None:
        """A plan of decode rows alone as [4, num_rows] int32 for `build_decode`: slots, sequence lengths, and for a row
        that grows the column of its block table and the block. None where the plan brings more than that."""
        if plan.admissions:
            return None
        n = plan.num_rows
        packed = np.empty((4, num_rows), dtype=np.int32)
        packed[0, :n], packed[0, n:] = plan.req_indices, self.padding_index
        packed[1, :n], packed[1, n:] = plan.starts, 0
        packed[1] += 1
        packed[2] = -1
        if plan.growths:
            req_indices, columns, blocks = zip(*plan.growths, strict=True)
            if any(len(taken) > 1 for taken in blocks):
                return None
            row_of_slot = np.empty(self.padding_index, dtype=np.int64)
            row_of_slot[packed[0, :n]] = np.arange(n)
            rows = row_of_slot[list(req_indices)]
            packed[2, rows], packed[3, rows] = columns, [taken[0] for taken in blocks]
        return packed

    def build_decode(self, packed: Tensor, query_starts: Tensor) -> StepInput:
        """The input of a step of decode rows alone, made on the device: shapes depend on the number of rows only, so
        that it can be captured in a CUDA graph. packed [4, R] int32 as `pack_decode` made it, query_starts [R + 1]
        int32: 0, 1, ... R."""
        from mini_infer.kernels.decode_input import decode_input  # it needs Triton, as do all graphs

        rows = decode_input(self.rows, packed, table=self._table, params=self._params, block_size=self.block_size)
        seq_lens = packed[1]
        batch = AttentionBatch(
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            query_starts=query_starts,
            seq_lens=seq_lens,
            num_decode_rows=len(seq_lens),
            decode_query_len=1,
            max_decode_seq_len=self.max_model_len,
            max_prefill_query_len=0,
            max_prefill_seq_len=0,
            host_query_starts=None,
            host_seq_lens=None,
        )
        return StepInput(
            batch=batch,
            token_ids=rows.token_ids,
            sampled_tokens=None,
            param_rows=rows.param_rows,
            sampled_positions=rows.positions + 1,
            places=rows.places,
        )

    # --- rows with drafts, whose place the device may know better than the host ---------------------------------------

    def pack_rows(self, plan: StepPlan, num_rows: int, first: int = 0) -> None:
        """Sends the plan's decode rows from `first` on, filled up with padding rows, to where `packed_rows` finds
        them: slots, first positions (-1 where the device knows), numbers of tokens. Growths must have been applied."""
        n = plan.num_decode_rows - first
        packed = np.zeros((3, num_rows), dtype=np.int32)
        packed[0, n:] = self.padding_index
        packed[0, :n], packed[1, :n] = plan.req_indices[first : first + n], plan.starts[first : first + n]
        packed[2, :n] = plan.counts[first : first + n]
        if plan.following:
            packed[1, [row - first for row in plan.following]] = -1
        self.h2d.send_into(self.packed_rows(num_rows), torch.from_numpy(packed))

    def packed_rows(self, num_rows: int) -> Tensor:
        """[3, num_rows] int32, always at the same place."""
        return self._packed[: 3 * num_rows].view(3, num_rows)

    def build_rows(self, num_rows: int, query_len: int, shift: int = 0, drafting: bool = False) -> RowInput:
        """The input of a step of the packed rows, made on the device: shapes depend on num_rows and query_len only.

        Args:
            query_len: tokens of each row. Those that a row has too few of are padding: they are computed for nothing,
                and what they write is written over before anybody reads it.
            shift: added to the first positions.
            drafting: the last token of each row samples, greedily where the request brings a seed. Else all do.
        """
        packed = self.packed_rows(num_rows)
        gather = _kernels().gather_rows if packed.is_cuda else gather_rows
        rows = GatheredRows(
            *gather(
                self.rows, self._next_starts, packed, query_len, shift=shift, drafting=drafting, table=self._table,
                params=self._params, block_size=self.block_size,
            )
        )  # fmt: skip
        query_starts, last = self._row_ends(num_rows, query_len)
        batch = AttentionBatch(
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            block_tables=rows.block_tables,
            query_starts=query_starts,
            seq_lens=rows.seq_lens,
            num_decode_rows=num_rows,
            decode_query_len=query_len,
            max_decode_seq_len=self.max_model_len,
            max_prefill_query_len=0,
            max_prefill_seq_len=0,
            host_query_starts=None,
            host_seq_lens=None,
        )
        step = StepInput(
            batch=batch,
            token_ids=rows.token_ids,
            sampled_tokens=last if drafting and query_len > 1 else None,
            param_rows=rows.param_rows,
            sampled_positions=rows.sampled_positions,
            places=rows.places,
        )
        return RowInput(step, packed, rows)

    def _row_ends(self, num_rows: int, query_len: int) -> tuple[Tensor, Tensor]:
        """Where each row begins [num_rows + 1] int32, and its last token [num_rows] int64. Made once."""
        if (num_rows, query_len) not in self._ends:
            starts = torch.arange(num_rows + 1, device=self.rows.device) * query_len
            self._ends[num_rows, query_len] = starts.int(), starts[1:] - 1
        return self._ends[num_rows, query_len]

    def settle(self, built: RowInput, token_ids: Tensor, rate: float | None, vocab_size: int) -> None:
        """Writes the tokens [R * query_len] that were picked behind their rows' tokens, and where each row goes on.
        With a stated `rate` of acceptance it changes them."""
        settle = _kernels().settle_rows if token_ids.is_cuda else settle_rows
        rows = built.rows
        columns = rows.param_rows, rows.places, rows.sampled_positions, rows.drafts
        settle(self.rows, self._next_starts, built.packed, *columns, token_ids, rate, vocab_size)

    def restore_drafts(self, built: RowInput) -> None:
        """Puts the drafts back where `settle` wrote the tokens that were picked: the history is again what it was when
        they were picked."""
        rows = built.rows
        behind = self._flat.index_select(0, rows.places)
        self._flat.index_copy_(0, rows.places, rows.drafts.int().where(rows.drafts != NO_DRAFT, behind))

    def _slot_mapping(self, token_owners: Tensor, positions: Tensor) -> Tensor:
        """[T] int64: where each token's K and V go, block * block_size + offset."""
        block = positions // self.block_size
        blocks = self._flat.index_select(0, token_owners * self.width + self._table + block)
        return blocks * self.block_size + (positions - block * self.block_size)

    def append(self, step: StepInput, token_ids: Tensor) -> None:
        """Writes the sampled tokens [S] behind their rows' tokens, where the next step reads them."""
        self._flat.index_copy_(0, step.places, token_ids.int())

    def overwrite(self, req_indices: IntArray, positions: IntArray, token_ids: Tensor) -> None:
        """Puts other tokens [S], on the state's device, where those of a step went: behind the first positions [S]
        tokens of slots [S]."""
        places = self.h2d.send(req_indices * self.width + positions)[0].long()
        self._flat.index_copy_(0, places, token_ids.int())


@dataclass(frozen=True, eq=False)
class RowInput:
    """A step of packed rows."""

    step: StepInput
    packed: Tensor
    rows: GatheredRows


def _kernels() -> ModuleType:
    from mini_infer.kernels import draft_rows  # it needs Triton, as does whoever samples on a GPU

    return draft_rows


def _alike(plan: StepPlan) -> tuple[int, int]:
    """How many leading rows attention takes as decode rows, and the tokens of each. Where rows differ in their drafts,
    those with drafts go with the prompts, which may have any number of tokens."""
    n = plan.num_decode_rows
    if not plan.num_drafts:
        return n, 1
    if plan.counts[0] == plan.counts[n - 1]:
        return n, plan.counts[0]
    return bisect_right(plan.counts, 1, hi=n), 1


class HostToDevice:
    """Numbers on their way to the device in one copy, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, *arrays: IntArray | NDArray[np.bool_]) -> list[Tensor]:
        """The arrays as int32 tensors on the device."""
        lengths = [len(array) for array in arrays]
        joined = torch.from_numpy(np.concatenate(arrays).astype(np.int32, copy=False))
        if self._device.type == "cuda":
            target = torch.empty(len(joined), dtype=torch.int32, device=self._device)
            self.send_into(target, joined)
            joined = target
        return list(joined.split(lengths))

    def send_into(self, target: Tensor, numbers: Tensor) -> None:
        """Fills `target` with numbers of its shape and dtype."""
        if target.is_cuda:  # torch keeps page-locked memory for its next user until this copy is done
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers)
        target.copy_(numbers, non_blocking=True)
