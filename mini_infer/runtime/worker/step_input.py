"""A step's input: on the host, what it samples; on the device, all that a model and the sampler read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mini_infer.attention.context import AttentionBatch
from mini_infer.core.plan import Growth, StepPlan

IntArray = NDArray[np.integer]
Value = TypeVar("Value")


class Samples(NamedTuple):
    """The S tokens that a step samples: one a row that samples at all, and one more for each draft that it verifies."""

    rows: IntArray  # [S] of the plan, ascending
    req_indices: IntArray  # [S]
    positions: IntArray  # [S]: the place in its sequence of the token that is sampled

    @classmethod
    def of(cls, plan: StepPlan) -> Samples:
        ends = np.add(plan.starts, plan.counts)
        if plan.num_rows == plan.num_decode_rows and not plan.num_drafts:
            return cls(np.arange(plan.num_rows), np.array(plan.req_indices), ends)
        rows = np.flatnonzero(plan.samples)
        if not plan.num_drafts:
            return cls(rows, np.array(plan.req_indices)[rows], ends[rows])
        num_samples = np.ones(plan.num_rows, dtype=np.int64)
        num_samples[: plan.num_decode_rows] = plan.counts[: plan.num_decode_rows]
        counts = num_samples[rows]
        rows = np.repeat(rows, counts)
        until_last = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(rows))
        return cls(rows, np.array(plan.req_indices)[rows], ends[rows] - until_last)

    def by_place(self, by_row: Mapping[int, Value]) -> dict[int, Value]:
        """The same by place among the sampled tokens, of rows that sample one."""
        return {int(np.searchsorted(self.rows, row)): value for row, value in by_row.items()}

    def places(self) -> IntArray:
        """[S]: of each among its row's."""
        return np.arange(len(self.rows)) - np.searchsorted(self.rows, self.rows)

    def have_drafts(self) -> NDArray[np.bool_]:
        """[S]: whether a draft stands at its place, which another of its row is sampled behind."""
        return np.append(self.rows[1:] == self.rows[:-1], False)


class Drafts(NamedTuple):
    """What is to be verified at the places of S tokens."""

    token_ids: Tensor  # [S] int64: the draft that stands there, NO_DRAFT for none
    sources: Tensor  # [S] int64: row of the logits that it was drawn from, NO_DRAFT where nothing random drew it

    def at(self, places: Tensor | slice) -> Drafts:
        """Of some of the S."""
        return Drafts(self.token_ids[places], self.sources[places])


class StepInput(NamedTuple):
    """One step's batch on the device: R rows with T tokens in all, S tokens to sample. Complete when constructed."""

    batch: AttentionBatch
    token_ids: Tensor  # [T] int64
    sampled_tokens: Tensor | None  # [S] int64: index in T of the token before each; None: all T, in order
    param_rows: Tensor  # [S, num_params] int32, as the sampler encoded them
    sampled_positions: Tensor  # [S] int64: the place in its sequence of the token that is sampled
    places: Tensor  # [S] int64: where in the flat state the sampled token goes
    # Of packed rows, and where there are drafts:
    sampling: Tensor | None  # int32: req_indices of the rows that sample
    sample_starts: Tensor | None  # int32: where among S the tokens of each of them begin, and the last one's end
    most_samples: int  # of one row
    drafts: Drafts | None  # of all S; None: there are no drafts
    owners: Tensor  # req_indices that the T tokens belong to, each to as many neighbours

    def sampled(self, tokens: Tensor) -> Tensor:
        """Of something that each token has, [T, ...], what those before the sampled ones have: [S, ...]."""
        return tokens if self.sampled_tokens is None else tokens.index_select(0, self.sampled_tokens)


def small_growths(plan: StepPlan) -> Sequence[Growth]:
    """The plan's growths where each is a request's only one, and by one block; else none. They fit into packed rows."""
    growths = plan.growths
    small = all(len(blocks) == 1 for _, _, blocks in growths) and len({g.req_index for g in growths}) == len(growths)
    return growths if small else []
