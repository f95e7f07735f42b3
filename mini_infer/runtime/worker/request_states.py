"""Per-request state of the batch, kept on the model's device, and a step's input gathered from it.

Every running request has a row of one int32 matrix, its req_index, and whatever changes between steps is a list of
(place, value) pairs in it:

    rows  [ token history: prompt, then output   | block table       | sampling parameters ]   req_index 0
          [ ...                                  | ...               | ...                 ]   req_index 1
          [ padding rows of CUDA graphs          | the padding block | greedy              ]   padding_index

A sampled token is written behind its history on the device, where the next step reads it: the host need not have seen
it by then. Where drafts are verified, the device also keeps where each request goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mini_infer.attention.context import AttentionBatch
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import NO_DRAFT, Growth, StepPlan
from mini_infer.kernels import rows as definition
from mini_infer.kernels.pinned import to_device
from mini_infer.kernels.rows import PACKED, GatheredRows
from mini_infer.runtime.worker.step_input import Drafts, IntArray, Samples, StepInput

if TYPE_CHECKING:
    from mini_infer.core.config import EngineConfig
    from mini_infer.core.limits import Limits
    from mini_infer.runtime.sampling.sampler import Sampler

_ONE_TOKEN_AND_NO_GROWTH = np.array([[1], [-1]], dtype=np.int32)


class RequestStates:
    def __init__(
        self,
        max_num_seqs: int,  # one row more is kept for padding
        max_model_len: int,  # of a request, in tokens
        block_size: int,  # tokens a KV block
        num_params: int,  # int32 columns of sampling parameters
        device: torch.device,
        padding_block: int = 0,  # the KV block that padding rows write to
        lookahead: int = 0,  # tokens of padding that may stand behind the longest request's last one
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len + lookahead
        self.padding_index = max_num_seqs
        self.device = device
        self._padding_block = padding_block
        self._table = self.max_model_len + 1  # first column of the block table
        self._params = self._table + -(-self.max_model_len // block_size)
        self.width = self._params + num_params
        if (max_num_seqs + 1) * self.width >= 2**31:  # places in it are told as int32
            raise ConfigError(
                f"scheduler.max_num_seqs={max_num_seqs} requests of up to {max_model_len} tokens take a table of "
                f"{4 * max_num_seqs * self.width / 2**30:.1f} GiB, of 8 that there can be: lower it, or "
                "model.max_model_len"
            )
        self.rows = torch.zeros((max_num_seqs + 1, self.width), dtype=torch.int32, device=device)
        self.rows[self.padding_index, self._table : self._params] = padding_block
        self.history = self.rows[:, : self._table]
        self._flat = self.rows.view(-1)
        self._fill_up = lookahead > 0  # tokens of padding find the padding block where a request has none
        self._next_starts = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._packed = torch.zeros(PACKED * max_num_seqs, dtype=torch.int32, device=device)
        self._views: dict[int, Tensor] = {}

    @classmethod
    def of(cls, config: EngineConfig, limits: Limits, sampler: Sampler) -> RequestStates:
        """Padding rows write to the block behind those that the scheduler knows."""
        sizes = config.scheduler.max_num_seqs, limits.max_model_len, config.cache.block_size, sampler.num_params
        return cls(*sizes, sampler.device, padding_block=limits.num_blocks, lookahead=config.speculation.most)

    def send(self, *arrays: IntArray | NDArray[np.bool_]) -> list[Tensor]:
        """The arrays as int32 tensors on the device, in one copy, which nobody waits for."""
        joined = to_device(np.concatenate(arrays).astype(np.int32, copy=False), self.device)
        return list(joined.split([len(array) for array in arrays]))

    # --- what changed ---------------------------------------------------------------------------------------------

    def apply(
        self, plan: StepPlan, param_rows: Sequence[IntArray] = (), growths: Sequence[Growth] | None = None
    ) -> None:
        """Takes in the plan's admissions, with a row of sampling parameters each, drafts and grown block tables: the
        plan's, or the `growths` that are given."""
        growths = plan.growths if growths is None else growths
        if not (plan.admissions or plan.drafts or growths):
            return
        places: list[IntArray] = []
        values: list[IntArray | Sequence[int]] = []

        def write(req_index: int, column: int, numbers: IntArray | Sequence[int]) -> None:
            first = req_index * self.width + column
            places.append(np.arange(first, first + len(numbers)))
            values.append(numbers)

        for admission, params in zip(plan.admissions, param_rows, strict=True):
            blocks = admission.block_table
            if self._fill_up:
                blocks = blocks + [self._padding_block] * (self._params - self._table - len(blocks))
            write(admission.req_index, 0, admission.token_ids)
            write(admission.req_index, self._table, blocks)
            write(admission.req_index, self._params, params)
        # Where a row follows drafts that are not read yet, a place for others is not known: there any tokens will do.
        for row, drafts in plan.drafts.items() if not plan.following else ():
            write(plan.req_indices[row], plan.starts[row] + 1, drafts)
        for req_index, first, blocks in growths:
            write(req_index, self._table + first, blocks)
        if places:
            where, what = self.send(np.concatenate(places), np.concatenate(values))
            self._flat.index_copy_(0, where.long(), what)

    # --- a step of any rows ---------------------------------------------------------------------------------------

    def build(self, plan: StepPlan, sampled: Samples | None = None, sources: IntArray | None = None) -> StepInput:
        """The input of any step, its shapes being those of the plan, whose changes have been applied. `sources` [S] are
        those of Drafts; None: nothing random proposed any."""
        sampled = sampled or Samples.of(plan)
        req_indices, starts, counts = np.array(plan.req_indices), np.array(plan.starts), np.array(plan.counts)
        seq_lens, query_starts = starts + counts, np.concatenate(([0], np.cumsum(counts)))
        shifts = (
            starts - query_starts[:-1]
        )  # [R]: of each row, from a token's place in the step to that in its sequence
        positions = np.arange(query_starts[-1]) + np.repeat(shifts, counts)
        tokens_before = sampled.positions - 1 - shifts[sampled.rows]
        numbers = [req_indices, seq_lens, query_starts, np.repeat(req_indices, counts), positions]
        numbers += [tokens_before, sampled.req_indices, sampled.positions]
        most_samples = 1
        if plan.num_drafts:
            firsts = np.flatnonzero(sampled.places() == 0)
            ends = np.append(firsts, len(sampled.rows))
            most_samples = int(np.diff(ends).max(initial=1))
            sources = np.full(len(sampled.rows), NO_DRAFT) if sources is None else sources
            numbers += [sampled.req_indices[firsts], ends, sampled.have_drafts(), sources]
        rows32, lens32, starts32, *sent = self.send(*numbers)
        token_owners, places, tokens, sampled_indices, sampled_places = (part.long() for part in sent[:5])
        sampled_flat = sampled_indices * self.width + sampled_places
        sampling, sample_starts, drafts = None, None, None
        if plan.num_drafts:
            sampling, sample_starts, has_draft, drawn_from = sent[5:]
            standing = self._flat.index_select(0, sampled_flat).long()
            drafts = Drafts(standing.where(has_draft != 0, NO_DRAFT), drawn_from.long())
        block = places // self.block_size
        blocks = self._flat.index_select(0, token_owners * self.width + self._table + block)
        width = -(-int(seq_lens.max(initial=1)) // self.block_size)
        n, alike = plan.num_decode_rows, plan.num_decode_rows
        if plan.num_drafts and plan.counts[0] < plan.counts[n - 1]:
            alike = bisect_right(plan.counts, 1, hi=n)  # rows with drafts go with prompts, which may have any length
        batch = AttentionBatch.of_rows(
            places,
            blocks * self.block_size + (places - block * self.block_size),  # slots
            self.rows[:, self._table : self._table + width].index_select(0, rows32),  # block tables
            starts32,
            lens32,
            num_decode_rows=alike,
            host_query_starts=query_starts,
            host_seq_lens=seq_lens,
        )
        return StepInput(
            batch=batch,
            token_ids=self._flat.index_select(0, token_owners * self.width + places).long(),
            sampled_tokens=tokens,
            param_rows=self.rows[:, self._params :].index_select(0, sampled_indices),
            sampled_positions=sampled_places,
            places=sampled_flat,
            sampling=sampling,
            sample_starts=sample_starts,
            most_samples=most_samples,
            drafts=drafts,
            owners=token_owners,
        )

    # --- a step of rows alone: one token each, or as many as there are drafts -----------------------------------------

    def pack_rows(self, plan: StepPlan, num_rows: int, first: int = 0, growths: Sequence[Growth] = ()) -> None:
        """Sends the plan's decode rows from `first` on, filled up with padding rows, to where `build_rows` finds them,
        with `growths` as `small_growths` gives them. All else that the plan brings must have been applied."""
        n = plan.num_decode_rows - first
        packed = np.empty((PACKED, num_rows), dtype=np.int32)
        packed[0, :n], packed[0, n:] = plan.req_indices[first : first + n], self.padding_index
        packed[1, :n], packed[1, n:] = plan.starts[first : first + n], 0
        packed[2:4] = _ONE_TOKEN_AND_NO_GROWTH
        if plan.num_drafts:
            packed[2, :n] = plan.counts[first : first + n]
        if plan.following:
            packed[1, [row - first for row in plan.following]] = -1  # the device knows where they go on
        if growths:
            req_indices, columns, blocks = zip(*growths, strict=True)
            row_of = np.empty(self.padding_index, dtype=np.int64)
            row_of[packed[0, :n]] = np.arange(n)
            rows = row_of[list(req_indices)]
            packed[3, rows], packed[4, rows] = columns, [taken[0] for taken in blocks]
        to_device(packed, self.device, out=self._packed_rows(num_rows))

    def _packed_rows(self, num_rows: int) -> Tensor:
        """[PACKED, num_rows] int32, always at the same place. Views are kept: to make one takes the host a while."""
        if num_rows not in self._views:
            self._views[num_rows] = self._packed[: PACKED * num_rows].view(PACKED, num_rows)
        return self._views[num_rows]

    def build_rows(self, num_rows: int, query_len: int, shift: int = 0, drafting: bool = False) -> StepInput:
        """The input of a step of the packed rows, made on the device: shapes depend on num_rows and query_len only, so
        that it can be captured in a CUDA graph. Tokens that a row has too few of are padding: what they write is
        written over before anybody reads it.

        Args:
            shift: added to the first positions.
            drafting: the last token of each row samples, greedily where the request brings a seed. Else all do.
        """
        packed = self._packed_rows(num_rows)
        rows = GatheredRows(
            *self._kernels.gather_rows(
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
            real_counts=None if drafting or query_len == 1 else packed[2],
        )
        return StepInput(
            batch=batch,
            token_ids=rows.token_ids,
            sampled_tokens=last if drafting and query_len > 1 else None,
            param_rows=rows.param_rows,
            sampled_positions=rows.sampled_positions,
            places=rows.places,
            sampling=packed[0],
            sample_starts=query_starts,
            most_samples=query_len,
            drafts=None if drafting or query_len == 1 else Drafts(rows.drafts, rows.sources),
            owners=packed[0],
        )

    def _row_ends(self, num_rows: int, query_len: int) -> tuple[Tensor, Tensor]:
        """Where rows begin [R + 1] int32, and their last tokens [R] int64. Kept: a graph knows their addresses."""
        if (num_rows, query_len) not in self._ends:
            starts = torch.arange(num_rows + 1, device=self.device) * query_len
            self._ends[num_rows, query_len] = starts.int(), starts[1:] - 1
        return self._ends[num_rows, query_len]

    # --- what a step leaves ---------------------------------------------------------------------------------------

    def settle(self, step: StepInput, token_ids: Tensor, rate: float | None, vocab_size: int) -> None:
        """Writes the tokens [S] that were picked behind their rows' tokens, and where each row goes on, of a step of
        packed rows or with drafts. With a stated `rate` of acceptance it changes them."""
        drafts = None if step.drafts is None else step.drafts.token_ids
        self._kernels.settle_rows(
            self.rows, self._next_starts, step.sampling, step.sample_starts, step.sampled_positions, drafts, token_ids,
            most=step.most_samples, params=self._params, rate=rate, vocab_size=vocab_size,
        )  # fmt: skip

    def restore_drafts(self, step: StepInput) -> None:
        """Puts the drafts back where `settle` wrote the tokens that were picked."""
        if step.drafts is not None:
            drafts, settled = step.drafts.token_ids, self._flat.index_select(0, step.places)
            self._flat.index_copy_(0, step.places, drafts.int().where(drafts != NO_DRAFT, settled))

    def write(self, sampled: Samples, token_ids: Tensor) -> None:
        """Writes tokens [S] that another process has sampled behind their rows' tokens."""
        (places,) = self.send(sampled.req_indices * self.width + sampled.positions)
        self._flat.index_copy_(0, places.long(), token_ids.int())

    def append(self, step: StepInput, token_ids: Tensor) -> None:
        """Writes tokens [S] behind their rows' tokens."""
        self._flat.index_copy_(0, step.places, token_ids.int())

    @cached_property
    def _kernels(self) -> ModuleType:
        if self.device.type != "cuda":
            return definition
        from mini_infer.kernels import row_kernels  # it needs Triton, as does whoever samples on a GPU

        return row_kernels
