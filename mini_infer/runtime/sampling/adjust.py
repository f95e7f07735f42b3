"""Logits of the rows that ask for it, changed before a token is picked: biases, forbidden tokens, penalties, masks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.request import SamplingParams
from mini_infer.kernels.sampling.draw import NUM_PARAMS, Array

ALWAYS = np.iinfo(np.int64).max
Send = Callable[[Array], Tensor]
_NO_BIASES: tuple[Array, Array] = (np.empty(0, np.int64), np.empty(0, np.float32))
_COLUMNS = np.dtype(
    [
        ("penalised", np.bool_),
        ("biased", np.bool_),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("prompt_len", np.int64),
        ("min_len", np.int64),  # prompt and output tokens before which no stop token may come
    ]
)


@dataclass(frozen=True, eq=False)
class Penalties:
    """Of A rows. Tensors lie on the device of the logits."""

    req_indices: Tensor  # [A] int64
    prompt_lens: Tensor  # [A] int64
    longest: int  # tokens in the longest row's history
    factors: Tensor  # [3, A, 1] float32: repetition, presence, frequency


@dataclass(frozen=True, eq=False)
class Adjustment:
    """A rows whose logits are changed before a token is picked. Tensors lie on the device of the logits."""

    rows: Tensor  # [A] int64, within the batch
    positions: Tensor  # [A] int64: tokens in each row's history
    bias_places: Tensor | None  # flat indices into the rows' scores, none twice
    biases: Tensor | None  # float32, one a place
    banned: Tensor | None  # flat indices into the rows' scores
    penalties: Penalties | None
    mask: Tensor | None  # [A, bytes] uint8: bit i, from the lowest of the first byte on, lets token i be picked
    param_rows: Tensor  # [A, NUM_PARAMS] int32


class Adjustments:
    """What each request asks to have changed, on the host."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._columns = np.zeros(max_num_seqs, _COLUMNS)
        self._stop_ids: list[Array] = [np.empty(0, np.int64)] * max_num_seqs
        self._biases: list[tuple[Array, Array]] = [_NO_BIASES] * max_num_seqs  # token ids, what is added to each

    def admit(self, req_index: int, params: SamplingParams, prompt_len: int, stop_ids: Collection[int]) -> int:
        """Gives `req_index` to a request. Returns the position from which on nothing of its logits is changed."""
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        row = self._columns[req_index]
        row["penalised"] = penalties != (1, 0, 0)
        row["repetition"], row["presence"], row["frequency"] = penalties
        row["biased"] = bool(params.biases)
        row["prompt_len"] = prompt_len
        row["min_len"] = prompt_len + params.min_tokens if stop_ids else 0
        self._stop_ids[req_index] = np.array([i for i in sorted(stop_ids) if 0 <= i < self._vocab_size], np.int64)
        self._biases[req_index] = _NO_BIASES
        if params.biases:
            ids, values = zip(*params.biases, strict=True)
            self._biases[req_index] = (np.array(ids, np.int64), np.array(values, np.float32))
        return ALWAYS if row["penalised"] or row["biased"] else int(row["min_len"])

    def of(
        self, req_indices: Array, positions: Array, masks: Mapping[int, bytes], params: Array, send: Send
    ) -> Adjustment | None:
        """What is changed in a batch; None for nothing.

        Args:
            req_indices, positions: [S], of its rows: whose, and tokens before the one that is picked.
            masks: row -> bits of the tokens that it may pick.
            params: of all requests, draw.PARAM_COLUMNS.
        """
        columns = self._columns.take(req_indices)
        early = positions < columns["min_len"]
        adjusted = early | columns["penalised"] | columns["biased"]
        adjusted[list(masks)] = True
        rows = np.flatnonzero(adjusted)
        if not rows.size:
            return None
        width = padded(self._vocab_size)
        banned = [
            i * width + self._stop_ids[req_indices[row]]
            for i, row in enumerate(rows)
            if early[row] and row not in masks
        ]
        biased = [(i, *self._biases[req_indices[row]]) for i, row in enumerate(rows) if columns["biased"][row]]
        own = params.take(req_indices[rows]).view(np.int32).reshape(-1, NUM_PARAMS)
        return Adjustment(
            rows=send(rows),
            positions=send(positions[rows]),
            bias_places=send(np.concatenate([i * width + ids for i, ids, _ in biased])) if biased else None,
            biases=send(np.concatenate([values for _, _, values in biased])) if biased else None,
            banned=send(np.concatenate(banned)) if banned else None,
            penalties=_penalties(req_indices[rows], positions[rows], columns.take(rows), send),
            mask=send(self._mask(rows, req_indices, early, masks)) if masks else None,
            param_rows=send(own),
        )

    def _mask(self, rows: Array, req_indices: Array, early: Array, masks: Mapping[int, bytes]) -> Array:
        """[rows, bytes] uint8. Stop tokens that come too early are left out, unless the grammar has nothing else."""
        mask = np.full((len(rows), -(-self._vocab_size // 8)), 0xFF, np.uint8)
        for i, row in enumerate(rows.tolist()):
            if row not in masks:
                continue
            own = mask[i]
            own[:] = np.frombuffer(masks[row], np.uint8)
            if early[row]:
                rest, stop_ids = own.copy(), self._stop_ids[req_indices[row]]
                np.bitwise_and.at(rest, stop_ids // 8, ~(1 << stop_ids % 8).astype(np.uint8))
                own[:] = rest if rest.any() else own
        return mask


def _penalties(req_indices: Array, positions: Array, columns: Array, send: Send) -> Penalties | None:
    if not columns["penalised"].any():
        return None
    factors = np.stack([columns["repetition"], columns["presence"], columns["frequency"]])[:, :, None]
    return Penalties(send(req_indices), send(columns["prompt_len"]), int(positions.max()), send(factors))


def padded(vocab_size: int) -> int:
    """Columns of adjusted scores: at least one more than there are tokens, and rows as aligned as those of logits."""
    return vocab_size // 16 * 16 + 16


def adjust(logits: Tensor, a: Adjustment, history: Tensor) -> Tensor:
    """The adjusted rows' scores, float32 [A, V]."""
    vocab_size = logits.shape[1]
    scores = logits.new_empty((len(a.rows), padded(vocab_size)), dtype=torch.float32)
    scores[:, :vocab_size] = logits.index_select(0, a.rows)
    if a.bias_places is not None and a.biases is not None:
        scores.view(-1).index_add_(0, a.bias_places, a.biases)
    if a.banned is not None:
        scores.view(-1).index_fill_(0, a.banned, -torch.inf)
    if a.penalties is not None:
        _penalise(scores, vocab_size, a.positions, a.penalties, history)
    if a.mask is not None:
        bits = a.mask[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
        scores[:, :vocab_size].masked_fill_(bits.flatten(1)[:, :vocab_size] == 0, -torch.inf)
    return scores[:, :vocab_size]


def _penalise(scores: Tensor, nowhere: int, positions: Tensor, penalties: Penalties, history: Tensor) -> None:
    """Repetition as in Keskar et al. 2019 (arXiv:1909.05858), over prompt and output; presence and frequency as
    in the OpenAI API, over the output. A repeated token is written several times, but with one and the same value;
    what does not count goes to the column `nowhere`, behind the tokens."""
    tokens = history[:, : penalties.longest].index_select(0, penalties.req_indices).long()
    place = torch.arange(penalties.longest, device=scores.device)
    known = place < positions[:, None]
    output = known & (place >= penalties.prompt_lens[:, None])
    repetition, presence, frequency = penalties.factors

    seen = tokens.where(known, nowhere)
    values = scores.gather(1, seen)
    scores.scatter_(1, seen, torch.where(values < 0, values * repetition, values / repetition))
    new = tokens.where(output, nowhere)
    scores.scatter_(1, new, scores.gather(1, new) - presence)
    scores.scatter_add_(1, new, (-frequency).expand_as(tokens))
