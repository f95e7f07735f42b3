"""A step of rows alone: decode rows of one token each, or with drafts behind it.

    packed rows -> gather -> model -> logits -> sample -> settle

The same operations whatever is in the rows, so that they can be captured in a CUDA graph: shapes depend on the number
of rows and of tokens a row. A row has tokens [start .. start + count), and padding behind where others have more:

    req_index 4   t d d d       t: the last token, d: drafts
    req_index 7   t d . .       two tokens of padding: written over before anybody reads them
    padding       . . . .       a row of padding

Where each row starts may be known to the device alone (RequestStates.pack_rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_infer.runtime.sampling.logprobs import Logprobs
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.step_input import IntArray, Samples, StepInput


@dataclass(frozen=True, eq=False)
class DoneRows:
    """R rows of Q tokens, padding included."""

    step: StepInput
    logits: Tensor  # [R * Q, vocab_size]; of a stage before the last: the hidden states [R * Q, hidden_size]
    token_ids: Tensor  # [R * Q] int64: the token after each, if all drafts before it stand; there: none
    tokens_and_drafts: Tensor | None  # [2, R * Q] int64: those, and the drafts that stand there; None where Q is 1


class RowStep:
    """With a `rate` drafts are accepted at it, by a hash of (seed, position), whatever the target says: what comes out
    means nothing, what it costs does. Captured, the model needs `forward_eagerly` as well."""

    def __init__(self, model: Any, states: RequestStates, sampler: Sampler, rate: float | None = None) -> None:
        self._model, self._states, self._sampler, self._rate = model, states, sampler, rate

    def run(
        self, num_rows: int, query_len: int, draft_logits: Tensor | None = None, out: Tensor | None = None
    ) -> DoneRows:
        """Computes the packed rows. `draft_logits` are as the Drafter's `chain` gives them; where the call is captured,
        `out` [num_rows * query_len, vocab_size] is memory for the logits."""
        step = self._states.build_rows(num_rows, query_len)
        hidden = self._model.forward(step) if out is None else self._model.forward_eagerly(step)
        if not self._model.samples:
            return DoneRows(step, hidden, step.token_ids[:0], None)
        logits = self._model.compute_logits(hidden) if out is None else self._model.compute_logits(hidden, out=out)
        both = None
        if step.drafts is None:
            token_ids = self._sampler.main(logits, step.param_rows, step.sampled_positions)
        else:
            both = torch.stack((step.drafts.token_ids, step.drafts.token_ids))
            token_ids = both[0]
            rows = step.param_rows, step.sampled_positions
            token_ids.copy_(self._sampler.pick(logits, *rows, step.drafts, draft_logits))
        self.settle(step, token_ids)
        return DoneRows(step, logits, token_ids, both)

    def resample(
        self,
        done: DoneRows,
        sampled: Samples,
        real: IntArray | None,
        masks: Mapping[int, bytes],
        draft_logits: Tensor | None,
    ) -> Logprobs | None:
        """Picks the tokens again of rows that want more than `run` does, and returns the log-probabilities that are
        asked for. `real` [S] is where the plan's samples lie among the R * Q tokens, None where they are the first;
        `masks` are by place in `sampled`."""
        rare = self._sampler.rare(sampled.req_indices, sampled.positions, masks)
        if rare is None:
            return None
        self._states.restore_drafts(done.step)  # penalties count them, and settling wrote over them
        step = done.step
        at = slice(len(sampled.rows)) if real is None else self._states.send(real)[0].long()
        token_ids = done.token_ids[at]
        drafts = None if step.drafts is None else step.drafts.at(at)
        history = self._states.history
        logprobs = self._sampler.resample(done.logits[at], token_ids, rare, history, drafts, draft_logits)
        done.token_ids[at] = token_ids
        self.settle(step, done.token_ids)
        return logprobs

    def settle(self, step: StepInput, token_ids: Tensor) -> None:
        """Writes what was picked [S] into the history, and where each row goes on."""
        self._states.settle(step, token_ids, self._rate, self._sampler.vocab_size)


def real_tokens(counts: Sequence[int], query_len: int) -> IntArray:
    """Those of rows of query_len tokens that are not padding: flat indices, of `counts[i]` tokens of row i."""
    return np.flatnonzero((np.arange(query_len) < np.array(counts)[:, None]).ravel())
