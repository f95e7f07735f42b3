"""Logits of the rows that ask for it, changed before a token is picked: biases, forbidden tokens, penalties, masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
